"""Condensers that show a placeholder for older observations.

Holds: a placeholder keeps the observation's id, cause and tool call, so that the call keeps a result.
"""

from __future__ import annotations

from dataclasses import replace

from broker.contract import (
    AgentCondensationObservation,
    BrowserOutputCondenserSpec,
    BrowserOutputObservation,
    Event,
    Observation,
    ObservationMaskingCondenserSpec,
)
from controller_worker.memory.view import View

MASK = "<MASKED>"


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
            _masked(view, event, MASK) if isinstance(event, Observation) else event for event in view.events[:border]
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
            events[place] = _masked(view, page, f"Visited URL {page.url}\nContent omitted")
        return replace(view, events=events)


def _masked(view: View, event: Observation, text: str) -> Event:
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
