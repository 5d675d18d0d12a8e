"""The View: the part of the history that the model sees (OpenHands section 8).

A `ViewFold` is fed the log in order and updates the View, so that the cost of a step depends on the new events. A
`View` is the input and output of a condenser.

Holds: the system message comes first, wherever it is in the log. Forgotten events never come back. Only the latest
summary is shown.
Does not: decide which events are forgotten; see `controller_worker.memory.condensers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from broker.contract import (
    Action,
    AgentCondensationObservation,
    AgentState,
    AgentStateChangedObservation,
    CmdOutputObservation,
    CmdRunAction,
    CondensationAction,
    CondensationRequestAction,
    Event,
    EventSource,
    MessageAction,
    ModelReply,
    PlanAcceptedObservation,
    SystemMessageAction,
    share_names,
)


@dataclass(frozen=True, slots=True)
class View:
    """The input of a condenser. Its events must not be changed in place.

    Attributes:
        events: the shown events, in order; a summary has the id 0.
        has_request: a condensation was requested and there has been none since.
        overflows: number of consecutive prompts that did not fit the model.
        masks: placeholders of earlier Views of the same log, by id and text, so that each is made once.
    """

    events: Sequence[Event]
    has_request: bool = False
    overflows: int = 0
    masks: dict[tuple[int, str], Event] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.events)


class ViewFold:
    """The View of one log, event by event.

    Attributes:
        version: the last event added.
        condensations: number of condensations and of changes of agent so far; each makes earlier messages outdated.
    """

    def __init__(self) -> None:
        self.version = 0
        self.condensations = 0
        self._events: list[Event] = []
        self._companions: list[Event] = []
        self._system: SystemMessageAction | None = None
        self._task: MessageAction | None = None
        self._summary: AgentCondensationObservation | None = None
        self._summary_offset = 0
        self._has_request = False
        self._masks: dict[tuple[int, str], Event] = {}

    def add(self, event: Event) -> None:
        """Add the next event of the log."""
        assert event.id == self.version + 1, f"event {event.id} after version {self.version}"
        self.version = event.id
        share_names(event)  # it is kept; an event that is only folded into the state is not
        match event:
            case CondensationAction():
                self._forget(event)
            case CondensationRequestAction():
                self._has_request = True
            case PlanAcceptedObservation():
                # The executor's system message replaces the planning agent's.
                self._events = [*(one for one in self._events if one is not self._system), event]
                self._system = None
                self.condensations += 1
            case SystemMessageAction():
                self._system = self._system or event
                self._events.insert(0, event)
            case _ if is_companion(event):
                self._companions.append(event)
            case _ if is_shown(event):
                if self._task is None and isinstance(event, MessageAction) and event.source is EventSource.USER:
                    self._task = event
                self._events.append(event)

    def skip(self, event: Event) -> None:
        """Skip the next event of the log, which was taken back."""
        self.version = event.id

    def view(self, *, overflows: int = 0) -> View:
        """Return the current View. The same object grows with the fold until the next condensation."""
        return View(self._events, self._has_request, overflows, self._masks)

    def list_events(self, events: Sequence[Event]) -> Iterator[Event]:
        """Return the events that the model's messages are made of: those of the View, and their companions.

        Even after forgetting, there is a system message, followed by the task unless another user message is there
        (OpenHands 7.1).
        """
        replies = _find_reply_ids(events)
        companions = iter([*(one for one in self._companions if not _is_reply(one) or one.id in replies), None])
        companion = next(companions)
        for event in self._with_essential(events):
            # The system message comes first whenever it was written, and takes no companions along.
            while companion is not None and event is not self._system and 0 < companion.id < event.id:
                yield companion
                companion = next(companions)
            yield event
        while companion is not None:
            yield companion
            companion = next(companions)

    def _with_essential(self, events: Sequence[Event]) -> Sequence[Event]:
        if self._system is not None and (not events or events[0] is not self._system):
            events = [self._system, *(event for event in events if event is not self._system)]
        place = 1 if self._system is not None else 0
        second = events[place] if len(events) > place else None
        if self._task is None or (isinstance(second, MessageAction) and second.source is EventSource.USER):
            return events
        others = [event for event in events if event is not self._task]
        return [*others[:place], self._task, *others[place:]]

    def _forget(self, condensation: CondensationAction) -> None:
        """Remove forgotten events, and put the latest summary in their place."""
        self._has_request = False
        if condensation.summary is not None and condensation.summary_offset is not None:
            self._summary = AgentCondensationObservation(content=condensation.summary)
            self._summary_offset = condensation.summary_offset
        forgotten = set(condensation.forgotten)
        kept = [event for event in self._events if event.id not in forgotten and event.id > 0]
        if self._summary is not None:
            kept.insert(self._summary_offset, self._summary)
        self._events = kept
        replies = _find_reply_ids(kept)
        last = max(forgotten, default=0)
        self._companions = [
            event for event in self._companions if event.id in replies or (event.id > last and not _is_reply(event))
        ]
        self._masks = {}
        self.condensations += 1


def is_shown(event: Event) -> bool:
    """Return whether an event belongs to the View."""
    if isinstance(event, CmdRunAction | CmdOutputObservation) and event.hidden:
        return False
    return event.is_shown_to_model or event.tool_call_metadata is not None


def is_companion(event: Event) -> bool:
    """Return whether an event is outside the View but affects the text of an event in it."""
    if isinstance(event, AgentStateChangedObservation):
        return event.agent_state is AgentState.RUNNING
    return _is_reply(event)


def _find_reply_ids(events: Sequence[Event]) -> set[int]:
    """Return the ids of the replies behind these events, and of the events that have none."""
    named = {event.tool_call_metadata.reply_id for event in events if event.tool_call_metadata is not None}
    return named | {event.id - 1 for event in events if isinstance(event, Action)}


def _is_reply(event: Event) -> bool:
    return isinstance(event, ModelReply) and event.service == "agent"
