"""`deckhands dead`: what is dead and why, and how a conversation continues."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.coordination.quarantine import Quarantine
from broker.log.conversations import Conversations
from deckhands import AgentSpec, Client, LLMSpec
from tests.integration.command_line import deckhands, environment
from tests.stores import RealServer, emptied
from tests.unit.deckhands.sample_log import state


@pytest.fixture
def env(tmp_path: Path, valkey_server: RealServer) -> dict[str, str]:
    """A cluster without workers, with two dead conversations, one that lives, and an entry that nobody could read."""
    asyncio.run(_fill(valkey_server.url))
    return environment(tmp_path, DECKHANDS_URL=valkey_server.url)


async def _fill(url: str) -> None:
    await emptied(url)
    async with await Client.connect(url) as client:
        shard = client.store.all_shards[0]
        for name in ("poison-1", "poison-2", "alive"):
            agent = AgentSpec(llm=LLMSpec(model="m"))
            await client.submit("x", agent=agent, title=name, conversation_id=name, labels={"nr": name[-1]})
        for number, name in enumerate(("poison-1", "poison-2")):
            await client.log.append(
                name,
                [state("running"), state("error")],
                fields={"state": "error", "last_error": "It crashed its worker."},
            )
            await client.store.connection.call("HSET", client.store.keys(name).meta, "crashes", 3)
            await client.store.connection.call("ZADD", shard.dead, number, name)
        for worker in ("w1", "w2", "w3", "w4"):
            fields = ("c", "poison-1", "from", worker, "to", "w9", "at", "1760000000000")
            await client.store.connection.call("XADD", shard.takeovers, "*", *fields)
        error = KeyError("c")
        await Quarantine(client.store).quarantine(
            shard, "deck:{0}:act:pool:bash", "1-1", [b"foo", b"\x1b[31mbar"], error
        )


def test_what_is_dead_and_why(env: dict[str, str]) -> None:
    done = deckhands("dead", "ls", env=env)
    lines = done.out.splitlines()
    assert (done.code, len(lines)) == (0, 4)
    assert "poison-1" in lines[1]
    assert "w2, w3, w4" in lines[1]
    assert "three workers died while it acted" in lines[2]
    assert "deck:{0}:act:pool:bash 1-1" in lines[3]
    assert "\x1b" not in done.out
    found = deckhands("dead", "ls", "--json", env=env).json
    assert [each["kind"] for each in found] == ["conversation", "conversation", "entry"]
    assert found[0]["workers"] == ["w2", "w3", "w4"]


def test_the_dead_can_continue(env: dict[str, str]) -> None:
    done = deckhands("dead", "requeue", "poison-1", env=env)
    assert (done.code, "1 conversation can continue" in done.err) == (0, True)
    assert [each["conversation_id"] for each in deckhands("dead", "ls", "--json", env=env).json[:-1]] == ["poison-2"]
    assert deckhands("dead", "requeue", "--all", env=env).code == 0
    assert asyncio.run(_dead(env["DECKHANDS_URL"])) == []


def test_one_is_shown_with_its_causes(env: dict[str, str]) -> None:
    shown = deckhands("dead", "show", "poison-1", env=env)
    assert shown.code == 0
    assert "Error:        It crashed its worker." in shown.out
    assert "Labels:       nr=1" in shown.out
    assert "Died with it: w4 at 2025-10-09T08:53:20+00:00" in shown.out
    assert "w1" not in shown.out
    assert shown.out.index("You: x") > shown.out.index("The end of its log:")
    found = deckhands("dead", "show", "poison-1", "--json", env=env).json[0]
    assert (found["workers"], found["labels"]) == (["w2", "w3", "w4"], {"nr": "1"})
    assert [event["id"] for event in found["last_events"]] == [1, 2, 3, 4]
    name = entry_name(env)
    entry = deckhands("dead", "show", name, env=env)
    assert "Content:      foo \\x1b[31mbar" in entry.out
    assert "Why:          it has no field 'c'" in entry.out
    assert deckhands("dead", "show", name, "--json", env=env).json[0]["name"] == name


def entry_name(env: dict[str, str]) -> str:
    [entry] = deckhands("dead", "ls", "--kind", "entry", "--json", env=env).json
    return str(entry["name"])


@pytest.mark.parametrize("name", ["alive", "0:1-1", "9:1-1", "a:b"])
def test_what_is_not_dead_is_not_shown(env: dict[str, str], name: str) -> None:
    assert deckhands("dead", "show", name, env=env).code == 2
    assert deckhands("dead", "discard", name, env=env).code == 2
    assert len(deckhands("dead", "ls", "--json", env=env).json) == 3


def test_they_are_chosen_by_label_and_kind(env: dict[str, str]) -> None:
    found = deckhands("dead", "ls", "--label", "nr=2", "--json", env=env).json
    assert [each["conversation_id"] for each in found] == ["poison-2"]
    assert deckhands("dead", "requeue", "--label", "nr=2", env=env).err == "1 conversation can continue.\n"
    assert [each["kind"] for each in deckhands("dead", "ls", "--json", env=env).json] == ["conversation", "entry"]


def test_what_nobody_needs_is_discarded(env: dict[str, str]) -> None:
    refused = deckhands("dead", "requeue", entry_name(env), env=env)
    assert (refused.code, "cannot be requeued" in refused.err) == (2, True)
    asked = deckhands("dead", "discard", "--all", env=env)
    assert (asked.code, "3 dead letters would be discarded, and there is no" in asked.err) == (2, True)
    assert deckhands("dead", "discard", "poison-1", entry_name(env), env=env).err == (
        "1 conversation closed, 1 entry forgotten.\n"
    )
    assert [each["conversation_id"] for each in deckhands("dead", "ls", "--json", env=env).json] == ["poison-2"]
    assert deckhands("logs", "poison-1", "--json", env=env).code == 0
    assert deckhands("message", "poison-1", "Again", env=env).code == 2
    assert deckhands("dead", "discard", "--all", "--yes", env=env).err == "1 conversation closed.\n"
    assert "no dead letters" in deckhands("dead", "ls", env=env).err
    assert deckhands("rm", "poison-1", "poison-2", env=env).code == 0


async def _dead(url: str) -> list[str]:
    async with await Client.connect(url) as client:
        return await Conversations(client.store).list_dead_letters()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [([], "which conversations"), (["--all", "poison-1"], "which conversations"), (["alive"], "No dead letter: alive")],
)
def test_what_is_not_dead_is_refused(env: dict[str, str], arguments: list[str], told: str) -> None:
    done = deckhands("dead", "requeue", *arguments, env=env)
    assert (done.code, told in done.err) == (2, True)
    assert len(asyncio.run(_dead(env["DECKHANDS_URL"]))) == 2


def test_nothing_is_dead(tmp_path: Path, valkey_server: RealServer) -> None:
    asyncio.run(emptied(valkey_server.url))
    done = deckhands("dead", "ls", env=environment(tmp_path, DECKHANDS_URL=valkey_server.url))
    assert (done.code, done.out) == (0, "")
    assert "no dead letters" in done.err
