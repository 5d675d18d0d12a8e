"""The compiled halves of `signal` and `socket` under those names, and a way to call the C library without `ctypes`.

The Python halves build enumerations and classes, and import `enum`, `re` and `functools`: together 14 ms of a host's
start.

Does not: offer the parts that only the Python halves have, such as `socket.accept`.
"""

from __future__ import annotations

import _ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
else:
    import _signal as signal
    import _socket as socket

__all__ = ["accept", "c_library", "signal", "socket"]

_C_LIBRARY = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None: this program itself


def accept(listener: socket.socket) -> socket.socket:
    """Accept a connection.

    Raises:
        OSError: no connection is pending, or no descriptor is left.
    """
    descriptor, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001  (all that `accept` calls)
    return socket.socket(fileno=descriptor)


def c_library(function: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library.

    Args:
        arguments: Numbers of the size of an `int`; bytes, passed as a pointer and only read; or None for a null
            pointer.

    Returns:
        The function's return value as an `int`. `errno` is not available.
    """
    return int(_ctypes.call_function(_ctypes.dlsym(_C_LIBRARY, function), arguments))
