"""Agents: their prompts, their tools, and the translation of their tool calls.

Start with: codeact.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
