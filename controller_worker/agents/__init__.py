"""Agents: what the model reads, which tools it gets, and what its tool calls mean.

Start with: codeact.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
