"""`verify` on real stores: live, archived and exported logs, by the client, over HTTP and by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import ConversationCreated, Event, Tenancy
from broker.log.entries import parse_exported_event
from broker.runtime.errors import UnknownConversation, UsageError
from broker.store.store import Store
from deckhands.client.client import Client
from deckhands.client.remote.remote_client import RemoteClient
from deckhands.client.verification import MAX_FILE_BYTES, MAX_LINE_BYTES, MAX_NESTING, read_log_file, verify_file
from tests.archive_parts import retired
from tests.integration.command_line import CommandLine, deckhands, environment
from tests.replay.log_mutations import changed, renumbered
from tests.server_parts import served

GOLDEN = Path(__file__).parents[1] / "replay" / "golden" / "delegates_at_work.jsonl"
CID = "golden-delegates"


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in GOLDEN.read_text().splitlines()]


def answered_twice() -> list[dict[str, Any]]:
    """The same log, with the last observation of an action twice."""
    log = recorded()
    at = max(n for n, event in enumerate(log) if event["cause_id"] is not None)
    return renumbered([*log[: at + 1], log[at], *log[at + 1 :]])


async def begin(client: Client, log: list[dict[str, Any]], name: str = CID, *, tenant: str = "") -> list[Event]:
    """Create a conversation with the events of a log."""
    events = [parse_exported_event(event) for event in log]
    created = events[0]
    assert isinstance(created, ConversationCreated)
    changes = {"conversation_id": name, "tenancy": Tenancy(tenant=tenant) if tenant else None}
    await client.log.create_from(created.model_copy(update=changes), events[1:], key=name)
    return events


async def test_a_log_of_the_store_is_verified_with_its_index(valkey_store: Store) -> None:
    client = Client(valkey_store)
    events = await begin(client, recorded())
    found = await client.verify(CID)
    assert (found.source, found.events, found.holds) == (CID, len(events), True), found.violations
    meta = valkey_store.known_keys(CID).meta
    await valkey_store.call("HSET", meta, "cost_usd", "0.01")
    assert [one.rule for one in (await client.verify(CID)).violations] == ["index"]
    with pytest.raises(UnknownConversation):
        await client.verify("nobody")


async def test_log_in_progress_is_verified_up_to_its_last_event(valkey_store: Store) -> None:
    client = Client(valkey_store)
    await begin(client, recorded()[:12])
    assert (await client.verify(CID)).holds


async def test_a_wrong_log_is_refused_wherever_it_is(valkey_store: Store, tmp_path: Path) -> None:
    client = Client(valkey_store, str(tmp_path / "archive"))
    await begin(client, answered_twice())
    live = await client.verify(CID)
    assert [one.rule for one in live.violations] == ["observation"]
    assert await retired(valkey_store, tmp_path / "archive", tmp_path)
    assert await client.is_archived(CID)
    archived = await client.verify(CID)
    assert archived == live


async def test_the_server_shows_it_to_the_tenant_only(programs: dict[str, str], tmp_path: Path) -> None:
    async with served(tmp_path / "log", programs) as server:
        await begin(server.client, answered_twice(), tenant="acme")
        own = RemoteClient(server.url, await server.token("acme"))
        other = RemoteClient(server.url, await server.token("other"))
        try:
            assert await own.verify(CID) == await server.client.verify(CID)
            with pytest.raises(UnknownConversation):
                await other.verify(CID)
        finally:
            await own.aclose()
            await other.aclose()


def exported(tmp_path: Path, log: list[dict[str, Any]], name: str = "log.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(event) + "\n" for event in log))
    return path


def test_command_verifies_files(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    good = exported(tmp_path, [*recorded(), {"summary": True}])
    bad = exported(tmp_path, answered_twice(), "bad.jsonl")
    done = deckhands("verify", good, env=env)
    assert (done.code, done.out) == (0, f"{good}: {len(recorded())} events, correct.\n")
    done = deckhands("verify", good, bad, env=env)
    assert (done.code, done.err) == (1, "2 logs checked; 1 do not hold.\n")
    assert "has answered (observation)" in done.out
    shown = deckhands("verify", good, bad, "--json", env=env).json
    assert [one["holds"] for one in shown] == [True, False]
    assert shown[1]["violations"][0]["rule"] == "observation"


def test_command_refuses_what_it_cannot_verify(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    for arguments in ((), ("--all", "x.jsonl"), (tmp_path / "none.jsonl",), (exported(tmp_path, []),)):
        done = deckhands("verify", *arguments, env=env)
        assert (done.code, done.out) == (2, ""), arguments
        assert done.err


def test_command_verifies_a_cluster(command: CommandLine) -> None:
    async def fill(client: Client) -> None:
        await begin(client, recorded())
        await begin(client, changed(recorded(), 8, cause_id=None), name="other")

    command.ask(fill)
    assert command("verify", CID).code == 0
    done = command("verify", "--all")
    assert (done.code, done.err) == (1, "2 logs checked; 1 do not hold.\n")
    assert done.out.startswith("other: ")
    assert CID not in done.out
    assert command("verify", "nobody").code == 2


def test_a_damaged_entry_is_a_violation(command: CommandLine) -> None:
    async def damage(client: Client) -> None:
        await begin(client, recorded())
        keys = client.store.known_keys(CID)
        await client.store.connection.call("XDEL", keys.events, "5-0")

    command.ask(damage)
    done = command("verify", CID)
    assert done.code == 1
    assert "(append)" in done.out


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "Line 2 of"),
        (b"[]", "it is a JSON list, not an object"),
        (b'{"id": NaN}', "NaN is not a JSON value"),
        (b'{"id": "\xff"}', "Line 2 of"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"a": ' + b'{"b": ' * (MAX_NESTING + 1) + b"1" + b"}" * (MAX_NESTING + 2), "nested"),
        (b'{"id": ' + b"9" * 5_000 + b"}", "Line 2 of"),
    ],
    ids=["cut", "list", "nan", "no utf-8", "far too deep", "too deep", "long number"],
)
def test_a_hostile_file_is_refused_by_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(json.dumps(recorded()[0]).encode() + b"\n" + line + b"\n")
    with pytest.raises(UsageError, match=r"Line 2 of .* is not an event") as refused:
        read_log_file(path)
    assert reason in refused.value.message


def test_a_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": "' + b"x" * MAX_LINE_BYTES + b'"}\n')
    with pytest.raises(UsageError, match="it has more than 33,554,432 bytes"):
        verify_file(path)
    with path.open("r+b") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(UsageError, match="the limit is 268,435,456"):
        verify_file(path)
    with pytest.raises(UsageError, match="is not a file"):
        verify_file(tmp_path)
