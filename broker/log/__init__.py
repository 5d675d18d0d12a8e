"""The event log of each conversation: append, read, follow, fork; blobs; the index of conversations.

Start with: event_log.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
