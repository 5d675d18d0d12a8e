"""The network access that a node's workspaces may get, and the proxies that provide it.

Holds:
    - No workspace gets more than the operator's ceiling; with a ceiling, none gets the machine's whole network.
    - A proxy is tied only to its workspace host: like the host, it outlives the tool worker that started it, and it
      ends with the host. A dead proxy is replaced at the workspace's next opening.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from broker.contract import HostRule, parse_host_rules
from tool_worker.errors import EgressRefused, WorkspaceUnavailable
from tool_worker.sandbox import CONTROL_FD, EGRESS_LISTENER_FD, open_in_memory, open_private, spawn
from tool_worker.workspace.launch.host_connection import HostConnection
from tool_worker.workspace.launch.host_folder import HostFolder

EGRESS_PORT = 3128
"""Port of the proxy on the loopback interface of the sandbox."""
LEND_LIMIT_SECONDS = 10.0
DEFAULT_LIMIT_BYTES = 20 * 2**30


@dataclass(frozen=True, slots=True)
class EgressGate:
    """The network settings of a node's workspaces, made by its operator.

    Attributes:
        ceiling: Hosts that a workspace may reach; None for all hosts, including the machine's whole network.
        private: Reachable networks that are not public, in the format of `AddressRules.parse`.
        limit_bytes: Limit of one workspace's traffic, both directions together.
    """

    ceiling: tuple[HostRule, ...] | None = None
    private: tuple[str, ...] = ()
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def check(self, allow: Iterable[str], *, has_network: bool, is_confined: bool) -> None:
        """Check that this node allows the requested access.

        Raises:
            EgressRefused: The node does not allow it; the text names the host and the setting.
        """
        allow = tuple(allow)
        if allow and not is_confined:
            raise EgressRefused(
                "A list of allowed hosts has no effect without a sandbox.",
                remedy="Ask for a sandbox, or leave the list out.",
            )
        if self.ceiling is None or not is_confined:
            return
        if has_network:
            raise EgressRefused(
                "This node does not allow workspaces the whole network (DECKHANDS_EGRESS).",
                remedy="Name the hosts that are needed (`allow`).",
            )
        try:
            rules = parse_host_rules(allow)
        except ValueError as error:
            raise EgressRefused(f"The list of allowed hosts cannot be used: {error}.") from error
        for text, rule in zip(allow, rules, strict=True):
            if not any(wider.covers(rule) for wider in self.ceiling):
                raise EgressRefused(
                    f"This node does not allow workspaces the host {text} (DECKHANDS_EGRESS).",
                    remedy="Leave it out, or let the operator add it.",
                )

    async def ensure_proxy(self, folder: HostFolder, allow: Iterable[str], connection: HostConnection) -> int | None:
        """Start the proxy of a workspace if none is attached: the first time, or after the last one died.

        Returns:
            The process id of the new proxy; None if none was started.

        Raises:
            WorkspaceUnavailable: The proxy cannot be started; retryable.
            HostLost: The host ended.
        """
        if (await connection.ping()).has_egress:
            return None
        async with folder.hold_opening_lock():
            if (await connection.ping()).has_egress:
                return None
            try:
                # The proxy keeps this connection, and ends when the host closes it.
                with folder.connect() as control:
                    return await self._start(control, allow, folder)
            except OSError as error:
                raise WorkspaceUnavailable(f"No proxy of {folder.conversation_id} can be started: {error}.") from error

    async def _start(self, control: socket.socket, allow: Iterable[str], folder: HostFolder) -> int:
        lent = await asyncio.to_thread(_request_listener, control)
        try:
            settings = self.make_settings(allow)
            return start_proxy(control.fileno(), lent, settings, log=folder.egress_log, name=folder.conversation_id)
        finally:
            os.close(lent)

    def make_settings(self, allow: Iterable[str]) -> dict[str, object]:
        """Return the settings of a proxy."""
        return {"allow": list(allow), "private": list(self.private), "limit_bytes": self.limit_bytes}


def proxy_environment() -> dict[str, str]:
    """Return the environment variables that point a sandbox's programs to the proxy."""
    address = f"http://127.0.0.1:{EGRESS_PORT}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    found = {name: address for upper in names for name in (upper, upper.lower())}
    inside = "localhost,127.0.0.1,::1"
    return {**found, "NO_PROXY": inside, "no_proxy": inside, "NODE_USE_ENV_PROXY": "1"}


def start_proxy(control: int, listener: int, settings: Mapping[str, object], *, log: Path, name: str) -> int:
    """Start a proxy that ends when the other end of `control` is closed, and return its process id.

    Raises:
        OSError: The proxy cannot be started.
    """
    command = [sys.executable, "-I", "-m", "tool_worker.sandbox.egress", name]
    with ExitStack() as closing:
        source = open_in_memory(closing, json.dumps(settings).encode())
        written = open_private(closing, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return spawn(command, {0: source, 1: written, 2: written, CONTROL_FD: control, EGRESS_LISTENER_FD: listener})


def _request_listener(control: socket.socket) -> int:
    """Request a host's listening socket for proxy connections of its sandbox."""
    control.settimeout(LEND_LIMIT_SECONDS)
    try:
        control.sendall(b'{"op":"egress","request":0}\n')
        answer, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
    except OSError as error:
        raise WorkspaceUnavailable(f"The host lends no socket to a proxy: {error}.") from error
    if not descriptors:
        raise WorkspaceUnavailable(f"The host lends no socket to a proxy: {answer.decode('utf-8', 'replace')[:200]}")
    return descriptors[0]
