"""Takes actions from streams, runs each once, appends observations; identity and limits of the node.

Start with: consumer.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
