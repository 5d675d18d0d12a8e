"""Ownership, heartbeats, wake-ups, action streams, and file transfers between workers.

Start with: ownership.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
