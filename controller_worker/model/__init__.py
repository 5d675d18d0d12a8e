"""The chain of one model call: question, permit, cache, batch, fallback, provider.

Start with: model_call.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
