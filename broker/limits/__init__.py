"""Limits shared by all workers: quotas of providers, budgets, batches of model calls.

Start with: governor.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
