"""Celery's configuration, the bootstep that runs our loop in a Celery worker, and tasks sent to other applications.

Start with: app.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
