"""The loop around the core: claims conversations, performs effects, appends the outcome.

Start with: conversation_loop.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
