"""Rules for allowed hosts: the hosts that each rule matches, and invalid hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.allowed_hosts import (
    MAX_HOSTS,
    HostRule,
    parse_authority,
    parse_host_rules,
    render_authority,
    to_canonical_host,
)
from broker.contract.specs import WorkspaceSpec


@pytest.mark.parametrize(
    ("rule", "host", "port", "is_allowed"),
    [
        ("pypi.example", "pypi.example", 443, True),
        ("pypi.example", "pypi.example", 80, True),
        ("pypi.example", "pypi.example", 8080, False),
        ("pypi.example", "files.pypi.example", 443, False),
        ("pypi.example", "notpypi.example", 443, False),
        ("PyPI.Example.", "pypi.example", 443, True),
        ("*.example.com:443", "a.example.com", 443, True),
        ("*.example.com:443", "a.b.example.com", 443, True),
        ("*.example.com:443", "a.example.com", 80, False),
        ("*.example.com:443", "example.com", 443, False),
        ("*.example.com", "evilexample.com", 443, False),
        ("*.example.com", "example.com.evil.test", 443, False),
        ("198.51.100.7:8080", "198.51.100.7", 8080, True),
        ("[2001:DB8:0::1]:443", "2001:db8::1", 443, True),
        ("*", "anything.test", 443, True),
        ("*", "198.51.100.7", 80, True),
        ("*", "anything.test", 22, False),
    ],
)
def test_hosts_that_a_rule_allows(rule: str, host: str, port: int, *, is_allowed: bool) -> None:
    assert HostRule.parse(rule).allows(host, port) is is_allowed


@pytest.mark.parametrize(
    ("wider", "narrower", "is_covered"),
    [
        ("*", "*.example.com", True),
        ("*.example.com", "*.a.example.com:443", True),
        ("*.example.com", "a.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.a.example.com", "*.example.com", False),
        ("*.example.com", "*", False),
        ("a.test", "a.test:443", False),
        ("a.test", "a.test", True),
        ("*:443", "a.test", False),
    ],
)
def test_hosts_that_a_ceiling_covers(wider: str, narrower: str, *, is_covered: bool) -> None:
    assert HostRule.parse(wider).covers(HostRule.parse(narrower)) is is_covered


@pytest.mark.parametrize(
    "text",
    [
        *("", "*example.com", "a.*.com", "*.", "*.*", "-a.test", "a-.test", "a..test", ".test", "a b", "a/b", "a@b"),
        *("http://a.test", "a.test:", "a.test:0", "a.test:65536", "a.test:+80", "a.test:80:80", "a\\b", "a%00b"),
        *("2130706433", "0x7f000001", "0177.0.0.1", "127.1", "127.0.0.0x1", "1.2.3.4.5", "256.1.1.1", "*.1"),
        *("::1", "[::1", "[fe80::1%eth0]", "[1.2.3.4]", "a\x00.test", "a.test\n", "ä.test", "a。test"),
        *("\u0661.test", "_" * 64),
        ".".join(["a" * 60] * 5),
    ],
)
def test_invalid_rules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"name|form|port"):
        HostRule.parse(text)


@given(st.text(max_size=40))
def test_a_host_has_one_form(text: str) -> None:
    try:
        host = to_canonical_host(text)
    except ValueError:
        return
    assert to_canonical_host(f"[{host}]" if ":" in host else host) == host
    assert host.isascii()
    assert host == host.lower()


def test_an_authority_is_read_and_written() -> None:
    assert parse_authority("A.test.:443") == ("a.test", 443)
    assert parse_authority("[::1]", 80) == ("::1", 80)
    assert render_authority("::1", 80) == "[::1]:80"
    with pytest.raises(ValueError, match="has no port"):
        parse_authority("a.test")


def test_a_list_has_a_bound() -> None:
    with pytest.raises(ValueError, match="there are 101 hosts"):
        parse_host_rules(["a.test"] * (MAX_HOSTS + 1))


def test_a_workspace_names_hosts_or_has_the_whole_network() -> None:
    assert WorkspaceSpec(allow=("a.test",)).allow == ("a.test",)
    with pytest.raises(ValueError, match="give either"):
        WorkspaceSpec(network=True, allow=("a.test",))
    with pytest.raises(ValueError, match="the usual notation"):
        WorkspaceSpec(allow=("127.1",))
