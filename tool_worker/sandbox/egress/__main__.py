"""Starts the proxy of a workspace: `python -I -m tool_worker.sandbox.egress <conversation id>`.

Its rules come as JSON on standard input. It serves a listening socket that was created inside the sandbox, through
which alone programs can reach it. Its outgoing connections use the machine's network.

Holds: it ends exactly when the program at the other end of its control socket ends, which lives as long as the
workspace's processes. Refusals are reported to that socket and, up to a limit, to its log.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys

from broker.contract import parse_host_rules
from broker.runtime import AddressRules
from tool_worker.sandbox.egress import CONTROL_FD, EGRESS_LISTENER_FD
from tool_worker.sandbox.egress.proxy import EgressProxy, EgressRules

LOGGED_REFUSALS = 1000


class RefusalReporter:
    """Reports refusals to the control socket and the log."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._count = 0

    def __call__(self, target: str, why: str) -> None:
        """Report one refusal. A report that cannot be sent without waiting is dropped."""
        self._count += 1
        if self._count > LOGGED_REFUSALS:
            return
        line = json.dumps({"op": "refused", "target": target[:300], "why": why[:300]}) + "\n"
        sys.stderr.write(line)
        try:
            self._control.send(line.encode(), socket.MSG_NOSIGNAL)
        except OSError:
            return


async def serve() -> None:
    """Serve until the other end of the control socket closes."""
    settings = json.load(sys.stdin)
    rules = EgressRules(
        hosts=parse_host_rules(settings["allow"]),
        addresses=AddressRules.parse(settings["private"]),
        limit_bytes=settings["limit_bytes"],
    )
    control = socket.socket(fileno=CONTROL_FD)
    control.setblocking(False)
    listener = socket.socket(fileno=EGRESS_LISTENER_FD)
    listener.setblocking(False)
    await EgressProxy(rules, RefusalReporter(control)).serve(listener)
    loop = asyncio.get_running_loop()
    while await loop.sock_recv(control, 4096):
        pass


def main() -> None:
    """Serve, then exit without output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(serve())
    except ConnectionError:
        return


if __name__ == "__main__":
    main()
