"""Sandboxes for workspace hosts, their self-test, and the proxy for network access.

Start with: sandbox.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
