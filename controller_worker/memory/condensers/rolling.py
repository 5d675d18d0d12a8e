"""When a rolling condenser shortens, and to how much (OpenHands section 8).

Holds: what is at the beginning and what is newest stays; each condensation halves what it was asked about.
Differs: a request on a View that is shorter than `max_size` halves the View itself, because the original asks for more
than there is, forgets nothing, and the prompt that did not fit does not fit again.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import AgentCondensationObservation, Event, RollingCondenserSpec
from controller_worker.memory.condensers.condenser import with_results
from controller_worker.memory.view import View

NO_SUMMARY = "No events summarized"
SHRINK = 0.8
"""How much of an event is shown after each prompt that did not fit: a number of OpenHands' SDK."""


def should_condense(spec: RollingCondenserSpec, view: View) -> bool:
    """Say whether there is too much, or somebody asked."""
    return view.has_request or len(view) > spec.max_size


def target_size(spec: RollingCondenserSpec, view: View) -> int:
    """Return how many events are to be left."""
    return min(spec.max_size, len(view)) // 2


def to_forget(spec: RollingCondenserSpec, view: View, *, tail_size: int) -> list[Event]:
    """Return what is between the first events and the latest, earlier summaries apart."""
    end = len(view) - max(1, tail_size)
    middle = [e for e in view.events[spec.keep_first : end] if not isinstance(e, AgentCondensationObservation)]
    return with_results(view, middle)


def previous_summary(spec: RollingCondenserSpec, view: View) -> str:
    """Return the summary that stands behind the first events, if there is one."""
    behind: Sequence[Event] = view.events[spec.keep_first : spec.keep_first + 1]
    return behind[0].content if behind and isinstance(behind[0], AgentCondensationObservation) else NO_SUMMARY


def event_chars(max_event_length: int, view: View) -> int:
    """Return how many characters of an event a prompt may show, fewer the more prompts did not fit."""
    return int(max_event_length * SHRINK**view.overflows)
