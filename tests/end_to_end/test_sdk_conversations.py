"""SDK agents on a real store: the Claude Agent SDK with its CLI, the real loop, a scripted model."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, ModelReply
from broker.contract.interventions import ConversationChanged
from controller_worker.loop.conversation_loop import ConversationLoop
from controller_worker.loop.sdk.sessions import SandboxChoice
from tests.controller_parts import answer
from tests.conversation_hands import BASH, CID, THINK, Hands
from tests.polling import until
from tests.sdk_parts import taken_up, with_sdk

pytestmark = [pytest.mark.claude, pytest.mark.timeout(600)]

SDK = "CodeActAgentSDK"
LIMIT_SECONDS = 90.0
TWO_CALLS = {
    "text": "Two at once.",
    "tool_calls": [
        {"name": "execute_bash", "arguments": {"command": "ls"}},
        {"name": "think", "arguments": {"thought": "and this"}},
    ],
}
UNKNOWN = {
    "tool_calls": [{"name": "no_such_tool", "arguments": {}}, {"name": "execute_bash", "arguments": "{not JSON"}]
}
SCRIPT = (THINK, TWO_CALLS, UNKNOWN, BASH)


async def carried_through(hands: Hands, loop: ConversationLoop) -> list[Any]:
    """Answer every command of a conversation until it has ended."""
    cid = loop.conversation_id

    async def has_ended() -> bool:
        for pending in loop.state.tools.pending:
            action = (await hands.log.read(cid))[pending.id - 1]
            await hands.log.append_observation(cid, answer(action), worker_id="tool-1")
            loop.wake()
        return cid in hands.gone

    await until(has_ended, what="the end", limit=LIMIT_SECONDS)
    return await hands.log.read(cid)


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
async def test_a_turn_goes_through_the_sdk(hands: Hands, sandbox: SandboxChoice) -> None:
    await with_sdk(hands, sandbox=sandbox).begin(*SCRIPT, name=SDK)
    events = await carried_through(hands, await taken_up(hands))
    assert not [event for event in events if isinstance(event, ConversationChanged)]  # no legacy agent has helped
    assert len([event for event in events if isinstance(event, ModelReply)]) == 5
    assert len([event for event in events if isinstance(event, CmdRunAction)]) == 2


async def test_the_log_of_a_legacy_agent_is_the_same(hands: Hands) -> None:
    await with_sdk(hands).begin(*SCRIPT, name=SDK)
    created, task = (await hands.events())[:2]
    ours = await carried_through(hands, await taken_up(hands))
    assert isinstance(created, ConversationCreated)
    legacy = created.agent.model_copy(update={"name": "CodeActAgent"})
    other = created.model_copy(update={"conversation_id": "conversation-2", "agent": legacy})
    await hands.log.create(other, [task], key="begin")
    theirs = await carried_through(hands, await taken_up(hands, "conversation-2"))
    assert [event.kind for event in ours] == [event.kind for event in theirs]


async def test_a_program_killed_while_a_command_runs(hands: Hands) -> None:
    await with_sdk(hands).begin(BASH, BASH, name=SDK)
    loop = await taken_up(hands)
    for _ in range(2):
        await until(lambda: loop.state.tools.pending, what="a command", limit=LIMIT_SECONDS)
        assert loop._sdk.pid is not None
        for program in psutil.Process(loop._sdk.pid).children(recursive=True)[-1:]:
            program.send_signal(signal.SIGKILL)
        await until(lambda: loop._sdk.pid is None, what="its end", limit=LIMIT_SECONDS)
        await hands.observe(loop.state.tools.pending[0].id)
        loop.wake()
        await until(lambda: not loop.state.tools.pending, what="the result", limit=LIMIT_SECONDS)
    await until(lambda: CID in hands.gone, what="the end", limit=LIMIT_SECONDS)
    events = await hands.events()
    assert len([event for event in events if isinstance(event, CmdRunAction)]) == 2
    assert not [event for event in events if isinstance(event, ConversationChanged)]


async def test_the_cli_knows_no_variable_of_its_worker(
    hands: Hands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "canary-key")
    monkeypatch.setenv("LLM_API_KEY", "canary-key")
    await with_sdk(hands).begin(BASH, name=SDK)
    loop = await taken_up(hands)
    await until(lambda: loop.state.tools.pending, what="a command", limit=LIMIT_SECONDS)
    assert loop._sdk.pid is not None
    programs = [psutil.Process(loop._sdk.pid), *psutil.Process(loop._sdk.pid).children(recursive=True)]
    assert len(programs) >= 2
    for program in programs:
        known = Path(f"/proc/{program.pid}/environ").read_text(errors="replace")
        assert "canary-key" not in known
        homes = {Path(each.removeprefix("HOME=")) for each in known.split("\0") if each.startswith("HOME=")}
        assert Path.home() not in homes
    loop.drop()
    await hands.services.sdk_sessions.aclose()
    assert not any(program.is_running() and program.status() != psutil.STATUS_ZOMBIE for program in programs)
    assert not list(folder.iterdir())
