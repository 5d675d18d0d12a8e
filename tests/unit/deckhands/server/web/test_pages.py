"""The files of the page: served files, redirects of its address, and actions that no script of it may take."""

from __future__ import annotations

import re

import pytest

from broker.runtime.errors import UsageError
from deckhands.cli.commands.open import page_of
from deckhands.server.web.pages import POLICY, files

MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser")


def test_every_file_that_the_page_names_is_served() -> None:
    served = files()
    assert {"/", "/web/main.js", "/web/page.css", "/web/icon.svg"} <= served.keys()
    for path, (content, _) in served.items():
        text = content.decode()
        folder = path.rpartition("/")[0]
        named = {f"{folder}/{name}" for name in re.findall(r'from "\./([\w.]+)"', text)}
        named |= set(re.findall(r'(?:href|src)="(/web/[\w.]+)"', text))
        assert named <= served.keys(), path


def test_no_text_can_become_markup_and_nothing_runs_inline() -> None:
    for path, (content, _) in files().items():
        if path.startswith("/web/vendored/"):
            continue  # a sanitizer parses markup; the policy lets no other code do so
        text = content.decode()
        assert not MARKUP.search(text), path
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=[\"']|javascript:", text), path
    assert "unsafe" not in POLICY


@pytest.mark.parametrize(
    ("server", "conversation_id", "address"),
    [
        ("http://127.0.0.1:8900", None, "http://127.0.0.1:8900/"),
        ("https://agents.example.org/", "c1", "https://agents.example.org/#/c/c1"),
        ("http://h", "a/../b", "http://h/#/c/a/../b"),
    ],
)
def test_the_address_of_a_page(server: str, conversation_id: str | None, address: str) -> None:
    assert page_of(server, conversation_id) == address


@pytest.mark.parametrize("server", ["", "h:8900", "file:///etc/passwd", "javascript:alert(1)"])
def test_address_without_a_server_is_not_opened(server: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        page_of(server)
