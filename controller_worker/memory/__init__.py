"""The log as messages for a model: the View, turns, observations as text.

Start with: conversation_memory.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
