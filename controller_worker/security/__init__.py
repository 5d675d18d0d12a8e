"""The risk of an action, and whether a user must confirm it before it runs.

Start with: assessment.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
