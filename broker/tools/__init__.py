"""User-defined tools: their definition, their offers to controllers, Celery tasks as tools, plug-ins.

Start with: custom_tools.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
