"""Condensers that ask nobody: what they show and what they forget."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from broker.contract.actions import CmdRunAction, CondensationAction
from broker.contract.browser_events import BrowserOutputObservation
from broker.contract.condenser_specs import (
    DEFAULT_CONDENSER,
    AmortizedForgettingCondenserSpec,
    BrowserOutputCondenserSpec,
    CondenserPipelineSpec,
    CondenserSpec,
    ConversationWindowCondenserSpec,
    LLMSummarizingCondenserSpec,
    NoOpCondenserSpec,
    ObservationMaskingCondenserSpec,
    RecentEventsCondenserSpec,
    handles_requests,
)
from broker.contract.events import Event, EventSource, with_id
from broker.contract.observations import AgentCondensationObservation, CmdOutputObservation
from broker.contract.recall import RecallAction, RecallObservation, RecallType
from broker.contract.specs import AgentSpec
from controller_worker.memory.condensers.condenser import Condensed, forget_events
from controller_worker.memory.condensers.registry import CONDENSERS, create_condenser
from controller_worker.memory.view import View, ViewFold
from tests.controller_parts import said, system_message


def actions(count: int, *, first: int = 1) -> list[Event]:
    return [with_id(CmdRunAction(command=f"c{number}"), number) for number in range(first, first + count)]


def pairs(count: int, *, first: int = 1) -> list[Event]:
    """Commands and their outputs: 1, 2 (of 1), 3, 4 (of 3), …"""
    made: list[Event] = []
    for number in range(first, first + 2 * count, 2):
        made.append(with_id(CmdRunAction(command=f"c{number}"), number))
        made.append(with_id(CmdOutputObservation(command=f"c{number}", content="out", cause=number), number + 1))
    return made


def condensed(spec: CondenserSpec, events: Sequence[Event], *, is_asked: bool = False) -> Condensed:
    return create_condenser(spec).condense(View(events, has_request=is_asked))


def shown(spec: CondenserSpec, events: Sequence[Event]) -> list[int]:
    view = condensed(spec, events)
    assert isinstance(view, View)
    return [event.id for event in view.events]


def forgotten(spec: CondenserSpec, events: Sequence[Event], *, is_asked: bool = False) -> tuple[int, ...]:
    condensation = condensed(spec, events, is_asked=is_asked)
    assert isinstance(condensation, CondensationAction)
    return condensation.forgotten


def test_every_type_has_its_condenser() -> None:
    assert set(CONDENSERS) == CondenserSpec.TYPES.keys() - {"pipeline"}
    assert sorted(CONDENSERS) == [
        *("amortized", "browser_output_masking", "conversation_window", "llm", "llm_attention", "noop"),
        *("observation_masking", "recent", "structured"),
    ]


def test_the_default() -> None:
    assert AgentSpec().condenser == DEFAULT_CONDENSER
    assert DEFAULT_CONDENSER.model_dump() == {
        "type": "pipeline",
        "condensers": (
            {"type": "conversation_window"},
            {"type": "browser_output_masking", "attention_window": 2},
            {"type": "llm", "keep_first": 4, "max_size": 120, "llm": None, "max_event_length": 10_000},
        ),
    }


def test_who_answers_requests() -> None:
    assert handles_requests(DEFAULT_CONDENSER)
    assert handles_requests(AmortizedForgettingCondenserSpec())
    assert not handles_requests(NoOpCondenserSpec())
    assert not handles_requests(CondenserPipelineSpec(condensers=(NoOpCondenserSpec(), RecentEventsCondenserSpec())))


@pytest.mark.parametrize("fields", [{"keep_first": 5, "max_size": 10}, {"max_size": 1}, {"keep_first": -1}])
def test_sizes_that_cannot_work_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        LLMSummarizingCondenserSpec(**fields)


# Noop, masking, recent


def test_noop_shows_everything() -> None:
    assert shown(NoOpCondenserSpec(), pairs(200)) == list(range(1, 401))


def test_older_observations_are_masked_and_keep_their_calls() -> None:
    events = pairs(3)
    view = condensed(ObservationMaskingCondenserSpec(attention_window=2), events)
    assert isinstance(view, View)
    assert view.events == [
        events[0],
        AgentCondensationObservation(id=2, cause=1, content="<MASKED>"),
        events[2],
        AgentCondensationObservation(id=4, cause=3, content="<MASKED>"),
        events[4],
        events[5],
    ]


def test_a_mask_is_made_once_however_often_it_is_shown() -> None:
    condenser = create_condenser(ObservationMaskingCondenserSpec(attention_window=2))
    fold = ViewFold()
    for event in pairs(3):
        fold.add(event)
    first, second = condenser.condense(fold.view()), condenser.condense(fold.view())
    assert isinstance(first, View)
    assert isinstance(second, View)
    assert first.events[1] is second.events[1]


def test_within_the_window_nothing_is_masked() -> None:
    events = pairs(3)
    view = condensed(ObservationMaskingCondenserSpec(attention_window=6), events)
    assert isinstance(view, View)
    assert view.events is events


def test_a_summary_is_never_masked() -> None:
    events = [AgentCondensationObservation(content="summary"), *pairs(1)]
    view = condensed(ObservationMaskingCondenserSpec(attention_window=1), events)
    assert isinstance(view, View)
    assert view.events[0] is events[0]


def test_only_the_latest_pages_are_shown() -> None:
    pages = [
        BrowserOutputObservation(id=number, url=f"https://{number}", trigger_by_action="browse", content="tree")
        for number in (1, 2, 3)
    ]
    events: list[Event] = [*pages, *actions(2, first=4)]
    view = condensed(BrowserOutputCondenserSpec(attention_window=2), events)
    assert isinstance(view, View)
    assert view.events == [
        AgentCondensationObservation(id=1, content="Visited URL https://1\nContent omitted"),
        *events[1:],
    ]


@pytest.mark.parametrize(
    ("keep_first", "max_events", "ids"),
    [
        (1, 4, [1, 8, 9, 10]),
        (0, 3, [8, 9, 10]),
        (4, 4, [1, 2, 3, 4]),
        (6, 4, [1, 2, 3, 4, 5, 6]),
        (1, 10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (1, 50, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_recent_events(keep_first: int, max_events: int, ids: list[int]) -> None:
    """The third case is B9: the original shows all ten, and the first four twice."""
    assert shown(RecentEventsCondenserSpec(keep_first=keep_first, max_events=max_events), actions(10)) == ids


# Amortized


def test_amortized_forgets_the_middle_once_there_is_too_much() -> None:
    spec = AmortizedForgettingCondenserSpec(keep_first=2, max_size=10)
    assert shown(spec, actions(10)) == list(range(1, 11))
    assert forgotten(spec, actions(11)) == (3, 4, 5, 6, 7, 8)
    condensation = condensed(spec, actions(11))
    assert isinstance(condensation, CondensationAction)
    assert (condensation.forgotten_events_start_id, condensation.forgotten_events_end_id) == (3, 8)
    assert condensation.summary is None


def test_a_request_halves_what_there_is() -> None:
    spec = AmortizedForgettingCondenserSpec(keep_first=1, max_size=100)
    assert forgotten(spec, actions(10), is_asked=True) == (2, 3, 4, 5, 6)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_request_with_nothing_to_forget_is_answered(count: int) -> None:
    """B14: the original takes the smallest id of nothing, and fails."""
    spec = AmortizedForgettingCondenserSpec(keep_first=1, max_size=100)
    assert condensed(spec, actions(count), is_asked=True) == CondensationAction(forgotten_event_ids=())


def test_the_result_of_a_forgotten_command_is_forgotten_with_it() -> None:
    spec = AmortizedForgettingCondenserSpec(keep_first=0, max_size=6)
    assert forgotten(spec, pairs(4)) == (1, 2, 3, 4, 5, 6)


# Ranges and lists


def test_a_range_never_covers_what_stays() -> None:
    events = [with_id(system_message(), 3), with_id(said("task"), 2), *actions(3, first=5)]
    assert forget_events(View(events), events[1:4]) == CondensationAction(forgotten_event_ids=(2, 5, 6))
    assert forget_events(View(events), events[2:4]) == CondensationAction(
        forgotten_events_start_id=5, forgotten_events_end_id=6
    )
    assert forget_events(View(events), events[4:]) == CondensationAction(forgotten_event_ids=(7,))


# Conversation window


def opening() -> list[Event]:
    """System message, task, and what was recalled about it."""
    recall = RecallAction(recall_type=RecallType.WORKSPACE_CONTEXT, query="task", source=EventSource.USER)
    found = RecallObservation(recall_type=RecallType.WORKSPACE_CONTEXT, cause=4)
    return [
        *(with_id(system_message(), 3), with_id(said("task"), 2)),
        *(with_id(recall, 4), with_id(found, 6)),
    ]


def test_the_window_moves_only_when_asked() -> None:
    events = [*opening(), *pairs(200, first=7)]
    assert shown(ConversationWindowCondenserSpec(), events) == [event.id for event in events]


def test_the_window_keeps_the_opening_and_the_newer_half() -> None:
    spec = ConversationWindowCondenserSpec()
    assert forgotten(spec, [*opening(), *pairs(4, first=7)], is_asked=True) == (7, 8, 9, 10)
    # Of five pairs the newer half begins with an observation, which goes too.
    assert forgotten(spec, [*opening(), *pairs(5, first=7)], is_asked=True) == (7, 8, 9, 10, 11, 12)


def test_window_without_task_or_candidates_forgets_nothing() -> None:
    spec, nothing = ConversationWindowCondenserSpec(), CondensationAction(forgotten_event_ids=())
    assert condensed(spec, pairs(3), is_asked=True) == nothing
    assert condensed(spec, opening(), is_asked=True) == nothing
    assert condensed(spec, [], is_asked=True) == nothing


# Pipeline


def test_pipeline_passes_the_view_until_the_first_condensation() -> None:
    spec = CondenserPipelineSpec(
        condensers=(
            RecentEventsCondenserSpec(keep_first=1, max_events=8),
            AmortizedForgettingCondenserSpec(keep_first=1, max_size=6),
            AmortizedForgettingCondenserSpec(keep_first=0, max_size=2),
        )
    )
    # The second sees 1 and 14 to 20, and leaves three of them.
    assert forgotten(spec, actions(20)) == (14, 15, 16, 17, 18)


def test_a_pipeline_of_views_is_a_view() -> None:
    masking = ObservationMaskingCondenserSpec(attention_window=1)
    spec = CondenserPipelineSpec(condensers=(masking, RecentEventsCondenserSpec(keep_first=0, max_events=2)))
    view = condensed(spec, pairs(2))
    assert isinstance(view, View)
    assert [event.kind for event in view.events] == ["action.run", "observation.run"]
    assert [event.id for event in view.events] == [3, 4]
