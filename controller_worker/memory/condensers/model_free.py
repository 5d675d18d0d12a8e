"""Condensers without a model, and the pipeline of condensers (OpenHands section 8).

Holds: a placeholder keeps the observation's id, cause and tool call, so that the call keeps a result. The system
message, the task and its recall stay in a conversation window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.contract import (
    AgentCondensationObservation,
    AmortizedForgettingCondenserSpec,
    BrowserOutputCondenserSpec,
    BrowserOutputObservation,
    CondensationAction,
    ConversationWindowCondenserSpec,
    Event,
    EventSource,
    MessageAction,
    NoOpCondenserSpec,
    Observation,
    ObservationMaskingCondenserSpec,
    RecallAction,
    RecallObservation,
    RecentEventsCondenserSpec,
    SystemMessageAction,
)
from controller_worker.memory.condensers.condenser import (
    Condensed,
    Condenser,
    add_results,
    compute_target_size,
    forget_events,
    select_forgotten,
    should_condense,
)
from controller_worker.memory.view import View

MASK = "<MASKED>"


class NoOpCondenser:
    """Leaves the View unchanged. A prompt that does not fit the model ends the conversation's work in an error."""

    type = "noop"

    def __init__(self, spec: NoOpCondenserSpec) -> None:
        self.spec = spec

    def condense(self, view: View) -> View:
        """See `Condenser.condense`."""
        return view


class RecentEventsCondenser:
    """Shows `keep_first` events and the latest, `max_events` in all.

    Differs: if `keep_first` leaves no room, only those events are shown; the original then shows everything twice.
    """

    type = "recent"

    def __init__(self, spec: RecentEventsCondenserSpec) -> None:
        self._keep_first = spec.keep_first
        self._max_events = spec.max_events

    def condense(self, view: View) -> View:
        """See `Condenser.condense`."""
        head = view.events[: self._keep_first]
        begin = max(len(head), len(view) - max(0, self._max_events - len(head)))
        if begin == len(head):
            return view
        return replace(view, events=[*head, *view.events[begin:]])


class ObservationMaskingCondenser:
    """Masks observations older than the last `attention_window` events."""

    type = "observation_masking"

    def __init__(self, spec: ObservationMaskingCondenserSpec) -> None:
        self._window = spec.attention_window

    def condense(self, view: View) -> View:
        """See `Condenser.condense`."""
        border = len(view) - self._window
        if border <= 0:
            return view
        older = [
            _mask(view, event, MASK) if isinstance(event, Observation) else event for event in view.events[:border]
        ]
        return replace(view, events=[*older, *view.events[border:]])


class BrowserOutputCondenser:
    """Masks all but the last `attention_window` pages."""

    type = "browser_output_masking"

    def __init__(self, spec: BrowserOutputCondenserSpec) -> None:
        self._window = spec.attention_window

    def condense(self, view: View) -> View:
        """See `Condenser.condense`."""
        # Runs at every step: `isinstance` with a model's class costs ten times as much.
        places = [place for place, event in enumerate(view.events) if type(event) is BrowserOutputObservation]
        older = places[: -self._window]
        if not older:
            return view
        events = list(view.events)
        for place in older:
            page = events[place]
            assert isinstance(page, BrowserOutputObservation)
            events[place] = _mask(view, page, f"Visited URL {page.url}\nContent omitted")
        return replace(view, events=events)


def _mask(view: View, event: Observation, text: str) -> Event:
    if isinstance(event, AgentCondensationObservation):
        return event
    mask = view.masks.get((event.id, text))
    if mask is None:
        mask = view.masks[event.id, text] = AgentCondensationObservation(
            id=event.id,
            content=text,
            source=event.source,
            cause=event.cause,
            tool_call_metadata=event.tool_call_metadata,
        )
    return mask


class AmortizedForgettingCondenser:
    """Shortens to half of `max_size`, without a summary."""

    type = "amortized"

    def __init__(self, spec: AmortizedForgettingCondenserSpec) -> None:
        self._spec = spec

    def condense(self, view: View) -> View | CondensationAction:
        """See `Condenser.condense`."""
        spec = self._spec
        if not should_condense(spec, view):
            return view
        head = min(spec.keep_first, len(view))
        return forget_events(view, select_forgotten(spec, view, tail_size=compute_target_size(spec, view) - head))


class ConversationWindowCondenser:
    """Keeps the essential events and, on request, only the newer half of the others."""

    type = "conversation_window"

    def __init__(self, spec: ConversationWindowCondenserSpec) -> None:
        self.spec = spec

    def condense(self, view: View) -> View | CondensationAction:
        """See `Condenser.condense`."""
        if not view.has_request:
            return view
        essential = _find_essential(view)
        others = [event for event in view.events if event.id not in essential and event.id > 0]
        if not essential:
            return forget_events(view, ())
        older = others[: len(others) - max(1, len(others) // 2)]
        newer = others[len(older) :]
        while newer and isinstance(newer[0], Observation):
            older.append(newer.pop(0))
        return forget_events(view, add_results(view, older))


def _find_essential(view: View) -> set[int]:
    """Return the ids of the events that always stay; none if there is no message yet."""
    task = next((e for e in view.events if isinstance(e, MessageAction) and e.source is EventSource.USER), None)
    if task is None:
        return set()
    kept: list[Event] = [event for event in view.events if isinstance(event, SystemMessageAction)]
    kept.append(task)
    recall = next((e for e in view.events if isinstance(e, RecallAction) and e.query == task.content), None)
    if recall is not None:
        kept.append(recall)
        kept += [e for e in view.events if isinstance(e, RecallObservation) and e.cause == recall.id]
    return {event.id for event in kept}


class CondenserPipeline:
    """Each condenser gets the View of the one before it; the first condensation ends the pipeline."""

    def __init__(self, condensers: Sequence[Condenser]) -> None:
        self._condensers = condensers

    def condense(self, view: View) -> Condensed:
        """See `Condenser.condense`."""
        for condenser in self._condensers:
            condensed = condenser.condense(view)
            if not isinstance(condensed, View):
                return condensed
            view = condensed
        return view
