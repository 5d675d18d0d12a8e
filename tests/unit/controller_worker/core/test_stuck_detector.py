"""Stuck detection: OpenHands' five patterns, what counts as equal, and what is no loop."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.actions import (
    AgentThinkAction,
    CmdRunAction,
    CondensationAction,
    CondensationRequestAction,
    MCPAction,
    MessageAction,
    NullAction,
)
from broker.contract.codec import decode, to_entry
from broker.contract.events import (
    Action,
    ActionSecurityRisk,
    Event,
    EventSource,
    Observation,
    ToolCallMetadata,
    with_id,
)
from broker.contract.file_events import FileEditAction
from broker.contract.observations import (
    AgentThinkObservation,
    CmdOutputMetadata,
    CmdOutputObservation,
    ErrorObservation,
    NullObservation,
)
from broker.contract.policies import LoopPolicy
from broker.contract.session_events import IPythonRunCellAction, IPythonRunCellObservation
from controller_worker.core.stuck_detector import (
    DetectedLoop,
    RecentEvents,
    add_action,
    add_observation,
    find_loop,
    is_poll,
    trace_event,
)

POLICY = LoopPolicy()
LS = CmdRunAction(command="ls")
RAN = CmdOutputObservation(command="ls", content="a.txt", metadata=CmdOutputMetadata(exit_code=0))
FAILED = ErrorObservation(content="no")


def recent(*events: Event, policy: LoopPolicy = POLICY, found: RecentEvents | None = None) -> RecentEvents:
    """Take in events, numbered from 1."""
    found = found or RecentEvents()
    for number, event in enumerate(events, 1):
        numbered = with_id(event, number)
        if isinstance(numbered, Action):
            found = add_action(found, numbered, trace_event(numbered, 0), policy)
        elif isinstance(numbered, Observation):
            found = add_observation(found, numbered, policy)
    return found


def loop(*events: Event, policy: LoopPolicy = POLICY) -> DetectedLoop | None:
    return find_loop(recent(*events, policy=policy), policy)


def syntax_error(message: str, *, first: str = "Cell In[1], line 4", where: str = "    x = 'a") -> Observation:
    text = "\n".join(
        (
            first,
            where,
            "        ^",
            f"SyntaxError: {message}",
            "[Jupyter current working directory: /workspace]",
            "[Jupyter Python interpreter: /usr/bin/python3]",
        )
    )
    return IPythonRunCellObservation(content=text, code="x")


# The patterns


def test_four_equal_actions_with_equal_observations() -> None:
    assert loop(*(LS, RAN) * 3) is None
    assert loop(*(LS, RAN) * 4) == DetectedLoop("repeating_action_observation", 4, 1)


def test_the_loop_begins_with_its_own_first_action() -> None:
    before = CmdRunAction(command="pwd")
    assert loop(LS, RAN, before, RAN, *(LS, RAN) * 4) == DetectedLoop("repeating_action_observation", 4, 5)


def test_three_equal_actions_with_errors_whatever_they_say() -> None:
    errors = [ErrorObservation(content=f"error {n}") for n in range(3)]
    assert loop(LS, errors[0], LS, errors[1]) is None
    assert loop(LS, errors[0], LS, errors[1], LS, errors[2]) == DetectedLoop("repeating_action_error", 3, 1)


def test_three_errors_begin_with_the_third_last_action() -> None:
    assert loop(LS, RAN, *(LS, FAILED) * 3) == DetectedLoop("repeating_action_error", 3, 3)


@pytest.mark.parametrize(
    "message",
    [
        "unterminated string literal (detected at line 1)",
        "invalid syntax. Perhaps you forgot a comma?",
        "incomplete input",
    ],
)
def test_three_equal_syntax_errors_in_a_cell(message: str) -> None:
    cell = IPythonRunCellAction(code="x = 'a")
    assert loop(*(cell, syntax_error(message)) * 3) == DetectedLoop("repeating_action_error", 3, 1)


def test_cells_that_fail_in_other_ways_are_no_loop_yet() -> None:
    cell = IPythonRunCellAction(code="x = 'a")
    assert loop(*(cell, syntax_error("name 'a' is not defined")) * 3) is None
    assert loop(*(cell, syntax_error("incomplete input", first="File x.py, line 4")) * 3) is None
    lines = [syntax_error("incomplete input", first=f"Cell In[1], line {n}") for n in range(3)]
    assert loop(cell, lines[0], cell, lines[1], cell, lines[2]) is None


def test_three_equal_messages_of_the_agent() -> None:
    message = MessageAction(content="Shall I?", source=EventSource.AGENT)
    person = MessageAction(content="yes", source=EventSource.USER)
    assert loop(message, person, message, person, message) == DetectedLoop("monologue", 3, 1)
    assert loop(message, RAN, message, message) is None
    assert loop(RAN, message, message, message) == DetectedLoop("monologue", 3, 2)


def test_two_actions_in_turns() -> None:
    pwd = CmdRunAction(command="pwd")
    where = CmdOutputObservation(command="pwd", content="/", metadata=CmdOutputMetadata(exit_code=0))
    turns = (LS, RAN, pwd, where)
    assert loop(*turns * 2, LS, RAN) is None
    assert loop(*turns * 3) == DetectedLoop("repeating_action_observation_pattern", 3, 1)


def test_condensations_without_anything_in_between() -> None:
    condensation = CondensationAction(forgotten_event_ids=())
    busy = (condensation, LS, RAN)
    work = [event for n in range(8) for event in (condensation, CmdRunAction(command=f"{n}"), RAN)]
    assert loop(*work, condensation, CondensationRequestAction(), condensation) == DetectedLoop(
        "context_window_error", 2, 25
    )
    assert loop(condensation, condensation) is None
    assert len(recent(*busy * 20).condensations) == 10


def test_the_first_pattern_that_fits_is_named() -> None:
    assert loop(*(LS, FAILED) * 4) == DetectedLoop("repeating_action_observation", 4, 1)


def test_thresholds_can_be_set() -> None:
    patient = LoopPolicy(action_observation=8, action_error=5, monologue=4, alternating_pattern=20)
    assert loop(*(LS, RAN) * 7, policy=patient) is None
    assert loop(*(LS, RAN) * 8, policy=patient) == DetectedLoop("repeating_action_observation", 8, 1)
    assert loop(*(LS, FAILED) * 5, policy=patient) == DetectedLoop("repeating_action_error", 5, 1)


# What is equal


@pytest.mark.parametrize(
    "changes",
    [
        {"timeout": 7.0},
        {"cause": 3},
        {"source": EventSource.USER},
        {"tool_call_metadata": ToolCallMetadata(function_name="f", tool_call_id="c", reply_id=3)},
    ],
)
def test_who_when_and_which_call_make_no_difference(changes: dict[str, Any]) -> None:
    assert trace_event(LS.model_copy(update=changes), 1).digest == trace_event(LS, 1).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"command": "ls -a"},
        {"thought": "hm"},
        {"is_input": True},
        {"blocking": True},
        {"security_risk": ActionSecurityRisk.HIGH},
    ],
)
def test_every_other_field_of_an_action_makes_a_difference(changes: dict[str, Any]) -> None:
    assert trace_event(LS.model_copy(update=changes), 1).digest != trace_event(LS, 1).digest


def test_of_output_only_command_and_exit_code_count() -> None:
    other = CmdOutputObservation(command="ls", content="b", metadata=CmdOutputMetadata(exit_code=0, pid=7))
    failed = CmdOutputObservation(command="ls", content="a.txt", metadata=CmdOutputMetadata(exit_code=1))
    assert trace_event(other, 1).digest == trace_event(RAN, 1).digest
    assert trace_event(failed, 1).digest != trace_event(RAN, 1).digest


def test_of_a_cell_that_edits_the_first_three_lines_count() -> None:
    long = "edit_file_by_replace(\n  'a.py',\n  to_replace='x',\n  new='{}')"
    first, second = (IPythonRunCellAction(code=long.format(n)) for n in range(2))
    assert trace_event(first, 1).digest == trace_event(second, 1).digest
    short = IPythonRunCellAction(code="edit_file_by_replace('a', 'b')")
    assert trace_event(with_id(short, 1), 1).digest != trace_event(with_id(short, 2), 1).digest


def test_the_order_of_arguments_makes_no_difference() -> None:
    first, second = MCPAction(name="t", arguments={"a": 1, "b": 2}), MCPAction(name="t", arguments={"b": 2, "a": 1})
    assert trace_event(first, 1).digest == trace_event(second, 1).digest


@pytest.mark.parametrize(
    "event",
    [
        FileEditAction(path="/a", command="create", file_text="x" * 40_000),
        MCPAction(name="t", arguments={"deep.er": {"text": ["y" * 40_000]}, "short": "z" * 15_000}),
        CmdRunAction(command="echo " + "é" * 40_000),
    ],
)
def test_event_counts_equally_when_its_texts_are_stored_apart(event: Event) -> None:
    entry, blobs = to_entry(event.wire())
    assert blobs
    assert trace_event(decode(entry, 5), 3) == trace_event(with_id(event, 5), 3)


# What is not an event of a loop


def test_what_says_nothing_does_not_count() -> None:
    nothing = (NullObservation(), NullAction(), MessageAction(content="hi", source=EventSource.USER))
    assert loop(*((LS, RAN, *nothing) * 4)) == DetectedLoop("repeating_action_observation", 4, 1)
    assert recent(*nothing, CondensationRequestAction()) == RecentEvents()


def test_what_is_hidden_does_not_count() -> None:
    hidden = CmdRunAction(command="ls", hidden=True)
    answer = CmdOutputObservation(command="ls", hidden=True)
    assert recent(hidden, answer) == RecentEvents()


def test_thoughts_count() -> None:
    think, logged = AgentThinkAction(thought="hm"), AgentThinkObservation(content="Your thought has been logged.")
    assert loop(*(think, logged) * 4) == DetectedLoop("repeating_action_observation", 4, 1)


def output(command: str, exit_code: int, suffix: str) -> CmdOutputObservation:
    metadata = CmdOutputMetadata(exit_code=exit_code, suffix=suffix)
    return CmdOutputObservation(command=command, content="", metadata=metadata)


def test_waiting_for_a_command_that_runs_is_a_poll() -> None:
    still = "\n[The command has no new output after 30 seconds.]"
    assert is_poll(output("", -1, still))
    assert is_poll(output("  ", -1, still))


@pytest.mark.parametrize(
    "observation",
    [
        output("", 0, "\n[The command completed with exit code 0.]"),
        output("", -1, ""),
        output("C-c", -1, "\n[The command has no new output after 30 seconds.]"),
        output("sleep 100", -1, "\n[The command has no new output after 30 seconds.]"),
        NullObservation(),
    ],
)
def test_anything_else_is_no_poll(observation: Observation) -> None:
    assert not is_poll(observation)


def test_what_is_kept_does_not_grow() -> None:
    found = recent(*(event for n in range(500) for event in (CmdRunAction(command=f"{n}"), RAN)))
    assert [trace.id for trace in found.actions] == [989, 991, 993, 995, 997, 999]
    assert len(found.observations) == 6
