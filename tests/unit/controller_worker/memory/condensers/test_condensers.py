"""Condensers without a model call: the events that they show and forget."""

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


def view_of(spec: CondenserSpec, events: Sequence[Event]) -> View:
    view = condensed(spec, events)
    assert isinstance(view, View)
    return view


def shown(spec: CondenserSpec, events: Sequence[Event]) -> list[int]:
    return [event.id for event in view_of(spec, events).events]


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


def test_condensers_that_answer_requests() -> None:
    assert handles_requests(DEFAULT_CONDENSER)
    assert handles_requests(AmortizedForgettingCondenserSpec())
    assert not handles_requests(NoOpCondenserSpec())
    assert not handles_requests(CondenserPipelineSpec(condensers=(NoOpCondenserSpec(), RecentEventsCondenserSpec())))


@pytest.mark.parametrize("fields", [{"keep_first": 5, "max_size": 10}, {"max_size": 1}, {"keep_first": -1}])
def test_sizes_that_cannot_work_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        LLMSummarizingCondenserSpec(**fields)


def test_older_observations_are_masked_and_keep_their_calls() -> None:
    events = pairs(3)
    masked = [AgentCondensationObservation(id=n, cause=n - 1, content="<MASKED>") for n in (2, 4)]
    view = view_of(ObservationMaskingCondenserSpec(attention_window=2), events)
    assert view.events == [events[0], masked[0], events[2], masked[1], *events[4:]]
    assert view_of(ObservationMaskingCondenserSpec(attention_window=6), events).events is events
    summarized = [AgentCondensationObservation(content="summary"), *pairs(1)]
    assert view_of(ObservationMaskingCondenserSpec(attention_window=1), summarized).events[0] is summarized[0]


def test_a_mask_is_made_once_however_often_it_is_shown() -> None:
    condenser = create_condenser(ObservationMaskingCondenserSpec(attention_window=2))
    fold = ViewFold()
    for event in pairs(3):
        fold.add(event)
    first, second = (condenser.condense(fold.view()) for _ in range(2))
    assert isinstance(first, View)
    assert isinstance(second, View)
    assert first.events[1] is second.events[1]


def test_only_the_latest_pages_are_shown() -> None:
    pages = [
        BrowserOutputObservation(id=number, url=f"https://{number}", trigger_by_action="browse", content="tree")
        for number in (1, 2, 3)
    ]
    events: list[Event] = [*pages, *actions(2, first=4)]
    masked = AgentCondensationObservation(id=1, content="Visited URL https://1\nContent omitted")
    assert view_of(BrowserOutputCondenserSpec(attention_window=2), events).events == [masked, *events[1:]]


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


RECALL = RecallAction(recall_type=RecallType.WORKSPACE_CONTEXT, query="task", source=EventSource.USER)
RECALLED = RecallObservation(recall_type=RecallType.WORKSPACE_CONTEXT, cause=4)
OPENING = [with_id(system_message(), 3), with_id(said("task"), 2), with_id(RECALL, 4), with_id(RECALLED, 6)]
"""System message, task, and what was recalled about it."""
PIPELINE = CondenserPipelineSpec(
    condensers=(
        RecentEventsCondenserSpec(keep_first=1, max_events=8),
        AmortizedForgettingCondenserSpec(keep_first=1, max_size=6),
        AmortizedForgettingCondenserSpec(keep_first=0, max_size=2),
    )
)
WINDOW = ConversationWindowCondenserSpec()


def amortized(keep_first: int, max_size: int) -> AmortizedForgettingCondenserSpec:
    return AmortizedForgettingCondenserSpec(keep_first=keep_first, max_size=max_size)


@pytest.mark.parametrize(
    ("spec", "events", "is_asked", "ids"),
    [
        (amortized(2, 10), actions(11), False, (3, 4, 5, 6, 7, 8)),
        (amortized(1, 100), actions(10), True, (2, 3, 4, 5, 6)),
        *((amortized(1, 100), actions(count), True, ()) for count in (0, 1, 2)),  # B14: the original fails
        (amortized(0, 6), pairs(4), False, (1, 2, 3, 4, 5, 6)),
        (WINDOW, [*OPENING, *pairs(4, first=7)], True, (7, 8, 9, 10)),
        # Of five pairs the newer half starts with an observation, which is dropped too.
        (WINDOW, [*OPENING, *pairs(5, first=7)], True, (7, 8, 9, 10, 11, 12)),
        *((WINDOW, events, True, ()) for events in (pairs(3), OPENING, [])),
        # The second sees 1 and 14 to 20, and leaves three of them.
        (PIPELINE, actions(20), False, (14, 15, 16, 17, 18)),
    ],
)
def test_forgotten_events(spec: CondenserSpec, events: list[Event], is_asked: bool, ids: tuple[int, ...]) -> None:
    assert forgotten(spec, events, is_asked=is_asked) == ids


def test_amortized_names_a_range_without_a_summary() -> None:
    assert condensed(amortized(2, 10), actions(11)) == CondensationAction(
        forgotten_events_start_id=3, forgotten_events_end_id=8
    )


@pytest.mark.parametrize(
    ("spec", "events"),
    [(NoOpCondenserSpec(), pairs(200)), (amortized(2, 10), actions(10)), (WINDOW, [*OPENING, *pairs(200, first=7)])],
    ids=["noop", "amortized with few", "window unasked"],
)
def test_everything_is_shown(spec: CondenserSpec, events: list[Event]) -> None:
    assert shown(spec, events) == [event.id for event in events]


def test_a_range_never_covers_what_stays() -> None:
    events = [with_id(system_message(), 3), with_id(said("task"), 2), *actions(3, first=5)]
    assert forget_events(View(events), events[1:4]) == CondensationAction(forgotten_event_ids=(2, 5, 6))
    range_ = CondensationAction(forgotten_events_start_id=5, forgotten_events_end_id=6)
    assert forget_events(View(events), events[2:4]) == range_
    assert forget_events(View(events), events[4:]) == CondensationAction(forgotten_event_ids=(7,))


def test_a_pipeline_of_views_is_a_view() -> None:
    masking = ObservationMaskingCondenserSpec(attention_window=1)
    spec = CondenserPipelineSpec(condensers=(masking, RecentEventsCondenserSpec(keep_first=0, max_events=2)))
    assert [(event.id, event.kind) for event in view_of(spec, pairs(2)).events] == [
        (3, "action.run"),
        (4, "observation.run"),
    ]
