"""Model providers behind one protocol: configuration, wires, backends, prices, errors.

Start with: llm.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
