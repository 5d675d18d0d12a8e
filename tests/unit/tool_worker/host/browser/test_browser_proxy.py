"""Which proxy the browser is given."""

from __future__ import annotations

import pytest

from tool_worker.host.browser.chromium import OF_THIS_MACHINE, find_proxy


def test_without_a_proxy_there_is_none() -> None:
    assert find_proxy({}) is None
    assert find_proxy({"no": "example.com"}) is None


@pytest.mark.parametrize("scheme", ["http", "https", "all"])
def test_this_machine_is_asked_directly(scheme: str) -> None:
    proxy = find_proxy({scheme: "http://127.0.0.1:3128"})
    assert proxy == {"server": "http://127.0.0.1:3128", "bypass": OF_THIS_MACHINE}


def test_what_the_environment_leaves_out_is_left_out() -> None:
    proxy = find_proxy({"https": "proxy.example:8080", "no": "intern.example,.lan"})
    assert proxy == {"server": "http://proxy.example:8080", "bypass": f"{OF_THIS_MACHINE},intern.example,.lan"}


def test_name_and_password_are_separated_from_the_address() -> None:
    proxy = find_proxy({"http": "http://ada:p%40ss@proxy.example:8080"})
    assert proxy is not None
    assert (proxy["server"], proxy["username"], proxy["password"]) == ("http://proxy.example:8080", "ada", "p@ss")
