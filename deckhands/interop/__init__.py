"""Interoperation: recordings of OpenHands, its headless mode, solvers of inspect_ai.

Start with: openhands/trajectory_import.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
