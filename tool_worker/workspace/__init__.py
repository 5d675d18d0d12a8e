"""The workspaces of a node: opened, checked, launched, checkpointed, and their files.

Start with: workspaces.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
