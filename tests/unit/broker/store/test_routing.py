"""The slot of a command, and the URLs of clusters."""

from __future__ import annotations

import hiredis
import pytest

from broker.runtime import StoreMisconfigured, StoreRefused
from broker.store.connection import check_reply
from broker.store.routing import ClusterUrl, find_command_slot, find_slot


@pytest.mark.parametrize(
    ("key", "slot"), [("foo", 12_182), ("{foo}:bar", 12_182), ("a{foo}b{bar}", 12_182), ("{}foo", find_slot(b"{}foo"))]
)
def test_slot_is_that_of_the_hash_tag(key: str, slot: int) -> None:
    assert find_slot(key) == find_slot(key.encode()) == slot


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "foo"),
        ("FCALL", "deck_now", 1, "foo", "bar"),
        ("XREAD", "COUNT", 1, "BLOCK", 5, "STREAMS", "foo", "0"),
        ("XREADGROUP", "GROUP", "g", "c", "STREAMS", b"foo", ">"),
        ("XINFO", "GROUPS", "foo"),
        ("OBJECT", "IDLETIME", b"foo"),
    ],
)
def test_command_goes_to_the_slot_of_its_first_key(command: tuple[str | bytes | int, ...]) -> None:
    assert find_command_slot(command) == 12_182


@pytest.mark.parametrize("command", [("TIME",), ("FCALL", "f", 0), ("FUNCTION", "LIST")])
def test_command_without_a_key_has_no_slot(command: tuple[str | int, ...]) -> None:
    assert find_command_slot(command) is None


def test_url_names_nodes_and_their_login() -> None:
    found = ClusterUrl.parse("rediss+cluster://user:secret@h1:7000,[::1],h3?ssl_cert_reqs=none")
    assert found.seeds == (("h1", 7000), ("::1", 6379), ("h3", 6379))
    assert found.servers == "rediss://user:secret@h1:7000?ssl_cert_reqs=none"


@pytest.mark.parametrize("command", ["FUNCTION", "FCALL", "XADD", "INFO"])
def test_server_without_a_needed_command_is_named(command: str) -> None:
    with pytest.raises(StoreMisconfigured, match=rf"does not know the command {command}: it answers .*\. Use Valkey"):
        check_reply(hiredis.ReplyError(f"ERR unknown command '{command}', with args beginning with: 'x' "))
    with pytest.raises(StoreRefused):
        check_reply(hiredis.ReplyError("ERR unknown command 'OTHER'"))
