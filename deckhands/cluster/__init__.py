"""An embedded cluster on this machine: a private store and worker processes that are restarted when they die.

Start with: embedded_cluster.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
