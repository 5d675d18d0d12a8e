"""The basics of every process: settings, clock, ids, errors, child processes, failpoints.

Start with: settings.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
