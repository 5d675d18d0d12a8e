"""Conversations chosen by label and state: listed, paused, resumed, cancelled, closed and deleted, one or many."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.contract.agent_state import AgentState
from deckhands import AgentSpec, Client, LLMSpec
from tests.integration.command_line import COMMAND, Done, Terminal, deckhands, environment, on_terminal
from tests.stores import RealServer, emptied
from tests.terminal_parts import person
from tests.unit.deckhands.sample_log import state

STATES = {"done-1": "finished", "done-2": "error", "busy-1": "running", "rest-1": "paused"}


@pytest.fixture
def env(tmp_path: Path, valkey_server: RealServer) -> dict[str, str]:
    """A cluster without workers: four conversations of team a in four states, one of team b, and one without a label."""
    asyncio.run(_fill(valkey_server.url))
    return environment(tmp_path, DECKHANDS_URL=valkey_server.url)


async def _fill(url: str) -> None:
    await emptied(url)
    async with await Client.connect(url) as client:
        for name, its_state in STATES.items():
            await begin(client, name, its_state, {"team": "a", "nr": name[-1]})
        await begin(client, "other-b", "finished", {"team": "b"})
        await begin(client, "plain", "finished", {})


async def begin(client: Client, name: str, its_state: str, labels: dict[str, str]) -> None:
    agent = AgentSpec(llm=LLMSpec(model="m"))
    await client.submit("x", agent=agent, conversation_id=name, labels=labels, title=name)
    await client.log.append(name, [state("running"), state(its_state)], fields={"state": its_state})


def ids(done: Done) -> set[str]:
    return {each["conversation_id"] for each in done.json}


def states(env: dict[str, str]) -> dict[str, str]:
    return {each["conversation_id"]: each["state"] for each in deckhands("ls", "--json", env=env).json}


def test_listings_have_labels(env: dict[str, str]) -> None:
    assert ids(deckhands("ls", "--label", "team=a", "--json", env=env)) == set(STATES)
    assert ids(deckhands("ls", "--label", "team=a", "--label", "nr=2", "--json", env=env)) == {"done-2"}
    assert ids(deckhands("ls", "--label", "team=a", "--state", "finished", "--json", env=env)) == {"done-1"}
    lines = deckhands("ls", env=env).out.splitlines()
    assert lines[0].split() == [
        "CONVERSATION",
        "WHERE",
        "STATE",
        "STEPS",
        "COST",
        "UPDATED",
        "(UTC)",
        "LABELS",
        "TITLE",
    ]
    assert any("nr=1 team=a" in line for line in lines)
    none = deckhands("ls", "--label", "team=c", env=env)
    assert (none.code, none.out, none.err) == (0, "", "None of 6 conversations has the label team=c.\n")
    [listed] = deckhands("ls", "--label", "team=b", "--json", env=env).json
    assert listed["labels"] == {"team": "b"}


def test_all_conversations_are_listed_in_starting_order(env: dict[str, str]) -> None:
    listed = [each["conversation_id"] for each in deckhands("ls", "--all", "--json", env=env).json]
    assert set(listed) == {*STATES, "other-b", "plain"}
    shown = deckhands("ls", "--all", env=env).out.splitlines()
    assert [line.split()[0] for line in shown[1:-1]] == listed
    assert shown[-1].startswith("6 conversations: ")
    assert len(deckhands("ls", "-n", "2", env=env).out.splitlines()) == 1 + 2 + 1


def test_a_summary_has_labels(env: dict[str, str]) -> None:
    assert deckhands("show", "done-1", "--json", env=env).json[0]["labels"] == {"team": "a", "nr": "1"}
    assert "Labels:       nr=1 team=a" in deckhands("show", "done-1", env=env).out
    assert "Labels" not in deckhands("show", "plain", env=env).out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pause"], "which conversations"),
        (["pause", "done-1", "--label", "team=a"], "which conversations"),
        (["rm", "--label", "team", "--yes"], "--label 'team' is not KEY=VALUE"),
        (["rm", "--label", "te am=x", "--yes"], "labels cannot be used: 'te am' is not a valid name of a label."),
        (["rm", "--label", "team=a", "--label", "team=b", "--yes"], "given twice"),
        (["rm", "--state", "gone", "--yes"], "There is no state 'gone'"),
        (["rm", "--label", "team=a"], "3 conversations would be deleted, and there is no terminal to confirm it."),
        (
            ["cancel", "--label", "team=a"],
            "2 conversations would be cancelled, and there is no terminal to confirm it.",
        ),
        (["close", "--state", "finished"], "3 conversations would be closed, and there is no terminal to confirm it."),
    ],
)
def test_ambiguous_selection_is_refused(env: dict[str, str], arguments: list[str], told: str) -> None:
    before = states(env)
    done = deckhands(*arguments, env=env)
    assert (done.code, told in done.err) == (2, True), done.err
    assert states(env) == before


def test_a_person_is_asked(env: dict[str, str]) -> None:
    done = deckhands("rm", "--label", "team=a", env=env, stdin=Terminal("n\n"))
    assert (done.code, len(states(env))) == (130, 6)
    assert "3 conversations will be deleted. Continue? [y/N]" in done.err
    done = deckhands("rm", "--label", "team=a", env=env, stdin=Terminal("y\n"))
    assert (done.code, set(states(env))) == (0, {"busy-1", "other-b", "plain"})
    assert "3 conversations deleted." in done.err


def test_a_selection_is_deleted_and_what_runs_is_not(env: dict[str, str]) -> None:
    done = deckhands("rm", "--label", "team=a", "--yes", "--json", env=env)
    assert (done.code, ids(done)) == (0, {"done-1", "done-2", "rest-1"})
    assert set(states(env)) == {"busy-1", "other-b", "plain"}
    refused = deckhands("rm", "busy-1", "plain", "nobody-1", "--json", env=env)
    assert refused.code == 1
    told = {each["conversation_id"]: each["done"] for each in refused.json}
    assert told == {"busy-1": False, "plain": True, "nobody-1": False}
    assert "rm --cancel" not in refused.out
    assert asyncio.run(kept(env["DECKHANDS_URL"])) == {"busy-1", "other-b"}


async def kept(url: str) -> set[str]:
    """Return the conversations that the store has keys of."""
    async with await Client.connect(url) as client:
        _, names = await client.store.connection.call("SCAN", "0", "MATCH", "deck:*:c:*", "COUNT", "100000")
    return {name.decode().split(":")[3] for name in names}


def test_requests_reach_all_that_they_fit(env: dict[str, str]) -> None:
    done = deckhands("pause", "--label", "team=a", "--json", env=env)
    assert (done.code, ids(done)) == (0, {"busy-1"})
    assert deckhands("logs", "busy-1", "--json", env=env).json[-1]["agent_state"] == AgentState.PAUSED
    done = deckhands("resume", "--label", "team=a", "--state", "paused,error", env=env)
    assert (done.code, "2 conversations resumed." in done.err) == (0, True)
    assert deckhands("logs", "rest-1", "--json", env=env).json[-1]["agent_state"] == AgentState.RUNNING
    done = deckhands("cancel", "--label", "team=a", "--no-wait", "--yes", "--json", env=env)
    assert (done.code, ids(done)) == (0, {"busy-1", "rest-1"})
    done = deckhands("close", "--state", "finished", "--yes", env=env)
    assert (done.code, "3 conversations closed." in done.err) == (0, True)
    assert deckhands("close", "--state", "finished", "--yes", env=env).err == "0 conversations closed.\n"


def test_several_are_named(env: dict[str, str]) -> None:
    done = deckhands("close", "done-1", "busy-1", env=env)
    assert (done.code, "is running; only one that is over" in done.err) == (1, True)
    assert "1 conversation closed." in done.err


def test_many_are_counted_on_a_terminal(env: dict[str, str]) -> None:
    shown = on_terminal("cancel", "--label", "team=a", "--no-wait", "--yes", env=env)
    assert "2 conversations cancelled." in shown


@pytest.mark.parametrize(("answer", "is_deleted"), [("n", False), ("y", True)])
def test_terminal_is_asked_before_a_named_conversation_is_deleted(
    env: dict[str, str], valkey_server: RealServer, answer: str, is_deleted: bool
) -> None:
    with person([*COMMAND, "rm", "rest-1"], env=env) as terminal:
        terminal.waits_for("1 conversation will be deleted. Continue? [y/N]")
        terminal.type(f"{answer}\r")
        terminal.leaves()
    assert ("rest-1" not in asyncio.run(kept(valkey_server.url))) is is_deleted
