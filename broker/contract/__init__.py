"""Events, actions and observations as frozen Pydantic models; conversation specifications; the codec.

Start with: events.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
