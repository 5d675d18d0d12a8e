"""The View: the visible events of a log, condensations applied."""

import pytest

from broker.contract.actions import (
    ChangeAgentStateAction,
    CmdRunAction,
    CondensationAction,
    CondensationRequestAction,
    MessageAction,
    NullAction,
)
from broker.contract.events import ConversationCreated, Event, EventSource, ModelCallFailed, ModelReply, with_id
from broker.contract.observations import (
    AgentCondensationObservation,
    AgentStateChangedObservation,
    CmdOutputObservation,
    NullObservation,
)
from controller_worker.memory.conversation_memory import ConversationMemory
from controller_worker.memory.view import ViewFold
from tests.controller_parts import Core, bash, messages_of, said, started, system_message


def folded(*events: Event) -> ViewFold:
    fold = ViewFold()
    for number, event in enumerate(events, 1):
        fold.add(with_id(event, number))
    return fold


def ids(fold: ViewFold) -> list[int]:
    return [event.id for event in fold.view().events]


def worked(steps: int) -> Core:
    """A conversation with so many commands run: events 1 to 6, then reply, action and output of each step."""
    core = started()
    for number in range(steps):
        core.reply(bash(call_id=f"c{number}"), text=f"Step {number}.")
        core.observe(core.state.tools.pending[0].id)
    return core


def prompt(fold: ViewFold) -> list[str]:
    messages = messages_of(fold.list_events(fold.view().events))
    return [message.role + "".join(f" {call.id}" for call in message.tool_calls) for message in messages]


def test_events_come_in_order_and_once() -> None:
    fold = folded(system_message())
    with pytest.raises(AssertionError, match="event 3 after version 1"):
        fold.add(with_id(said("x"), 3))
    assert ids(folded(ConversationCreated(conversation_id="c"), said("task"), system_message())) == [3, 2]


@pytest.mark.parametrize(
    ("forgotten", "shown"), [(2, [1, 3]), (1, [1, 2, 3])], ids=["another message", "system message comes back"]
)
def test_task_or_system_message_that_was_forgotten(forgotten: int, shown: list[int]) -> None:
    gone = CondensationAction(forgotten_event_ids=(forgotten,))
    fold = folded(system_message(), said("one"), said("two"), gone)
    assert [event.id for event in fold.list_events(fold.view().events)] == shown


@pytest.mark.parametrize(
    "event",
    [
        ConversationCreated(conversation_id="c"),
        NullAction(),
        NullObservation(),
        ChangeAgentStateAction(agent_state="paused"),
        AgentStateChangedObservation(agent_state="running"),
        ModelReply(),
        ModelCallFailed(code="internal"),
        CmdRunAction(command="ls", hidden=True),
        CmdOutputObservation(command="ls", hidden=True),
        CondensationRequestAction(),
        CondensationAction(forgotten_event_ids=()),
    ],
    ids=lambda event: event.kind,
)
def test_ignored_events(event: Event) -> None:
    assert ids(folded(event)) == []


def test_a_condensation_leaves_out_what_it_names() -> None:
    say = [said(str(number)) for number in range(4)]
    assert ids(folded(*say, CondensationAction(forgotten_event_ids=(2, 4)))) == [1, 3]
    whole = CondensationAction(forgotten_events_start_id=2, forgotten_events_end_id=3)
    assert ids(folded(*say, whole)) == [1, 4]


def test_the_latest_summary_stands_at_its_place() -> None:
    say = [said(str(number)) for number in range(5)]
    first = CondensationAction(forgotten_event_ids=(2,), summary="first", summary_offset=1)
    second = CondensationAction(forgotten_event_ids=(3,), summary="second", summary_offset=1)
    shown = folded(*say, first, second).view().events
    assert [event.id for event in shown] == [1, 0, 4, 5]
    assert shown[1] == AgentCondensationObservation(content="second")


def test_a_condensation_without_a_summary_leaves_the_earlier_one() -> None:
    first = CondensationAction(forgotten_event_ids=(1,), summary="first", summary_offset=0)
    fold = folded(said("a"), said("b"), first, CondensationAction(forgotten_event_ids=(2,)))
    assert [event.content for event in fold.view().events] == ["first"]  # type: ignore[attr-defined]


def test_view_of_equal_length_is_a_different_view() -> None:
    """B13: the original keeps its View as long as the history has the same length, whatever was taken out of it."""
    events: list[Event] = [system_message(), said("task"), said("a"), said("b")]
    fold = folded(*events)
    assert ids(fold) == [1, 2, 3, 4]
    for event in (CondensationAction(forgotten_event_ids=[3, 4]), said("c"), said("d")):
        fold.add(with_id(event, fold.version + 1))
    assert ids(fold) == [1, 2, 6, 7]


def test_a_request_stands_until_the_next_condensation() -> None:
    fold = folded(said("a"), CondensationRequestAction())
    assert fold.view().has_request
    fold.add(with_id(CondensationAction(forgotten_event_ids=()), 3))
    assert not fold.view().has_request


def test_of_a_forgotten_action_neither_call_nor_result_is_shown() -> None:
    core = worked(3)
    actions = [event for event in core.events if isinstance(event, CmdRunAction)]
    outputs = [event for event in core.events if isinstance(event, CmdOutputObservation)]
    gone = CondensationAction(forgotten_event_ids=(actions[0].id, outputs[1].id))
    assert prompt(folded(*core.events, gone)) == ["system", "user", "user", "assistant c2", "tool"]


def test_task_follows_the_system_message_even_when_forgotten() -> None:
    core = worked(2)
    task = next(event for event in core.events if isinstance(event, MessageAction))
    assert prompt(folded(*core.events, CondensationAction(forgotten_event_ids=(task.id,)))) == [
        *("system", "user", "user"),
        *("assistant c0", "tool", "assistant c1", "tool"),
    ]


def test_words_without_calls_show_as_long_as_their_message() -> None:
    core = started()
    core.reply(text="Which one?")
    core.say("the red one")
    core.run()
    assert prompt(folded(*core.events)) == ["system", "user", "user", "assistant", "user"]
    words = next(e for e in core.events if isinstance(e, MessageAction) and e.source is EventSource.AGENT)
    assert prompt(folded(*core.events, CondensationAction(forgotten_event_ids=(words.id,)))) == [
        *("system", "user", "user", "user")
    ]


def test_a_prompt_made_anew_is_the_one_that_grew() -> None:
    core = worked(5)
    grown = ConversationMemory()
    for event in core.events:
        grown.add(event)
    fold = folded(*core.events)
    anew = ConversationMemory()
    for event in fold.list_events(fold.view().events):
        anew.add(event)
    assert anew.messages() == grown.messages()


def test_kept_events_share_their_sets_of_field_names() -> None:
    first, second = folded(said("One."), said("Two.")).view().events
    assert first.model_fields_set is second.model_fields_set
