"""The workspaces of a node: opens, launches, checks and checkpoints them, and accesses their files.

Start with: workspaces.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
