"""Which addresses a workspace's proxy connects to."""

from __future__ import annotations

from broker.runtime.addresses import AddressRules

REFUSED = (
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.1.1", "169.254.169.254"),
    *("172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1"),
    *("198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:a00:1::1"),
    *("fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "3fff::1", "5f00::1"),
    *("::ffff:0:127.0.0.1", "::ffff:0:a9fe:a9fe", "::ffff:0:101:101", "64:ff9b:1::7f00:1", "4000::1", "100:0:0:1::1"),
    *("2606:4700::5efe:7f00:1", "2606:4700::200:5efe:a9fe:a9fe"),
    *("not an address", "", "168.63.129.16", "100.100.100.200"),
)
PUBLIC = ("1.1.1.1", "93.184.215.14", "172.32.0.1", "2606:4700:4700::1111", "64:ff9b::101:101", "::ffff:1.1.1.1")


def test_private_addresses_are_refused() -> None:
    assert [address for address in REFUSED if AddressRules().may_reach(address)] == []


def test_public_addresses_are_allowed() -> None:
    assert [address for address in PUBLIC if not AddressRules().may_reach(address)] == []


def test_addresses_of_the_operator_are_allowed() -> None:
    rules = AddressRules.parse(["10.2.0.0/16", "fd12::/16", "127.0.0.2"])
    assert [rules.may_reach(address) for address in ("10.2.3.4", "fd12::1", "127.0.0.2", "::ffff:10.2.3.4")] == [
        True
    ] * 4
    assert not any(rules.may_reach(address) for address in ("10.3.0.1", "127.0.0.1", "fd13::1"))


def test_where_machines_get_their_credentials_is_never_reached() -> None:
    rules = AddressRules.parse(["0.0.0.0/0", "::/0"])
    assert rules.may_reach("10.0.0.1")
    for address in (
        *("169.254.169.254", "fd00:ec2::254", "::ffff:169.254.169.254", "2002:a9fe:a9fe::1"),
        "::ffff:0:169.254.169.254",
        *("64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "::169.254.169.254", "2606:4700::5efe:a9fe:a9fe"),
    ):
        assert not rules.may_reach(address)
