"""The public interface of Deckhands: the Python client and the command line.

`Client` speaks to a store; `Summary` is the result of a conversation. Both are imported when they are first used,
because `deckhands --help` needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deckhands.client.client import Client
    from deckhands.reading.summary import Summary

__all__ = ["Client", "Summary"]

_HOMES = {"Client": "deckhands.client.client", "Summary": "deckhands.reading.summary"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
