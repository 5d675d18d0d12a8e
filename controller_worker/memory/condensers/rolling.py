"""Size limits of rolling condensers (OpenHands section 8).

Holds: the first events and the newest stay. Each condensation halves the View.
Differs: a request on a View shorter than `max_size` halves the View itself. The original asks for more than there is
and forgets nothing, so the prompt that did not fit fails again.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import AgentCondensationObservation, Event, RollingCondenserSpec
from controller_worker.memory.condensers.condenser import with_results
from controller_worker.memory.view import View

NO_SUMMARY = "No events summarized"
SHRINK = 0.8
"""Share of an event that is shown after each prompt that did not fit: a number of OpenHands' SDK."""


def should_condense(spec: RollingCondenserSpec, view: View) -> bool:
    """Return whether the View is too long, or a condensation was requested."""
    return view.has_request or len(view) > spec.max_size


def target_size(spec: RollingCondenserSpec, view: View) -> int:
    """Return the number of events to keep."""
    return min(spec.max_size, len(view)) // 2


def to_forget(spec: RollingCondenserSpec, view: View, *, tail_size: int) -> list[Event]:
    """Return the events between the first and the latest ones, without earlier summaries."""
    end = len(view) - max(1, tail_size)
    middle = [e for e in view.events[spec.keep_first : end] if not isinstance(e, AgentCondensationObservation)]
    return with_results(view, middle)


def previous_summary(spec: RollingCondenserSpec, view: View) -> str:
    """Return the summary after the first events, or None."""
    behind: Sequence[Event] = view.events[spec.keep_first : spec.keep_first + 1]
    return behind[0].content if behind and isinstance(behind[0], AgentCondensationObservation) else NO_SUMMARY


def event_chars(max_event_length: int, view: View) -> int:
    """Return how many characters of an event a prompt may show; fewer after each prompt that did not fit."""
    return int(max_event_length * SHRINK**view.overflows)
