"""An in-memory store that runs the real functions, for tests and simulations.

Start with: memory_store.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
