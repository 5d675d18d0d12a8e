"""Map the events of a recording to the events of the log, and adjust the references to them.

Recordings name events by their own numbers or names. A condensation names the forgotten events so, and gives the
position of its summary as a count of events shown to the model. Both must be converted, because one recorded event can
become several events or none.

Holds: a reference leads to an earlier event or nowhere, so references form no cycle; a range stays a range, so a huge
range in a recording costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence

from broker.contract import Event

MAX_UNORDERED = 2_000
"""The maximum size of a range of events whose ids are unordered."""
MAX_COUNTED_PLACES = 1_000
"""How far the place of a summary is counted; condensers put it after the first few events."""


class Renumbering:
    """The recorded events so far, by their recorded ids."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, list[int]] = {}
        self._meant: dict[Hashable, int] = {}
        self._numbers: list[int] = []
        self._is_ascending = True
        # The events shown to the model there: their order, their sizes here, and the numbered ones.
        self._order: list[int] = []
        self._sizes: list[int] = []
        self._places: dict[Hashable, list[int]] = {}
        self._shown_numbers: list[int] = []

    def add(self, key: Hashable, events: Sequence[Event], *, meant: int | None, is_shown: bool) -> None:
        """Record the events into which a recorded event was converted.

        Args:
            key: its recorded id, which another event may share.
            events: empty if it was left out.
            meant: the event to which references point.
            is_shown: whether the recording shows the event to the model.
        """
        is_number = type(key) is int
        if meant is not None:
            self._meant[key] = meant
        if events:
            self._ids.setdefault(key, []).extend(event.id for event in events)
            if is_number:
                self._is_ascending = self._is_ascending and (not self._numbers or self._numbers[-1] < key)  # type: ignore[operator]
                self._numbers.append(key)  # type: ignore[arg-type]
        if is_shown:
            self._places.setdefault(key, []).append(len(self._sizes))
            self._order.append(len(self._sizes))
            self._sizes.append(sum(is_shown_here(event) for event in events))
            if is_number:
                self._shown_numbers.append(key)  # type: ignore[arg-type]

    def find_event(self, key: object) -> int | None:
        """Return the event for a reference to a recorded event; None if there is none."""
        return self._meant.get(key) if isinstance(key, Hashable) else None

    def find_latest(self, number: int) -> int:
        """Return the last event made from recorded events up to this one; 0 for none."""
        if not self._is_ascending:
            return self.find_event(number) or 0
        place = bisect_right(self._numbers, number)
        return self._ids[self._numbers[place - 1]][-1] if place else 0

    def forget(self, keys: Iterable[object]) -> tuple[list[int], int]:
        """Return the events made from some recorded events, in order, and the number of those without one.

        The model is no longer shown them.
        """
        found: set[int] = set()
        lost = 0
        for key in keys:
            ids = self._ids.get(key, ()) if isinstance(key, Hashable) else ()
            found.update(ids)
            lost += not ids
            self._hide(key)
        return sorted(found), lost

    def forget_between(self, start: int, end: int) -> tuple[int, int] | list[int]:
        """Return the events made from a range of recorded events, as a range or, if they form none, as a list.

        The model is no longer shown them.

        Raises:
            ValueError: a list would be too long.
        """
        if not self._is_ascending:
            if len(self._shown_numbers) > MAX_UNORDERED:
                raise ValueError("it forgets a range of events with unordered ids")
            return self.forget({number for number in self._numbers if start <= number <= end})[0]
        hidden = slice(bisect_left(self._shown_numbers, start), bisect_right(self._shown_numbers, end))
        for number in self._shown_numbers[hidden]:
            self._hide(number)
        del self._shown_numbers[hidden]
        first = bisect_left(self._numbers, start)
        behind = bisect_right(self._numbers, end)
        if first >= behind:
            return []
        return self._ids[self._numbers[first]][0], self._ids[self._numbers[behind - 1]][-1]

    def map_offset(self, offset: int) -> int:
        """Convert a recorded offset, which counts events shown to the model, to the offset in the log."""
        if not 0 <= offset <= MAX_COUNTED_PLACES:
            return offset
        return offset + sum(self._sizes[place] - 1 for place in self._order[:offset])

    def _hide(self, key: object) -> None:
        for place in self._places.pop(key, ()) if isinstance(key, Hashable) else ():
            del self._order[bisect_left(self._order, place)]


def is_shown_here(event: Event) -> bool:
    """Return whether an event counts in the sequence shown to the model."""
    is_hidden = event.kind in ("action.run", "observation.run") and getattr(event, "hidden", False)
    return not is_hidden and (event.is_shown_to_model or event.tool_call_metadata is not None)
