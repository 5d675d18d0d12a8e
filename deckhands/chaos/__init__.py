"""Chaos: causes faults in a running cluster under a known workload, and checks every log that they touched.

Start with: chaos.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
