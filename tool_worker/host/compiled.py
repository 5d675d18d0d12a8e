"""The compiled halves of `signal` and `socket`, under those names, and of `ctypes` what calls the C library.

Their other halves make enumerations of all constants and classes for all types, and bring `enum`, `re` and `functools`
with them: together 14 ms of the time in which a host starts.

Does not: have what only the other halves have, such as `socket.accept`.
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

__all__ = ["accepted", "c_library", "signal", "socket"]

_C_LIBRARY = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None: this program itself


def accepted(listener: socket.socket) -> socket.socket:
    """Accept a connection.

    Raises:
        OSError: nobody waits any more, or there is no descriptor left.
    """
    descriptor, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001  (all that `accept` calls)
    return socket.socket(fileno=descriptor)


def c_library(function: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library.

    Args:
        arguments: Numbers of the size of an `int`, the beginning of bytes that are only read, or no address.

    Returns:
        What it returns as an `int`; what it has set `errno` to is not known.
    """
    return int(_ctypes.call_function(_ctypes.dlsym(_C_LIBRARY, function), arguments))
