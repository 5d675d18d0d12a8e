"""The ingress: tasks arrive by Celery messages and by the inbox stream; outcomes leave as results and replies.

Start with: service.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
