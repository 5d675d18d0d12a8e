"""The protocol of condensers, and the form of their decisions.

Holds: a condenser is a function of the View and its specification. A question to a model is a value (`Inquiry`) that
the loop carries out, and its result is a function of the answer. So a worker that dies in between costs one model call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.contract import CondensationAction, Event, LLMSpec, ModelReply, Observation, ToolSpec
from controller_worker.memory.view import View
from controller_worker.providers import Message


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question to a model; its answer makes a condensation.

    Attributes:
        tools: the tools for the answer; empty if it is text.
        llm: None for the conversation's own model.
        conclude: translates an answer; it never raises, whatever the model wrote.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    llm: LLMSpec | None
    conclude: Callable[[ModelReply], CondensationAction]


Condensed = View | CondensationAction | Inquiry
"""A View to show, a condensation to append first, or a question to ask first."""


class Condenser(Protocol):
    """One strategy.

    A class of this package with a `type` is the condenser of that name. It is made from a specification: the one of its
    type in `broker.contract.condenser_specs`, or an `OtherCondenserSpec`.
    """

    def condense(self, view: View) -> Condensed:
        """Decide about a View."""
        ...


def forget_events(
    view: View, forgotten: Sequence[Event], *, summary: str | None = None, summary_offset: int | None = None
) -> CondensationAction:
    """Return the event that forgets events of a View: as a range of ids if no remaining event lies between them.

    Differs: nothing to forget is an empty list; the original takes the smallest id of nothing.
    """
    ids = {event.id for event in forgotten}
    first = min(ids, default=0)
    last = max(ids, default=0)
    place = {"summary": summary, "summary_offset": summary_offset} if summary is not None else {}
    if len(ids) > 1 and not any(first <= event.id <= last and event.id not in ids for event in view.events):
        return CondensationAction.model_validate(
            {"forgotten_events_start_id": first, "forgotten_events_end_id": last, **place}
        )
    return CondensationAction.model_validate({"forgotten_event_ids": sorted(ids), **place})


def add_results(view: View, forgotten: Sequence[Event]) -> list[Event]:
    """Return the events to forget, together with the observations of the actions among them.

    Differs: the original leaves such an observation in the View. No prompt shows it, because its call is gone, and no
    summary contains it either.
    """
    ids = {event.id for event in forgotten}
    return [
        event
        for event in view.events
        if event.id in ids or (isinstance(event, Observation) and event.cause is not None and event.cause in ids)
    ]
