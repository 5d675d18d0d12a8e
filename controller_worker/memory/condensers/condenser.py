"""The protocol of condensers, and the base class of rolling ones (OpenHands section 8).

Rolling condensers share the size limits and the question to a model.

Holds: a condenser is a function of the View and its specification. A question to a model is a value (`Inquiry`) that
the loop carries out, and its result is a function of the answer. So a worker that dies in between costs one model call.
The first events and the newest stay. Each condensation halves the View.
Differs: a request on a View shorter than `max_size` halves the View. The original tries to keep more events than there
are and forgets nothing, so the prompt fails again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.contract import (
    AgentCondensationObservation,
    AskingCondenserSpec,
    CondensationAction,
    Event,
    LLMSpec,
    MessageAction,
    ModelReply,
    Observation,
    RollingCondenserSpec,
    ToolSpec,
    truncate_content,
)
from controller_worker.memory.view import View
from controller_worker.providers import Message, TextPart


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

    A class of this package with a `type` is the condenser of that name. It is made from the specification of that type
    in `broker.contract.condenser_specs`, or from an `OtherCondenserSpec`.
    """

    def condense(self, view: View) -> Condensed:
        """Decide about a View."""
        ...


def forget_events(
    view: View, forgotten: Sequence[Event], *, summary: str | None = None, summary_offset: int | None = None
) -> CondensationAction:
    """Return the event that forgets events of a View: as a range of ids if no remaining event lies between them.

    Differs: with nothing to forget, the list is empty; the original fails.
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


NO_SUMMARY = "No events summarized"
SHRINK = 0.8
"""Share of an event that is shown after each prompt that did not fit: a number of OpenHands' SDK."""
_LEFT_OUT = {"kind", "timestamp", "source", "cause", "tool_call_metadata", "blobs", "security_risk", "traceparent"}


def should_condense(spec: RollingCondenserSpec, view: View) -> bool:
    """Return whether the View is too long, or a condensation was requested."""
    return view.has_request or len(view) > spec.max_size


def compute_target_size(spec: RollingCondenserSpec, view: View) -> int:
    """Return the number of events to keep."""
    return min(spec.max_size, len(view)) // 2


def select_forgotten(spec: RollingCondenserSpec, view: View, *, tail_size: int) -> list[Event]:
    """Return the events between the first and the latest ones, without earlier summaries."""
    end = len(view) - max(1, tail_size)
    middle = [e for e in view.events[spec.keep_first : end] if not isinstance(e, AgentCondensationObservation)]
    return add_results(view, middle)


def find_previous_summary(spec: RollingCondenserSpec, view: View) -> str:
    """Return the summary after the first events, or `NO_SUMMARY`."""
    behind: Sequence[Event] = view.events[spec.keep_first : spec.keep_first + 1]
    return behind[0].content if behind and isinstance(behind[0], AgentCondensationObservation) else NO_SUMMARY


def compute_event_chars(max_event_length: int, view: View) -> int:
    """Return how many characters of an event a prompt may show; fewer after each prompt that did not fit."""
    return int(max_event_length * SHRINK**view.overflows)


def render_event(event: Event) -> str:
    """Return one event as text: its name, its source and its content."""
    name = f"{type(event).__name__} ({event.source.value})"
    if isinstance(event, MessageAction):
        return f"{name}\n{event.content}"
    if isinstance(event, Observation):
        return f"{name}\n{event.agent_text}"
    fields = event.model_dump(mode="json", exclude_defaults=True, exclude=_LEFT_OUT)
    return "\n".join([name, *(f"{field}: {value}" for field, value in fields.items())])


def render_events(events: Iterable[Event], max_chars: int) -> str:
    """Return events as `<EVENT id=…>` blocks, each of at most this many characters."""
    return "\n".join(
        f"<EVENT id={event.id}>\n{truncate_content(render_event(event), max_chars)}\n</EVENT>" for event in events
    )


def ask_for_summary(
    spec: AskingCondenserSpec,
    view: View,
    conclude: Callable[[list[Event], ModelReply], CondensationAction],
    *,
    instructions: str,
    ending: str = "",
    tools: tuple[ToolSpec, ...] = (),
) -> Condensed:
    """Return the question if the View is too long or a condensation was requested.

    Args:
        conclude: makes the condensation from the forgotten events and the reply; never raises.
        ending: the text after the events.
    """
    if not should_condense(spec, view):
        return view
    head = min(spec.keep_first, len(view))
    forgotten = select_forgotten(
        spec, view, tail_size=compute_target_size(spec, view) - head - 1
    )  # without the summary itself
    if not forgotten:
        return forget_events(view, ()) if view.has_request else view
    question = (
        f"{instructions}\n\n<PREVIOUS SUMMARY>\n{find_previous_summary(spec, view)}\n</PREVIOUS SUMMARY>\n\n"
        f"{render_events(forgotten, compute_event_chars(spec.max_event_length, view))}{ending}"
    )
    messages = (Message("user", (TextPart(question),)),)
    return Inquiry(messages, tools, spec.llm, lambda reply: conclude(forgotten, reply))
