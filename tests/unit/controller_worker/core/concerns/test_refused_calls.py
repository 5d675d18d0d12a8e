"""Loops of calls that are refused, and of messages with work in between."""

import pytest

from broker.contract.codec import decode, to_entry
from broker.contract.events import AgentSpec, ModelReply, ModelToolCall
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation, FinishRefusedObservation
from broker.contract.policies import LoopPolicy
from controller_worker.core.controller import apply
from controller_worker.core.effects import CallModel, Rest
from controller_worker.core.state import State, to_snapshot
from tests.controller_parts import bash, call, check_snapshots, finish, started
from tests.scenarios import play, scenarios

STUCK = "AgentStuckInLoopError: Agent got stuck in a loop"
REFUSED = {
    "unknown": ("CodeActAgent", call("run_shell", '{"command": "ls"}')),
    "missing": ("CodeActAgent", call("execute_bash", "{}")),
    "no-json": ("CodeActAgent", call("execute_bash", '{"command": ')),
    "unreadable": ("CodeActAgent", ModelToolCall(id="c", name="execute_bash", arguments="ls", problem="cut off")),
    "planning": ("PlanningAgent", finish()),
    "browsing": ("BrowsingAgent", finish()),
    "reading": ("ReadOnlyAgent", bash()),
    "locating": ("LocAgent", bash()),
}


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize("name", list(REFUSED))
def test_a_call_that_is_always_refused_is_a_loop(name: str, headless: bool) -> None:
    agent, refused = REFUSED[name]
    core = started(agent=AgentSpec(name=agent), headless=headless)
    core.reply(refused, text="Let me see.")
    assert core.reply(refused, text="Once more.") == CallModel(3, 1)
    assert core.reply(refused) == Rest()
    assert (core.state.lifecycle.last_error, core.state.usage.iteration) == (STUCK, 3)
    check_snapshots(core)


WORK_AND_WORDS = ", ".join(f"bash(make {n}), ran, text(Done.), say(and now?)" for n in range(3))


@scenarios(
    {
        "work between refused calls ends the repetition": (
            ", ".join(f"execute_bash, bash(ls {n}), ran -> model {2 * n + 3}" for n in range(4)),
            "",
        ),
        "refused call alternating with a command": (", ".join(["execute_bash, bash, ran"] * 3), STUCK),
        "equal messages with work between are no monologue": (
            f"{WORK_AND_WORDS}, " + ", ".join(f"bash(ls {n}), ran -> model {8 + n}" for n in range(6)),
            "",
        ),
        "three equal messages without work": (", ".join(["text(Done.), say(and now?)"] * 3), STUCK),
    }
)
def test_repetition_is_a_loop_only_without_work(scenario: tuple[str, str]) -> None:
    script, error = scenario
    assert play(started(), script).state.lifecycle.last_error == error


def test_refused_calls_with_other_arguments_are_no_loop() -> None:
    core, lenient = started(), started(agent=AgentSpec(enable_stuck_detection=False))
    for n in range(6):
        assert core.reply(call("run_shell", f'{{"command": "ls {n}"}}')) == CallModel(n + 2, 1)
        assert lenient.reply(call("run_shell")) == CallModel(n + 2, 1)


def test_long_call_counts_equally_when_stored_apart() -> None:
    core = started()
    core.reply(call("run_shell" + "l" * 40_000, '{"command": "' + "x" * 40_000 + '"}', "c" * 40_000))
    state = State()
    for event in core.events:
        state = apply(state, decode(to_entry(event.wire())[0], event.id))
    assert state.loops == core.state.loops
    assert len(state.loops.recent.actions) == len(core.state.loops.recent.actions)
    assert len(to_snapshot(state)) < 10_000


def test_equal_calls_of_one_reply_count_once() -> None:
    core = started()
    for n in range(2):
        calls = [call("execute_bash", "{}", f"c{m}") for m in range(5)]
        assert core.reply(*calls) == CallModel(n + 2, 1)
    assert core.reply(*calls) == Rest()
    assert core.state.lifecycle.last_error == STUCK


def test_a_restart_hides_refused_calls_with_their_replies() -> None:
    core = started(agent=AgentSpec(loop_policy=LoopPolicy(responses=("restart",))))
    first = core.state.version + 1
    for _ in range(3):
        core.reply(call("run_shell"))
    assert core.state.loops.met == 1
    forgotten = next(event for event in core.events if event.kind == "action.condensation")
    assert getattr(forgotten, "forgotten_events_start_id", None) == first
    assert core.wants() == CallModel(4, 1)


def test_a_finish_that_a_hook_always_refuses_is_a_loop() -> None:
    core = started()
    for n in range(3):
        assert core.wants() == CallModel(n + 1, 1)
        reply = ModelReply(id=core.state.version + 1, tool_calls=(finish(),), seen_id=core.state.version)
        veto = FinishRefusedObservation(content=f"no, for the {n}th time", reason="hook")
        core.append(reply, *core.agent.events_of(reply), veto)
    assert core.state.lifecycle.last_error == STUCK


def test_a_poll_between_equal_messages_is_work() -> None:
    core = started()
    still = CmdOutputMetadata(exit_code=-1, suffix="\n[The command has no new output after 30 seconds.]")
    for _ in range(3):
        core.reply(bash(""))
        core.observe(core.state.version, CmdOutputObservation(command="", metadata=still, cause=core.state.version))
        play(core, "text(It still runs.), say(and now?)")
    assert core.state.lifecycle.last_error == ""
