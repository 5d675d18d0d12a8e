"""`deckhands recover` and `run --recover`: a person gets an agent out of its loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.contract.actions import LoopRecoveryAction
from broker.contract.observations import AgentStateChangedObservation
from broker.contract.policies import STUCK_CODE
from deckhands.client.client import Client
from tests.integration.command_line import deckhands, environment, finish, run_command, script
from tests.stores import RealServer, emptied


async def in_a_loop(url: str) -> str:
    """Begin a conversation and end it as a controller would when its agent repeats itself."""
    async with await Client.connect(url) as client:
        conversation_id = await client.submit("Fix it")
        for state, code in (("running", ""), ("error", STUCK_CODE)):
            await client.log.append(conversation_id, [AgentStateChangedObservation(agent_state=state, code=code)])
        return conversation_id


async def choices(url: str, conversation_id: str) -> list[int]:
    async with await Client.connect(url) as client:
        events = await client.events(conversation_id)
        return [event.option for event in events if isinstance(event, LoopRecoveryAction)]


@pytest.mark.parametrize(("way", "option"), [("wait", 1), ("go-on", 2), ("stop", 3)])
def test_a_choice_is_in_the_log(tmp_path: Path, valkey_server: RealServer, way: str, option: int) -> None:
    url = asyncio.run(emptied(valkey_server.url))
    env = environment(tmp_path / "home", DECKHANDS_URL=url)
    conversation_id = asyncio.run(in_a_loop(url))
    assert deckhands("recover", conversation_id, way, env=env).code == 0
    assert asyncio.run(choices(url, conversation_id)) == [option]


def test_what_cannot_be_chosen(tmp_path: Path, valkey_server: RealServer) -> None:
    url = asyncio.run(emptied(valkey_server.url))
    env = environment(tmp_path / "home", DECKHANDS_URL=url, LLM_MODEL="scripted/none")
    conversation_id = deckhands("submit", "-t", "x", env=env).out.strip()
    for arguments, text in (
        (("recover", conversation_id, "go-on"), "is not in a loop"),
        (("recover", conversation_id, "away"), "'away' is not one of"),
        (("run", "-t", "x", "--recover", "wait"), "--recover needs a run to resume."),
        (("run", "--resume", conversation_id, "-t", "x", "--recover", "wait"), "cannot be combined"),
    ):
        done = deckhands(*arguments, env=env)
        assert done.code == 2, done
        assert text in done.err


@pytest.mark.soak
def test_run_that_ended_in_a_loop_continues_without_it(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    (tmp_path / "w").mkdir()
    model = script(tmp_path / "m.json", *(run_command("echo again") for _ in range(4)), finish("Done."))
    run = ["run", "--json", "-t", "x", "-w", tmp_path / "w", "--sandbox", "none", "--model", model]
    stuck = deckhands(*run, env=env)
    summary = stuck.json[-1]
    assert (stuck.code, summary["state"]) == (1, "error")
    assert "stuck in a loop" in summary["last_error"]
    done = deckhands("run", "--resume", summary["conversation_id"], "--recover", "go-on", "--json", env=env)
    assert (done.code, done.json[-1]["state"]) == (0, "finished"), done
    kinds = [event.get("kind") for event in done.json]
    assert kinds.count("action.condensation") == 1
