"""Events as text, for a model that summarizes or selects them."""

from __future__ import annotations

from collections.abc import Iterable

from broker.contract import Event, MessageAction, Observation, truncate_content

_LEFT_OUT = {"kind", "timestamp", "source", "cause", "tool_call_metadata", "blobs", "security_risk", "traceparent"}


def event_text(event: Event) -> str:
    """Return one event as text: its name, its source and its content."""
    name = f"{type(event).__name__} ({event.source.value})"
    if isinstance(event, MessageAction):
        return f"{name}\n{event.content}"
    if isinstance(event, Observation):
        return f"{name}\n{event.agent_text}"
    fields = event.model_dump(mode="json", exclude_defaults=True, exclude=_LEFT_OUT)
    return "\n".join([name, *(f"{field}: {value}" for field, value in fields.items())])


def event_blocks(events: Iterable[Event], max_chars: int) -> str:
    """Return events as `<EVENT id=…>` blocks, each of at most this many characters."""
    return "\n".join(
        f"<EVENT id={event.id}>\n{truncate_content(event_text(event), max_chars)}\n</EVENT>" for event in events
    )
