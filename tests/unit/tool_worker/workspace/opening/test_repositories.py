"""The one host, and its port, that a clone may reach."""

from __future__ import annotations

import pytest

from broker.contract.workspace_sources import GitSource
from tool_worker.errors import SourceUnusable
from tool_worker.workspace.opening.repositories import parse_host


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://example.org/x.git", "example.org:80"),
        ("https://example.org/x.git", "example.org:443"),
        ("HTTP://Example.ORG./x.git", "example.org:80"),
        ("http://example.org:443/x.git", "example.org:443"),
        ("https://example.org:80/x.git", "example.org:80"),
        ("http://example.org:8080/x.git", "example.org:8080"),
        ("https://somebody@example.org/x.git", "example.org:443"),
        ("http://[2001:DB8::7]/x.git", "[2001:db8::7]:80"),
    ],
)
def test_clone_uses_its_schemes_port_unless_another_is_named(url: str, host: str) -> None:
    assert parse_host(GitSource(url=url)) == host


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "example.org:65536", "2130706433"])
def test_what_two_readers_may_take_for_two_hosts_is_refused(host: str) -> None:
    with pytest.raises(SourceUnusable, match="cannot be cloned"):
        parse_host(GitSource(url=f"http://{host}/x.git"))
