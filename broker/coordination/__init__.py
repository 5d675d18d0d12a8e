"""Who works on what: ownership, heartbeats, wake-ups, action streams, files on their way between workers.

Start with: ownership.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
