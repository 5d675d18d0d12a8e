"""Where a library that makes its own requests may send them: litellm, which speaks to a hundred providers.

Holds: within `within`, a request of httpx goes to the address of the settings or to a public one, and no redirect is
followed: it would carry prompt and key to wherever it points. What is public `broker.runtime.addresses` says.
Does not: concern requests outside of it, or those of other libraries, by which clouds' own libraries log in.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from broker.runtime.addresses import AddressRules
from controller_worker.providers.wires.environment_proxy import environment_proxy

LOCAL_NAMES = ("localhost", ".localhost", ".local", ".internal")

_rules: ContextVar[Egress | None] = ContextVar("egress", default=None)


class EgressRefused(OSError):
    """A request would go to an address that the settings do not name and that is not public."""


class Egress:
    """Where the requests of one call may go.

    Args:
        base_url: the address of the settings; None: public addresses only.

    Attributes:
        refused: the host that a request was not sent to; empty: none.
    """

    def __init__(self, base_url: str | None) -> None:
        self.refused = ""
        self._own = (urlsplit(base_url).hostname or "").lower() if base_url else ""

    @contextmanager
    def within(self) -> Iterator[None]:
        """Apply the rules to what is sent in this context, and in threads that are given a copy of it."""
        token = _rules.set(self)
        try:
            yield
        finally:
            _rules.reset(token)

    def check_name(self, url: Any) -> bool:
        """Refuse a host by its name alone; return whether its addresses have to be looked at.

        Raises:
            EgressRefused: it is of this machine or this network.
        """
        host = str(url.host).lower().rstrip(".")
        if self._own and host == self._own:
            return False
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if "." not in host or host.endswith(LOCAL_NAMES):
                self._refuse(host)
            return environment_proxy(str(url)) is None  # a proxy looks up names itself
        if not AddressRules().may_reach(host):
            self._refuse(host)
        return False

    def check_addresses(self, url: Any, found: list[Any]) -> None:
        """Refuse a host for its addresses, as the resolver gives them.

        Raises:
            EgressRefused: one of them is not public.
        """
        if not all(AddressRules().may_reach(entry[4][0]) for entry in found):
            self._refuse(str(url.host))

    def _refuse(self, host: str) -> None:
        self.refused = host
        raise EgressRefused(f"{host} is not a public address, and the model's settings do not name it.")


def guard(httpx: ModuleType) -> None:
    """Make the clients of httpx ask for the rules of the context. Idempotent."""
    for kind, guarded in ((httpx.AsyncClient, _guarded), (httpx.Client, _guarded_in_thread)):
        if not getattr(kind.send, "asks_for_rules", False):
            kind.send = guarded(kind.send)
            kind.send.asks_for_rules = True


def _guarded(send: Any) -> Any:
    @functools.wraps(send)
    async def checked(self: Any, request: Any, **options: Any) -> Any:
        rules = _rules.get()
        if rules is None:
            return await send(self, request, **options)
        if rules.check_name(request.url):
            found = await asyncio.get_running_loop().getaddrinfo(request.url.host, None, type=socket.SOCK_STREAM)
            rules.check_addresses(request.url, found)
        return await send(self, request, **options | {"follow_redirects": False})

    return checked


def _guarded_in_thread(send: Any) -> Any:
    @functools.wraps(send)
    def checked(self: Any, request: Any, **options: Any) -> Any:
        rules = _rules.get()
        if rules is None:
            return send(self, request, **options)
        if rules.check_name(request.url):
            rules.check_addresses(request.url, socket.getaddrinfo(request.url.host, None, type=socket.SOCK_STREAM))
        return send(self, request, **options | {"follow_redirects": False})

    return checked
