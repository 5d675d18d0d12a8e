"""The secrets of conversations: kept encrypted, given to one command at a time, masked in everything else.

Start with: secrets.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
