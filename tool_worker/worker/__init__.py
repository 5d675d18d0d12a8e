"""The tool worker: runs each action from its streams once, and appends the observation.

Start with: consumer.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
