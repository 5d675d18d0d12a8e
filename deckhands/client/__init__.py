"""The Python client: submit, follow, control, read and delete conversations.

Start with: client.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
