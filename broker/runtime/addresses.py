"""Decides which addresses may be connected to: those of the public internet, and networks that the operator adds.

Holds: an address embedded in another one (IPv4 in IPv6, 6to4, NAT64, SIIT, ISATAP or Teredo) is checked too. Of IPv6,
only the range allocated for the internet (2000::/3) and NAT64's own prefix are public. The addresses at which clouds
serve credentials to machines are never allowed, whatever the operator adds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
