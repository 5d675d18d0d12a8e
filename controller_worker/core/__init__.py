"""The pure core: fold a log into a state and compute the next effect.

Start with: controller.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
