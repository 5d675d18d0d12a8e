"""Operation of a cluster: jobs, schedules, webhooks, metrics, diagnosis.

Start with: jobs/table.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
