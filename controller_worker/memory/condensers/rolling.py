"""Shared parts of rolling condensers: size limits, and the question to a model (OpenHands section 8).

Holds: the first events and the newest stay. Each condensation halves the View.
Differs: a request on a View shorter than `max_size` halves the View itself. The original asks for more than there is
and forgets nothing, so the prompt that did not fit fails again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from broker.contract import (
    AgentCondensationObservation,
    AskingCondenserSpec,
    CondensationAction,
    Event,
    MessageAction,
    ModelReply,
    Observation,
    RollingCondenserSpec,
    ToolSpec,
    truncate_content,
)
from controller_worker.memory.condensers.condenser import Condensed, Inquiry, add_results, forget_events
from controller_worker.memory.view import View
from controller_worker.providers import Message, TextPart

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
