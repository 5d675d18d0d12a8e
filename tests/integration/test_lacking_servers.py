"""A proxy or a managed service without a command that Deckhands needs is refused when it is opened, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import hiredis
import pytest

from broker.runtime.errors import StoreMisconfigured, StoreRefused
from broker.runtime.settings import Acks
from broker.store.connection import check_reply
from broker.store.store import open_store
from tests.stores import RealServer, running, valkey_program


@contextmanager
def lacking(*commands: str) -> Iterator[RealServer]:
    options = [part for name in commands for part in ("--rename-command", name, "")]
    yield from running(valkey_program(), *options)


async def refusal(server: RealServer, *, acks: Acks = "local") -> StoreMisconfigured:
    with pytest.raises(StoreMisconfigured) as caught:
        await open_store(server.url, acks=acks)
    return caught.value


@pytest.mark.parametrize("command", ["FUNCTION", "FCALL", "XADD", "XREADGROUP", "XAUTOCLAIM"])
async def test_server_without_a_needed_command_is_refused_at_opening(command: str) -> None:
    with lacking(command) as server:
        error = await refusal(server)
    assert f"does not know the command {command}: it " in error.message
    assert "Use Valkey, or Redis 7.0 or newer, itself" in (error.remedy or "")


@pytest.mark.parametrize(("command", "acks"), [("WAIT", "replica"), ("WAITAOF", "disk")])
async def test_server_without_confirmations_is_refused_if_they_are_wanted(command: str, acks: Acks) -> None:
    with lacking(command) as server:
        await (await open_store(server.url)).aclose()
        error = await refusal(server, acks=acks)
    assert f"the command {command}: it " in error.message
    assert "DECKHANDS_ACKS=local" in (error.remedy or "")


async def test_server_without_descriptions_of_commands_is_refused_by_its_answer() -> None:
    with lacking("COMMAND", "FUNCTION") as server:
        error = await refusal(server)
    assert "does not know the command FUNCTION: it answers \"ERR unknown command 'FUNCTION'" in error.message


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        ("ERR unknown command `FUNCTION`, with args beginning with: `LIST` ", "FUNCTION"),
        ("ERR unknown command 'fcall'", "FCALL"),
        ("ERR unsupported command 'function'", "FUNCTION"),
        ("ERR Command is not available: 'FUNCTION'. See the documentation for details", "FUNCTION"),
        ("ERR command 'xreadgroup' is not supported in this mode", "XREADGROUP"),
        ("ERR WAIT cannot be used: command disabled", "WAIT"),
        ("ERR command not allowed: FUNCTION|LOAD", "FUNCTION"),
    ],
)
def test_answers_of_services_name_the_missing_command(answer: str, command: str) -> None:
    with pytest.raises(StoreMisconfigured, match=f"does not know the command {command}: it answers") as caught:
        check_reply(hiredis.ReplyError(answer))
    assert answer.split(",", maxsplit=1)[0] in caught.value.message


@pytest.mark.parametrize(
    "answer",
    [
        "ERR Function not found",
        "ERR unknown command 'GETEX'",
        "ERR The ID specified in XADD is equal or smaller than the target stream top item",
        "ERR This instance has cluster support disabled",
    ],
)
def test_other_errors_are_not_taken_for_a_missing_command(answer: str) -> None:
    with pytest.raises(StoreRefused):
        check_reply(hiredis.ReplyError(answer))
