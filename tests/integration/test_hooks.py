"""Hooks of a controller worker: their input, the effect of a veto, and failing hooks."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, Event, EventSource, LLMSpec
from broker.contract.observations import ErrorObservation, FinishRefusedObservation
from broker.contract.policies import ConfirmationPolicy
from broker.log.invariants import find_violations
from broker.runtime.errors import UsageError
from controller_worker.loop.hooks import Hook, HookPoint, Hooks, load_hooks, make_command_ask, make_function_ask
from controller_worker.loop.replay import replay
from tests.conversation_hands import CID, Hands
from tests.polling import until

BASH = {"tool_calls": [{"name": "execute_bash", "arguments": {"command": "rm -rf /"}}]}
FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}


FAILED = "the hook guard failed:"


class Told:
    """A hook that keeps its inputs and answers from a list, then None."""

    def __init__(self, *answers: str | None) -> None:
        self.calls: list[Mapping[str, Any]] = []
        self.answers = list(answers)

    def hook(self, point: HookPoint, **options: Any) -> Hook:
        return Hook(point, "told", self.ask, **options)

    async def ask(self, told: Mapping[str, Any]) -> str | None:
        self.calls.append(json.loads(json.dumps(told)))
        return self.answers.pop(0) if self.answers else None


def give(hands: Hands, *hooks: Hook) -> Hooks:
    found = Hooks(hooks)
    object.__setattr__(hands.services, "hooks", found)
    return found


def asking(hands: Hands) -> AgentSpec:
    """An agent that follows the script and may do nothing unasked."""
    llm = LLMSpec(model=f"scripted/{hands.folder / 'script.json'}")
    return AgentSpec(llm=llm, confirmation=ConfirmationPolicy(mode="always"))


def confirmed(action_id: int, **edited: str) -> ChangeAgentStateAction:
    return ChangeAgentStateAction(
        agent_state=AgentState.USER_CONFIRMED, action_id=action_id, edited=edited, source=EventSource.USER
    )


async def logged(hands: Hands) -> list[Event]:
    events = await hands.events()
    assert find_violations(events, conversation_id=CID, is_strict=True, last_event_id=len(events)) == []
    return events


async def run(hands: Hands, *turns: dict[str, Any], **fields: Any) -> list[Event]:
    """Let a conversation run until it waits or leaves the worker; return its log."""
    await hands.begin(*turns, **fields)
    await hands.go()
    return await logged(hands)


def error_in(events: list[Event]) -> ErrorObservation:
    (error,) = [event for event in events if isinstance(event, ErrorObservation)]
    return error


async def asked_about(hands: Hands) -> int:
    """Return the id of the only command in the log."""
    (action_id,) = [event.id for event in await hands.events() if event.kind == "action.run"]
    return action_id


async def test_vetoed_action_does_not_run_and_model_reads_why(hands: Hands) -> None:
    told = Told("not on my machine")
    give(hands, told.hook(HookPoint.BEFORE_ACTION))
    events = await run(hands, BASH, FINISH)
    error = error_in(events)
    assert error.content == "The action was not carried out: not on my machine"
    assert error.error_id == "AGENT_ERROR$HOOK_VETO"
    assert error.tool_call_metadata is not None
    action_id = await asked_about(hands)
    assert error.cause == action_id
    assert events[-1].kind == "observation.agent_state_changed"
    assert [call["event"]["command"] for call in told.calls] == ["rm -rf /"]
    assert told.calls[0] | {"event": None} == {
        "point": "before_action",
        "conversation_id": CID,
        "iteration": 0,
        "event": None,
    }
    assert told.calls[0]["event"]["id"] == action_id


async def test_a_vetoed_finish_sends_the_agent_back_to_work(hands: Hands) -> None:
    give(hands, Told("write the changelog first").hook(HookPoint.BEFORE_FINISH))
    events = await run(hands, FINISH, FINISH)
    (refused,) = [event for event in events if isinstance(event, FinishRefusedObservation)]
    assert refused.content == "Your finish was not accepted: write the changelog first"
    assert [event.kind for event in events].count("action.finish") == 2
    assert events[-1].wire()["agent_state"] == "finished"
    assert replay(events).divergence is None


async def test_edited_action_is_checked_by_hooks_as_it_runs(hands: Hands) -> None:
    told = Told(None, "not on my machine")
    give(hands, told.hook(HookPoint.BEFORE_ACTION))
    await run(hands, BASH, FINISH, agent=asking(hands))
    asked_id = await asked_about(hands)
    await hands.log.append(CID, [confirmed(asked_id, command="rm -rf ~")])
    await hands.go()
    events = await logged(hands)
    error = error_in(events)
    copy = events[(error.cause or 0) - 1]
    assert (copy.wire()["command"], error.content) == ("rm -rf ~", "The action was not carried out: not on my machine")
    assert [call["event"]["command"] for call in told.calls] == ["rm -rf /", "rm -rf ~"]
    assert events[-1].wire()["agent_state"] == "finished"
    assert replay(events).divergence is None


async def test_action_edited_into_nothing_is_not_checked_again(hands: Hands) -> None:
    told = Told(None, "not on my machine")
    give(hands, told.hook(HookPoint.BEFORE_ACTION))
    await run(hands, BASH, FINISH, agent=asking(hands))
    asked_id = await asked_about(hands)
    await hands.log.append(CID, [confirmed(asked_id, no_such_field=1)])
    await hands.go()
    assert [call["event"]["command"] for call in told.calls] == ["rm -rf /"]
    assert (await hands.kinds()).count("observation.user_rejected") == 1


async def test_confirmed_or_rejected_action_was_already_checked(hands: Hands) -> None:
    told = Told()
    give(hands, told.hook(HookPoint.BEFORE_ACTION))
    await run(hands, BASH, BASH, agent=asking(hands))
    await hands.log.append(CID, [confirmed(await asked_about(hands))])
    loop = await hands.go()
    await hands.observe(loop.state.tools.pending[0].id)
    loop.wake()
    await hands.at_rest(loop)
    assert len(told.calls) == 2
    assert loop.state.confirmation.asked_id is not None
    rejected = ChangeAgentStateAction(agent_state=AgentState.USER_REJECTED, source=EventSource.USER)
    await hands.log.append(CID, [rejected])
    await hands.go()
    assert (await logged(hands))[-1].wire()["agent_state"] == "awaiting_user_input"
    assert len(told.calls) == 2


async def test_vetoed_call_is_never_made_and_ends_in_error(hands: Hands) -> None:
    told = Told("out of office hours")
    give(hands, told.hook(HookPoint.BEFORE_MODEL))
    await hands.begin(FINISH)
    loop = await hands.go()
    events = await logged(hands)
    assert "model.reply" not in [event.kind for event in events]
    assert events[-1].wire()["agent_state"] == "error"
    assert loop.state.lifecycle.last_error.startswith("HookVeto: out of office hours")
    assert told.calls[0]["service"] == "agent"
    assert told.calls[0]["model"].startswith("scripted/")


async def test_replies_and_observations_are_told_and_nothing_waits_for_it(hands: Hands) -> None:
    after_reply, after_result = Told("ignored"), Told("ignored")
    hooks = give(
        hands,
        after_reply.hook(HookPoint.AFTER_MODEL),
        after_result.hook(HookPoint.AFTER_OBSERVATION, kinds=frozenset({"observation.run"})),
    )
    await hands.begin(BASH, FINISH)
    loop = await hands.go()
    (action,) = [event for event in await hands.events() if event.kind == "action.run"]
    await hands.observe(action.id, "gone")
    loop.wake()
    await hands.at_rest(loop)
    await hooks.aclose()
    assert [call["event"]["kind"] for call in after_reply.calls] == ["model.reply", "model.reply"]
    assert [call["event"]["content"] for call in after_result.calls] == ["gone"]
    assert (await logged(hands))[-1].wire()["agent_state"] == "finished"


async def test_a_hook_that_fails_or_hangs_vetoes(hands: Hands) -> None:
    async def broken(_: Mapping[str, Any]) -> str | None:
        raise ValueError("oops")

    async def hanging(_: Mapping[str, Any]) -> str | None:
        await asyncio.Event().wait()
        return None

    give(
        hands,
        Hook(HookPoint.BEFORE_ACTION, "broken", broken),
        Hook(HookPoint.BEFORE_FINISH, "hanging", hanging, timeout_seconds=0.05, kinds=frozenset({"action.finish"})),
    )
    await hands.begin(BASH, FINISH, {"text": "I stop."})
    await hands.go()
    contents = [getattr(event, "content", "") for event in await logged(hands)]
    assert "The action was not carried out: the hook broken failed: ValueError: oops" in contents
    assert "Your finish was not accepted: the hook hanging did not answer in time" in contents


async def timed_out(_: Mapping[str, Any]) -> str | None:
    raise TimeoutError from ConnectionError("no route to the guard")


VETOES_BY_EXIT_CODE = (
    "import json, sys; command = json.load(sys.stdin)['event']['command']; "
    "print('no ' + command, file=sys.stderr); sys.exit(2)"
)


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (make_command_ask([sys.executable, "-c", VETOES_BY_EXIT_CODE]), "no rm -rf /"),
        (make_function_ask(lambda told: f"no {told['point']}"), "no before_action"),
        (timed_out, f"{FAILED} TimeoutError (caused by ConnectionError: no route to the guard)"),
        (make_command_ask(["sh", "-c", "echo no licence; exit 1"]), f"{FAILED} it ended with 1: no licence"),
        (make_command_ask(["sh", "-c", "exit 3"]), f"{FAILED} it ended with 3: it wrote nothing"),
        (make_command_ask(["sh", "-c", "kill -9 $$"]), f"{FAILED} it ended with the signal SIGKILL: it wrote nothing"),
        (
            make_command_ask(["no-such-program"]),
            f"{FAILED} FileNotFoundError: [Errno 2] No such file or directory: 'no-such-program'",
        ),
    ],
    ids=["exit code 2", "function", "timeout", "exit code 1", "exit code 3", "signal", "no program"],
)
async def test_a_veto_and_a_failed_hook_say_why(hands: Hands, ask: Any, why: str) -> None:
    give(hands, Hook(HookPoint.BEFORE_ACTION, "guard", ask))
    error = error_in(await run(hands, BASH, FINISH))
    assert error.content == f"The action was not carried out: {why}"


async def test_hanging_hook_command_ends_with_its_children(hands: Hands, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hang_once = f"test -e {pid} && exit 0; sleep 600 & echo $! > {pid}; wait"
    hook = Hook(HookPoint.BEFORE_FINISH, "guard", make_command_ask(["sh", "-c", hang_once]), timeout_seconds=1.0)
    give(hands, hook)
    (refused,) = [event for event in await run(hands, FINISH, FINISH) if isinstance(event, FinishRefusedObservation)]
    assert refused.content == "Your finish was not accepted: the hook guard did not answer in time"
    await until(lambda: not is_at_work(int(pid.read_text())), what="the end of what the hook has begun")


def is_at_work(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_file_names_functions_and_commands(
    hands: Hands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guard_of_the_test.py").write_text("async def check(told):\n    return 'guarded ' + told['point']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hooks.toml").write_text(
        '[[hook]]\non = "before_action"\npython = "guard_of_the_test:check"\nkinds = ["action.run"]\n'
        '[[hook]]\non = "before_finish"\ncommand = ["true"]\ntimeout_seconds = 5\n'
    )
    object.__setattr__(hands.services, "hooks", load_hooks(str(tmp_path / "hooks.toml")))
    events = await run(hands, BASH, FINISH)
    error = error_in(events)
    assert error.content == "The action was not carried out: guarded before_action"
    assert events[-1].wire()["agent_state"] == "finished"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[hook]]\non = 'before_lunch'\ncommand = ['x']\n", "hook.0.on: Input should be"),
        ("[[hook]]\non = 'before_model'\n", "needs `command` or `python`, and not both"),
        ("[[hook]]\non = 'before_model'\npython = 'no_such_module_here:x'\n", "cannot be imported"),
        ("[[hook]]\non = 'before_model'\npython = 'json:__name__'\n", "is a str, not a function"),
        ("[[hook]]\non = 'before_model'\ncomand = ['x']\n", "hook.0.comand: Extra inputs are not permitted"),
        ("hooks", "is not TOML"),
    ],
)
def test_unusable_hooks_are_reported_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hooks.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        load_hooks(str(path))
    with pytest.raises(UsageError, match=r"The file of hooks .*nowhere.toml cannot be read"):
        load_hooks(str(tmp_path / "nowhere.toml"))
