"""The connection to Valkey or Redis, the names of all keys, the atomic functions' deployment, the embedded server.

Start with: store.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
