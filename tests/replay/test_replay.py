"""A log decided again, offline: recorded conversations come out the same to the byte, and a difference is named."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import (
    AgentSpec,
    DelegateEnded,
    Event,
    ModelReply,
    ModelToolCall,
    with_id,
)
from broker.contract.observations import AgentStateChangedObservation, SuccessObservation
from broker.log.entries import parse_lines, render_event_line
from broker.runtime.errors import CorruptEntry, UsageError
from controller_worker.core.announcement import end_in_error, to_answer
from controller_worker.core.concerns.delegation import STARTED
from controller_worker.loop.replay import Divergence, replay
from tests.controller_parts import Core, bash, call, check_replay, finish, started
from tests.scenarios import play

GOLDEN = sorted(Path(__file__).with_name("golden").glob("*.jsonl"))


def recorded(path: Path) -> list[Event]:
    return parse_lines(path.read_text().splitlines(), source=path.name)


def finished() -> list[Event]:
    """A command and a finish; 12 events."""
    core = started()
    core.reply(bash())
    core.observe(8)
    core.reply(finish())
    assert len(core.events) == 12
    return core.events


def changed(events: Sequence[Event], event_id: int, **fields: Any) -> list[Event]:
    return [event.model_copy(update=fields) if event.id == event_id else event for event in events]


def divergence_of(events: Sequence[Event]) -> Divergence:
    found = replay(events).divergence
    assert found is not None
    return found


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_log_is_decided_as_it_was(path: Path) -> None:
    """Recorded by earlier versions from real workers; a version that decides otherwise must say so in docs/replay.md."""
    events = recorded(path)
    found = replay(events)
    assert found.divergence is None, "\n".join(found.divergence.to_diff())
    assert found.events == len(events)
    assert found.decided > len(events) / 3
    assert not found.is_waiting


def test_changed_decision_is_named_with_both() -> None:
    events = changed(finished(), 11, final_thought="not done at all")
    found = divergence_of(events)
    assert (replay(events).events, found.event_id) == (10, 11)
    lines = found.to_diff()
    assert lines[0] == "event 11: the controller decides to ask the model for step 3"
    assert '- "final_thought": "not done at all",' in lines
    assert '+ "final_thought": "done",' in lines


def test_an_end_that_was_not_decided_is_found() -> None:
    events = finished()[:9]
    events.append(with_id(AgentStateChangedObservation(agent_state="finished", timestamp=events[-1].timestamp), 10))
    found = divergence_of(events)
    assert (found.event_id, found.decided) == (10, None)
    assert found.to_diff()[0] == "event 10: the controller decides to ask the model for step 2"


def test_a_second_reply_or_half_an_append_is_found() -> None:
    events = finished()
    again = with_id(events[9], 13)
    assert isinstance(again, ModelReply)
    assert divergence_of([*events, again]).event_id == 13
    cut = divergence_of(events[:10])
    assert (cut.event_id, cut.recorded) == (11, None)


def test_events_before_the_controller_has_acted_are_no_difference() -> None:
    core = Core()
    assert replay(core.events).is_waiting
    play(core, "say, paused & say")
    check_replay(core)


def test_inherited_events_of_a_fork_are_not_decided_again() -> None:
    events = finished()
    cut = [events[0].model_copy(update={"forked_from": "another@10"}), *events[1:10]]
    found = replay(cut)
    assert found.divergence is None
    assert found.decided == 0
    assert replay(changed(cut, 5, agent_state="paused")).divergence is None


def delegated() -> list[Event]:
    """A delegate that is waited for, and one in the background; 17 events."""
    core = started(agent=AgentSpec(enable_delegation=True))
    core.reply(delegate("waited-for"), delegate("aside", background=True))
    begun = SuccessObservation(content=STARTED.format(agent="CodeActAgent", id=9))
    core.append(to_answer(core.state.delegation.delegates[1], begun))
    for delegate_id in (9, 8):
        core.put(
            DelegateEnded(
                delegate_id=delegate_id,
                conversation_id=f"d{delegate_id}",
                agent_state=AgentState.FINISHED,
                content="CodeActAgent finishes task with a: 1",
                outputs={"a": 1},
            )
        )
        core.run()
    core.reply(finish())
    assert len(core.events) == 17
    return core.events


def delegate(call_id: str, **arguments: Any) -> ModelToolCall:
    return call("delegate", json.dumps({"agent": "CodeActAgent", "task": "look", **arguments}), call_id)


def test_delegates_are_redecided_with_results_from_the_log() -> None:
    events = delegated()
    found = replay(events)
    assert found.divergence is None, found.divergence.to_diff()
    # All but the creation, the task, two replies, the start in the background and two reports.
    assert found.decided == 17 - 7


@pytest.mark.parametrize(
    ("event_id", "fields"),
    [
        (9, {"join": "any"}),
        (10, {"content": "It has begun."}),
        (10, {"cause": 8}),
        (12, {"content": "Delegated agent finished with result:\n\nnothing"}),
        (12, {"delegate_id": 8}),
        (14, {"outputs": {"a": 2}}),
    ],
)
def test_another_report_of_a_delegate_is_found(event_id: int, fields: dict[str, Any]) -> None:
    assert divergence_of(changed(delegated(), event_id, **fields)).event_id == event_id


def test_outside_error_ends_waits_for_tools_and_delegates() -> None:
    core = started(agent=AgentSpec(enable_delegation=True))
    core.reply(bash(), delegate("d1"), delegate("d2", background=True), delegate("d3"))
    core.commit(end_in_error(core.state, "DeckhandsError: The conversation crashed its worker 3 times in a row."))
    assert core.states()[-1] == "error"
    check_replay(core)


def test_a_result_that_no_delegate_has_reported_is_found() -> None:
    events = delegated()
    found = divergence_of(
        [*events[:10], with_id(events[13].model_copy(update={"timestamp": events[10].timestamp}), 11)]
    )
    assert (found.event_id, found.decided) == (11, None)
    assert found.wanted == "the controller decides: AwaitDelegates"


def test_a_log_without_its_beginning_is_refused() -> None:
    with pytest.raises(UsageError):
        replay(finished()[1:])


def test_a_line_that_is_missing_is_named() -> None:
    lines = [render_event_line(event) for event in finished()]
    with pytest.raises(CorruptEntry, match="Line 3 of x has event 4"):
        parse_lines([*lines[:2], *lines[3:]], source="x")


def test_as_a_process_it_reads_lines_and_prints_a_report() -> None:
    lines = "\n".join(map(render_event_line, finished()))
    done = subprocess.run(
        [sys.executable, "-m", "controller_worker.loop.replay"], input=lines, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "replay": True,
        "conversation_id": "conversation-1",
        "events": 12,
        "decided": 7,
        "is_waiting": False,
        "state": "finished",
        "is_same": True,
        "divergence": None,
    }
