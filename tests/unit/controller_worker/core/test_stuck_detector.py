"""Stuck detection: OpenHands' five patterns, equality of events, and repetitions that are no loop."""

import itertools
import weakref
from collections.abc import Sequence

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
    ModelReply,
    ModelToolCall,
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
from controller_worker.core.concerns.loops import Loops
from controller_worker.core.state import State, parse_snapshot, to_snapshot
from controller_worker.core.stuck_detector import (
    DetectedLoop,
    RecentEvents,
    Trace,
    add_action,
    add_observation,
    find_loop,
    is_poll,
    make_call_name,
    trace_calls,
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


def syntax_error(message: str, *, first: str = "Cell In[1], line 4") -> Observation:
    lines = [first, "    x = 'a", "        ^", f"SyntaxError: {message}"]
    lines += ["[Jupyter current working directory: /workspace]", "[Jupyter Python interpreter: /usr/bin/python3]"]
    return IPythonRunCellObservation(content="\n".join(lines), code="x")


PWD = CmdRunAction(command="pwd")
ROOT = CmdOutputObservation(command="pwd", content="/", metadata=CmdOutputMetadata(exit_code=0))
CELL = IPythonRunCellAction(code="x = 'a")
SAID = MessageAction(content="Shall I?", source=EventSource.AGENT)
PERSON = MessageAction(content="yes", source=EventSource.USER)
ERRORS = [event for n in range(3) for event in (LS, ErrorObservation(content=f"error {n}"))]
ELSEWHERE = [
    event for n in range(3) for event in (CELL, syntax_error("incomplete input", first=f"Cell In[1], line {n}"))
]
THOUGHT = (AgentThinkAction(thought="hm"), AgentThinkObservation(content="Your thought has been logged."))


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ((LS, RAN) * 3, None),
        ((LS, RAN) * 4, ("repeating_action_observation", 4, 1)),
        ((LS, RAN, PWD, RAN, *(LS, RAN) * 4), ("repeating_action_observation", 4, 5)),
        (THOUGHT * 4, ("repeating_action_observation", 4, 1)),
        (ERRORS[:4], None),
        (ERRORS, ("repeating_action_error", 3, 1)),
        ((LS, RAN, *(LS, FAILED) * 3), ("repeating_action_error", 3, 3)),
        ((LS, FAILED) * 4, ("repeating_action_observation", 4, 1)),  # the first pattern that fits
        *(
            ((CELL, syntax_error(message)) * 3, ("repeating_action_error", 3, 1))
            for message in (
                "unterminated string literal (detected at line 1)",
                "invalid syntax. Perhaps you forgot a comma?",
                "incomplete input",
            )
        ),
        ((CELL, syntax_error("name 'a' is not defined")) * 3, None),
        ((CELL, syntax_error("incomplete input", first="File x.py, line 4")) * 3, None),
        (ELSEWHERE, None),
        ((SAID, PERSON, SAID, PERSON, SAID), ("monologue", 3, 1)),
        ((SAID, RAN, SAID, SAID), None),
        ((RAN, SAID, SAID, SAID), ("monologue", 3, 2)),
        (((LS, RAN, PWD, ROOT) * 2 + (LS, RAN)), None),
        ((LS, RAN, PWD, ROOT) * 3, ("repeating_action_observation_pattern", 3, 1)),
    ],
    ids=itertools.count(),
)
def test_pattern_is_found(events: Sequence[Event], found: tuple[str, int, int] | None) -> None:
    assert loop(*events) == (DetectedLoop(*found) if found else None)


def test_condensations_without_anything_in_between() -> None:
    condensation = CondensationAction(forgotten_event_ids=())
    busy = (condensation, LS, RAN)
    work = [event for n in range(8) for event in (condensation, CmdRunAction(command=f"{n}"), RAN)]
    assert loop(*work, condensation, CondensationRequestAction(), condensation) == DetectedLoop(
        "context_window_error", 2, 25
    )
    assert loop(condensation, condensation) is None
    assert len(recent(*busy * 20).condensations) == 10


def test_thresholds_can_be_set() -> None:
    patient = LoopPolicy(action_observation=8, action_error=5, monologue=4, alternating_pattern=20)
    assert loop(*(LS, RAN) * 7, policy=patient) is None
    assert loop(*(LS, RAN) * 8, policy=patient) == DetectedLoop("repeating_action_observation", 8, 1)
    assert loop(*(LS, FAILED) * 5, policy=patient) == DetectedLoop("repeating_action_error", 5, 1)


def edits(number: int) -> IPythonRunCellAction:
    """A cell that edits; its fourth line differs."""
    return IPythonRunCellAction(code=f"edit_file_by_replace(\n  'a.py',\n  to_replace='x',\n  new='{number}')")


SHORT = IPythonRunCellAction(code="edit_file_by_replace('a', 'b')")
METADATA = ToolCallMetadata(function_name="f", tool_call_id="c", reply_id=3)


@pytest.mark.parametrize(
    ("event", "other", "is_equal"),
    [
        *(
            (LS, LS.model_copy(update=changes), True)
            for changes in (
                {"timeout": 7.0},
                {"cause": 3},
                {"source": EventSource.USER},
                {"tool_call_metadata": METADATA},
            )
        ),
        *(
            (LS, LS.model_copy(update=changes), False)
            for changes in (
                {"command": "ls -a"},
                {"thought": "hm"},
                {"is_input": True},
                {"blocking": True},
                {"security_risk": ActionSecurityRisk.HIGH},
            )
        ),
        # Of an output the command and the exit code count; of an edit in a cell its first three lines.
        (RAN, RAN.model_copy(update={"content": "b", "metadata": CmdOutputMetadata(exit_code=0, pid=7)}), True),
        (RAN, RAN.model_copy(update={"metadata": CmdOutputMetadata(exit_code=1)}), False),
        (edits(0), edits(1), True),
        (with_id(SHORT, 1), with_id(SHORT, 2), False),
        (MCPAction(name="t", arguments={"a": 1, "b": 2}), MCPAction(name="t", arguments={"b": 2, "a": 1}), True),
    ],
    ids=itertools.count(),
)
def test_which_events_are_equal(event: Event, other: Event, is_equal: bool) -> None:
    assert (trace_event(event, 1).digest == trace_event(other, 1).digest) is is_equal


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


def test_trace_drops_its_event_once_its_digest_is_read() -> None:
    event = with_id(MCPAction(name="t", arguments={"text": "x" * 1_000}), 5)
    seen, trace = weakref.ref(event), trace_event(event, 3)
    digest = trace.digest
    del event
    assert seen() is None
    assert trace.digest == digest
    assert trace == Trace(5, 3, digest) != Trace(5, 3, "other")


@pytest.mark.parametrize("call_id", ["call_1", "c" * 65, "\ud800"])
def test_snapshot_keeps_digests_that_nothing_has_read(call_id: str) -> None:
    call = ModelToolCall(id=call_id, name="t", arguments="{}")
    metadata = ToolCallMetadata(function_name="t", tool_call_id=call_id, reply_id=2)
    calls = trace_calls(ModelReply(id=2, tool_calls=(call,)))
    state = State(version=2, loops=Loops(recent(LS, RAN, FAILED), calls=calls))
    restored = parse_snapshot(to_snapshot(state))
    assert restored == state
    assert restored.loops.calls[0][0] == make_call_name(ErrorObservation(tool_call_metadata=metadata))


def test_events_without_a_meaning_do_not_count() -> None:
    nothing = (NullObservation(), NullAction(), PERSON)
    assert loop(*((LS, RAN, *nothing) * 4)) == DetectedLoop("repeating_action_observation", 4, 1)
    assert recent(*nothing, CondensationRequestAction()) == RecentEvents()
    assert recent(CmdRunAction(command="ls", hidden=True), CmdOutputObservation(command="ls", hidden=True)) == (
        RecentEvents()
    )


def output(command: str, exit_code: int, suffix: str) -> CmdOutputObservation:
    metadata = CmdOutputMetadata(exit_code=exit_code, suffix=suffix)
    return CmdOutputObservation(command=command, content="", metadata=metadata)


STILL = "\n[The command has no new output after 30 seconds.]"


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (output("", -1, STILL), True),
        (output("  ", -1, STILL), True),
        (output("", 0, "\n[The command completed with exit code 0.]"), False),
        (output("", -1, ""), False),
        (output("C-c", -1, STILL), False),
        (output("sleep 100", -1, STILL), False),
        (NullObservation(), False),
    ],
)
def test_only_waiting_for_a_running_command_is_a_poll(observation: Observation, expected: bool) -> None:
    assert is_poll(observation) is expected


def test_detector_state_does_not_grow() -> None:
    found = recent(*(event for n in range(500) for event in (CmdRunAction(command=f"{n}"), RAN)))
    assert [trace.id for trace in found.actions] == [989, 991, 993, 995, 997, 999]
    assert len(found.observations) == 6
