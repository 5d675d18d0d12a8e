"""The tools: built-in ones, custom tools, MCP servers.

Start with: registry.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
