"""The network hosts that a workspace may reach: `example.org`, `*.example.com:443`, `192.0.2.7:8080`, `*`.

A rule without a port means the ports 80 and 443. `*.example.com` does not match `example.com` itself.

Holds: names are compared in one canonical form. A number in an unusual notation is not a host.
Does not: resolve names. The connecting side decides whether an address may be used.
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
# The last label of a name is never a number, because the resolver would parse it as an address.
_NAME = re.compile(rf"(?:{_LABEL}\.)*(?!\d+$)(?!0x[0-9a-f]*$){_LABEL}")
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class HostRule:
    """One rule.

    Attributes:
        host: a canonical host. For a wildcard, the part after the star: `.example.com`, or empty for every host.
        ports: the allowed ports.
    """

    host: str
    is_wildcard: bool
    ports: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """Parse a rule.

        Raises:
            ValueError: the rule is invalid; the text says why.
        """
        host, port = _split_port(text)
        ports = frozenset({port}) if port else DEFAULT_PORTS
        if host == "*":
            return cls("", is_wildcard=True, ports=ports)
        if host.startswith("*."):
            name = to_canonical_host(host.removeprefix("*."))
            if not _NAME.fullmatch(name):
                raise ValueError(f"{text!r}: only the first label of a name can be a wildcard")
            return cls(f".{name}", is_wildcard=True, ports=ports)
        return cls(to_canonical_host(host), is_wildcard=False, ports=ports)

    def allows(self, host: str, port: int) -> bool:
        """Return whether this rule allows a canonical host and port."""
        return port in self.ports and (host.endswith(self.host) if self.is_wildcard else host == self.host)

    def covers(self, other: HostRule) -> bool:
        """Return whether this rule allows everything that the other allows."""
        is_wider = other.host.endswith(self.host) if self.is_wildcard else self == other
        return is_wider and other.ports <= self.ports


def parse_host_rules(texts: Iterable[str]) -> tuple[HostRule, ...]:
    """Parse rules.

    Raises:
        ValueError: a rule is invalid, or there are more than `MAX_HOSTS`.
    """
    rules = tuple(HostRule.parse(text) for text in texts)
    if len(rules) > MAX_HOSTS:
        raise ValueError(f"there are {len(rules)} hosts; the limit is {MAX_HOSTS}")
    return rules


def to_canonical_host(text: str) -> str:
    """Return the canonical form in which hosts are compared: lower case, no final dot, short IPv6.

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
        ValueError: it has another form, such as an address with a user name.
    """
    host, port = _split_port(text)
    if not (port or default_port):
        raise ValueError(f"{text!r} has no port")
    return to_canonical_host(host), port or default_port or 0


def render_authority(host: str, port: int) -> str:
    """Return `host:port` as written in a request."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split_port(text: str) -> tuple[str, int | None]:
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not of the form HOST or HOST:PORT")
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"{text!r}: a port is a number from 1 to 65535")
    return found["host"], port
