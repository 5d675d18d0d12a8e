"""RecentEventsCondenser: shows the first events and the latest."""

from __future__ import annotations

from dataclasses import replace

from broker.contract import RecentEventsCondenserSpec
from controller_worker.memory.view import View


class RecentEventsCondenser:
    """Shows `keep_first` events and the latest, `max_events` in all.

    Differs: there is no tail if `keep_first` leaves no room; the original then shows everything twice.
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
