"""The server: a cluster over HTTP, with OpenAPI, streams of events, and API keys.

Start with: application.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
