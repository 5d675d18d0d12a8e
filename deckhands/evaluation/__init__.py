"""Evaluations: agents attempt a dataset on a cluster; their work is scored in fresh workspaces and reported.

Start with: evaluation.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
