"""Decides which addresses may be connected to: those of the public internet, and networks that the operator adds.

`read_tls` reads the TLS options in a Redis URL: of the store, of Celery's broker and of its result backend.

Holds: an address embedded in another one (IPv4 in IPv6, 6to4, NAT64, SIIT, ISATAP or Teredo) is checked too. Of IPv6,
only the range allocated for the internet (2000::/3) and NAT64's own prefix are public. The addresses at which clouds
serve credentials to machines are never allowed, whatever the operator adds. The server's certificate is verified unless
the URL has `ssl_cert_reqs=none`. An invalid option raises an error before any connection.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# `is_global` differs between Python versions for some of these. All are listed, so that the result does not depend on
# it.
NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
            *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            *("::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16"),
            *("fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
        ),
    )
)
METADATA = tuple(
    map(
        ipaddress.ip_network,
        (
            *("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "168.63.129.16"),
            *("192.0.0.192", "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254"),
        ),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_INTERNET = ipaddress.IPv6Network("2000::/3")
# Prefixes of 96 bits before an IPv4 address: compatible, SIIT, NAT64 and local NAT64 (RFC 8215).
_BEFORE_IPV4 = (*map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48")), _NAT64)
_ISATAP = (0x5EFE, 0x0200_5EFE)


@dataclass(frozen=True, slots=True)
class AddressRules:
    """The addresses that may be connected to.

    Attributes:
        private: networks that are allowed although they are not public.
    """

    private: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, private: Iterable[str]) -> AddressRules:
        """Parse networks such as `10.2.0.0/16` or `10.2.3.4`.

        Raises:
            ValueError: one of them is not a network.
        """
        return cls(tuple(ipaddress.ip_network(text) for text in private))

    def may_reach(self, text: str) -> bool:
        """Return whether an address from a resolver may be connected to."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False  # an address with a zone belongs to a link of this machine
        return all(self._may_reach(form) for form in _iterate_forms(address))

    def _may_reach(self, address: Address) -> bool:
        if any(_is_within(address, network) for network in METADATA):
            return False
        if any(_is_within(address, network) for network in self.private):
            return True
        if isinstance(address, ipaddress.IPv6Address) and address not in _INTERNET and address not in _NAT64:
            return False
        return address.is_global and not any(_is_within(address, network) for network in NOT_PUBLIC)


def _iterate_forms(address: Address) -> Iterator[Address]:
    """Yield an address, or the address that it maps to, and the addresses embedded in that."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
    elif address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    else:
        yield address
        if address.sixtofour is not None:
            yield address.sixtofour
        if address.teredo is not None:
            yield from address.teredo
        if any(address in prefix for prefix in _BEFORE_IPV4) or int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
            yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def _is_within(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network


CERTIFICATE_CHECKS = {
    **{name: name for name in ("required", "optional", "none")},
    **{f"CERT_{name.upper()}": name for name in ("required", "optional", "none")},
}
"""The values of a URL's certificate option, from redis-py and Celery, with redis-py's equivalents."""


def read_tls(options: Mapping[str, Any]) -> tuple[dict[str, Any], ssl.SSLContext]:
    """Return the TLS options of a URL in redis-py's format, and an SSL context made of them.

    Args:
        options: those of a `rediss://` URL; `ssl_check_hostname` as a bool.

    Raises:
        ValueError: an option is invalid; the message names it.
    """
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    check = tls.get("ssl_cert_reqs", "required")
    if check not in CERTIFICATE_CHECKS:
        raise ValueError(f"ssl_cert_reqs={check} cannot be used: it is required, optional or none")
    tls["ssl_cert_reqs"] = CERTIFICATE_CHECKS[check]
    option = "ssl_ca_certs"
    try:
        context = ssl.create_default_context(
            cafile=tls.get(option), capath=tls.get("ssl_ca_path"), cadata=tls.get("ssl_ca_data")
        )
        option = "ssl_certfile"
        if option in tls:
            context.load_cert_chain(tls[option], tls.get("ssl_keyfile"), tls.get("ssl_password"))
    except OSError as error:
        key = f" with ssl_keyfile={tls['ssl_keyfile']}" if option == "ssl_certfile" and "ssl_keyfile" in tls else ""
        raise ValueError(f"{option}={tls.get(option)}{key} cannot be used: {error.strerror or error}") from error
    if tls["ssl_cert_reqs"] == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif "ssl_check_hostname" in tls:
        context.check_hostname = tls["ssl_check_hostname"]
    return tls, context
