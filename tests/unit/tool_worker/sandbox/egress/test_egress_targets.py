"""Where a request to the proxy goes, as its first line says."""

from __future__ import annotations

import pytest

from tool_worker.sandbox.egress.proxy import EgressRequestRefused, _host_line, _parse_absolute


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://site.test", ("site.test", 80, "/")),
        ("HTTP://site.test/a?b#c", ("site.test", 80, "/a?b")),
        ("http://site.test:8080?q", ("site.test", 8080, "/?q")),
    ],
)
def test_a_plain_address_without_a_port_means_80(text, target):
    assert _parse_absolute(text) == target


@pytest.mark.parametrize("text", ["https://site.test/", "site.test/x", "http://"])
def test_other_addresses_are_refused(text):
    with pytest.raises(EgressRequestRefused):
        _parse_absolute(text)


def test_the_usual_port_is_not_named_to_the_site():
    assert _host_line("site.test:80") == b"site.test"
    assert _host_line("site.test:8080") == b"site.test:8080"
