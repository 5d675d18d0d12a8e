"""Limits outgoing requests to providers: the environment's proxy, and the addresses that may be reached.

litellm makes its own requests to a hundred providers; `EgressGuard` restricts the addresses that it may connect to.

Holds: a proxy's URL in an error contains no credentials. Inside `within`, an httpx request goes to the address of the
settings (scheme, host and port) or to a public one. Redirects are not followed, because they would carry prompt and key
to any address. A name is looked up once, and the connection uses a checked address; this covers httpcore and aiohttp.
`broker.runtime.addresses` defines public addresses.
Does not: make requests; restrict requests outside of `within`, or those of the clouds' own login libraries. The names
of requests through the environment's proxy are resolved by that proxy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from types import ModuleType
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from broker.runtime import AddressRules
from controller_worker.providers.errors import LLMConfigError

PROXY_REMEDY = "Set HTTP_PROXY, HTTPS_PROXY or ALL_PROXY to an HTTP proxy such as http://host:3128, or set NO_PROXY."


def find_environment_proxy(url: str) -> str | None:
    """Return the environment's proxy for a URL (`HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`), or None."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    proxies = getproxies()
    if proxy_bypass(host) or _is_in_networks(parts.hostname or "", proxies.get("no", "")):
        return None
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None


def _is_in_networks(host: str, names: str) -> bool:
    """Return whether an address is among addresses (`::1`) and networks (`10.0.0.0/8`), as urllib cannot."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return False
    for name in names.split(","):
        with contextlib.suppress(ValueError):  # not a network
            if address in ipaddress.ip_network(name.strip().strip("[]"), strict=False):
                return True
    return False


def strip_login(proxy: str | None) -> tuple[str | None, str]:
    """Return a proxy's URL without credentials, for errors, and its login header; empty without one.

    Raises:
        LLMConfigError: the URL is invalid.
    """
    if proxy is None:
        return None, ""
    try:
        address = urlsplit(proxy)
        has_place = bool(address.hostname) and address.port != 0
    except ValueError:  # a bad port or bad brackets
        raise LLMConfigError("The proxy of the environment is not an address.", remedy=PROXY_REMEDY) from None
    shown = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()
    if address.scheme not in ("http", "https") or not has_place:
        raise LLMConfigError(f"The proxy {shown} of the environment cannot be used.", remedy=PROXY_REMEDY)
    return shown, make_login_header(address)


def make_login_header(address: SplitResult) -> str:
    """Return the header for the credentials in a URL; empty if there are none."""
    if address.username is None:
        return ""
    pair = f"{unquote(address.username)}:{unquote(address.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


LOCAL_NAMES = ("localhost", ".localhost", ".local", ".internal")

_rules: ContextVar[EgressGuard | None] = ContextVar("egress", default=None)


class EgressBlocked(OSError):
    """A request would go to an address that is neither in the settings nor public."""


class EgressGuard:
    """The addresses allowed to the requests of one call.

    Args:
        base_url: the address of the settings; None: public addresses only.
        find_proxy: returns the environment's proxy for a URL; a caller with many calls caches it.

    Attributes:
        refused: the host of a refused request; empty if none was refused.
    """

    def __init__(self, base_url: str | None, find_proxy: Callable[[str], str | None] = find_environment_proxy) -> None:
        self.refused = ""
        self._find_proxy = find_proxy
        self._own = _parse_origin(base_url) if base_url else None
        self._known = set[tuple[str, int | None]]()  # hosts and ports that may have a private address

    @contextmanager
    def within(self) -> Iterator[None]:
        """Apply the rules to requests in this context, and in threads that get a copy of it."""
        token = _rules.set(self)
        try:
            yield
        finally:
            _rules.reset(token)

    def check_name(self, url: str) -> None:
        """Check a host by its name alone.

        Raises:
            EgressRefused: the name belongs to this machine or this network.
        """
        _, host, port = place = _parse_origin(url)
        if (proxy := self._find_proxy(url)) is not None:
            self._known.add(_parse_origin(proxy)[1:])
        if place == self._own:
            self._known.add((host, port))
        elif not _is_address(host):
            if "." not in host or host.endswith(LOCAL_NAMES):
                self._refuse(host)
        elif not AddressRules().may_reach(host):
            self._refuse(host)

    def check_addresses(self, host: str, port: int | None, addresses: Iterable[str]) -> None:
        """Check the addresses that a host resolves to.

        Raises:
            EgressRefused: one of them is not public.
        """
        if not self.knows(host, port) and not all(map(AddressRules().may_reach, addresses)):
            self._refuse(host)

    def knows(self, host: str, port: int | None) -> bool:
        """Return whether it is the configured server or a proxy."""
        return (host.lower().rstrip("."), port) in self._known

    def _refuse(self, host: str) -> None:
        self.refused = host
        raise EgressBlocked(f"{host} is not a public address, and the model's settings do not name it.")


def install_guard(httpx: ModuleType) -> None:
    """Make httpx's clients and their connection libraries apply the context's rules. Idempotent."""
    import aiohttp
    import httpcore

    for kind, name, guarded in (
        (httpx.AsyncClient, "send", _guard_send),
        (httpx.Client, "send", _guard_send),
        (httpcore.AnyIOBackend, "connect_tcp", partial(_guard_connect, httpcore)),
        (httpcore.SyncBackend, "connect_tcp", partial(_guard_connect_in_thread, httpcore)),
        (aiohttp.TCPConnector, "_resolve_host", _guard_resolve),
    ):
        if not getattr(getattr(kind, name), "asks_for_rules", False):
            setattr(kind, name, guarded(getattr(kind, name)))
            getattr(kind, name).asks_for_rules = True


def _guard_send(send: Any) -> Any:
    """Wrap a client's `send`, which may be a coroutine function, to check names."""

    @wraps(send)
    def send_checked(self: Any, request: Any, **options: Any) -> Any:
        if (rules := _rules.get()) is None:
            return send(self, request, **options)
        rules.check_name(str(request.url))
        return send(self, request, **options | {"follow_redirects": False})

    return send_checked


def _guard_connect(httpcore: ModuleType, connect: Any) -> Any:
    @wraps(connect)
    async def connect_checked(self: Any, host: str, port: int, timeout: float | None = None, **options: Any) -> Any:  # noqa: ASYNC109
        if (rules := _rules.get()) is None or rules.knows(host, port):
            return await connect(self, host, port, timeout=timeout, **options)
        try:
            async with asyncio.timeout(timeout):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        addresses = [str(entry[4][0]) for entry in found]
        rules.check_addresses(host, port, addresses)
        for address in addresses[:-1]:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await connect(self, address, port, timeout=timeout, **options)
        return await connect(self, addresses[-1], port, timeout=timeout, **options)

    return connect_checked


def _guard_connect_in_thread(httpcore: ModuleType, connect: Any) -> Any:
    @wraps(connect)
    def connect_checked(self: Any, host: str, port: int, timeout: float | None = None, **options: Any) -> Any:
        if (rules := _rules.get()) is None or rules.knows(host, port):
            return connect(self, host, port, timeout=timeout, **options)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        addresses = [str(entry[4][0]) for entry in found]
        rules.check_addresses(host, port, addresses)
        for address in addresses[:-1]:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return connect(self, address, port, timeout=timeout, **options)
        return connect(self, addresses[-1], port, timeout=timeout, **options)

    return connect_checked


def _guard_resolve(resolve: Any) -> Any:
    """Wrap a connector's look-up to check its addresses.

    A cached address may come from a call with other rules.
    """

    @wraps(resolve)
    async def resolve_checked(self: Any, host: str, port: int, *arguments: Any, **options: Any) -> Any:
        found = await resolve(self, host, port, *arguments, **options)
        if (rules := _rules.get()) is not None:
            rules.check_addresses(host, port, [entry["host"] for entry in found])
        return found

    return resolve_checked


def _parse_origin(url: str) -> tuple[str, str, int | None]:
    """Return the scheme, the host and the port of an address."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if not host.isascii():
        with suppress(UnicodeError):
            host = host.encode("idna").decode()
    return parts.scheme, host, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
