"""The sandbox's end of its egress proxy: a listening socket on the loopback, lent to the proxy outside.

A socket belongs to the network namespace in which it was created, whichever process holds it. So a proxy outside can
serve programs inside without a forwarder, and the sandbox needs no path to the proxy.

Holds: the socket stays open here as long as the host lives, so a dead proxy can be replaced; connections wait
meanwhile. There is one proxy at a time.
"""

from __future__ import annotations

import _struct as struct

from tool_worker.host.compiled import socket

BACKLOG = 128
KEPT_REFUSALS = 20


class HostEgress:
    """Lends the listening socket, and collects the proxy's refusals until the next result.

    Args:
        port: Port on the loopback; 0: this workspace has no egress.
    """

    def __init__(self, port: int) -> None:
        self._listener: socket.socket | None = None
        self._refused: list[str] = []
        self.proxy: object = None
        if port:
            self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(("127.0.0.1", port))
            self._listener.listen(BACKLOG)

    def lend(self, proxy: object, connection: socket.socket, line: bytes) -> bool:
        """Send a line with the listening socket to a proxy; return False if there is no socket to lend."""
        if self._listener is None:
            return False
        rights = struct.pack("i", self._listener.fileno())
        connection.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        self.proxy = proxy
        return True

    def forget(self, proxy: object) -> None:
        """Forget the proxy if this peer was the proxy."""
        if self.proxy is proxy:
            self.proxy = None

    def note(self, message: dict[str, object]) -> None:
        """Store a refusal, without duplicates and up to `KEPT_REFUSALS`."""
        text = str(message.get("why"))
        if text not in self._refused and len(self._refused) < KEPT_REFUSALS:
            self._refused.append(text)

    def take_refusals(self) -> list[str]:
        """Return and clear the refusals since the last call."""
        refused, self._refused = self._refused, []
        return refused
