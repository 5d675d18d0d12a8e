"""Which hosts of the network a workspace may reach: `example.org`, `*.example.com:443`, `192.0.2.7:8080`, `*`.

A rule without a port means the ports 80 and 443; `*.example.com` does not mean `example.com` itself.

Holds: a name has one form, in which alone it is compared; a number in any notation but the plain one is no host.
Does not: look names up. Whether an address may be connected to is decided where the connection is made.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_PORTS = frozenset({80, 443})
MAX_HOSTS = 100
MAX_NAME_CHARS = 253

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
# The last label of a name is never a number: what looks like one would be read as an address by the resolver.
_NAME = re.compile(rf"(?:{_LABEL}\.)*(?!\d+$)(?!0x[0-9a-f]*$){_LABEL}")
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class HostRule:
    """One rule.

    Attributes:
        host: a canonical host; for a wildcard what follows the star: `.example.com`, or nothing for every host.
        ports: which may be connected to.
    """

    host: str
    is_wildcard: bool
    ports: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """Read a rule.

        Raises:
            ValueError: it is none; says why.
        """
        host, port = _split(text)
        ports = frozenset({port}) if port else DEFAULT_PORTS
        if host == "*":
            return cls("", is_wildcard=True, ports=ports)
        if host.startswith("*."):
            name = canonical_host(host.removeprefix("*."))
            if not _NAME.fullmatch(name):
                raise ValueError(f"{text!r}: only the beginning of a name can be left open")
            return cls(f".{name}", is_wildcard=True, ports=ports)
        return cls(canonical_host(host), is_wildcard=False, ports=ports)

    def allows(self, host: str, port: int) -> bool:
        """Say whether this rule lets a canonical host be reached at a port."""
        return port in self.ports and (host.endswith(self.host) if self.is_wildcard else host == self.host)

    def covers(self, other: HostRule) -> bool:
        """Say whether this rule lets everything be reached that the other does."""
        is_wider = other.host.endswith(self.host) if self.is_wildcard else self == other
        return is_wider and other.ports <= self.ports


def host_rules(texts: Iterable[str]) -> tuple[HostRule, ...]:
    """Read rules.

    Raises:
        ValueError: one of them is none, or there are more than `MAX_HOSTS`.
    """
    rules = tuple(HostRule.parse(text) for text in texts)
    if len(rules) > MAX_HOSTS:
        raise ValueError(f"{len(rules)} hosts are named; {MAX_HOSTS} can be")
    return rules


def canonical_host(text: str) -> str:
    """Return the one form of a host in which hosts are compared: lower case, no dot at the end, short IPv6.

    Raises:
        ValueError: it is neither a name nor an address in the usual notation.
    """
    host = text.lower().removesuffix(".")
    if len(host) <= MAX_NAME_CHARS and _NAME.fullmatch(host):
        return host
    try:
        if text.startswith("[") and text.endswith("]"):
            return str(ipaddress.IPv6Address(text[1:-1]))
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        raise ValueError(f"{text!r} is neither a host's name nor an address in the usual notation") from None


def parse_authority(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return the canonical host and the port of `host:port`.

    Raises:
        ValueError: it is something else, such as an address with a user's name in it.
    """
    host, port = _split(text)
    if not (port or default_port):
        raise ValueError(f"{text!r} names no port")
    return canonical_host(host), port or default_port or 0


def authority(host: str, port: int) -> str:
    """Return `host:port` as it stands in a request."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(text: str) -> tuple[str, int | None]:
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not of the form HOST or HOST:PORT")
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"{text!r}: a port is a number from 1 to 65535")
    return found["host"], port
