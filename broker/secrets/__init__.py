"""The secrets of conversations: stored encrypted, given to one command at a time, masked everywhere else.

Start with: secrets.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
