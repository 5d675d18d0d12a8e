"""Celery's configuration, the bootstep with our event loop, and tasks sent to other applications.

Start with: app.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
