"""How dangerous an action is, and whether a person is asked before it runs.

Start with: assessment.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
