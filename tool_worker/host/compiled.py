"""The compiled halves of `signal` and `socket`, under those names.

Their other halves make enumerations of all constants, and bring `enum`, `re` and `functools` with them: together 10 ms
of the time in which a host starts.

Does not: have what only the other halves have, such as `socket.accept`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
else:
    import _signal as signal
    import _socket as socket

__all__ = ["accepted", "signal", "socket"]


def accepted(listener: socket.socket) -> socket.socket:
    """Accept a connection.

    Raises:
        OSError: nobody waits any more, or there is no descriptor left.
    """
    descriptor, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001  (all that `accept` calls)
    return socket.socket(fileno=descriptor)
