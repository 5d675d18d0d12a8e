"""A concern: one part of what a controller knows of a conversation, and what events do to that part.

Holds: a handler is pure and returns the part after one more event. It reads the state as it was before that event, so
the concerns can be asked in any order; it cannot change another concern's part, because it returns its own alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from broker.contract import Event
from controller_worker.core.effects import Effect, Errand

if TYPE_CHECKING:
    from dataclasses import replace as evolve

    from controller_worker.core.state import State
else:

    def evolve(part: Any, **changes: Any) -> Any:
        """Return a part, or the state, with other values in some of its fields.

        A fold does this for every event, and `dataclasses.replace` takes ten times as long: it asks the class about
        every field. Names are checked where types are.
        """
        other = _new(type(part))
        _set(other, "__dict__", {**part.__dict__, **changes})
        return other


_new, _set = object.__new__, object.__setattr__  # a frozen instance is filled before anybody sees it


__all__ = ["OWNERS", "Concern", "Errands", "Handler", "Want", "evolve"]

Handler = Callable[[Any, Any, "State"], Any]
"""Takes a part, an event and the state before the event; returns the part after it."""


OWNERS: dict[str, Concern] = {}
"""Every concern, by its part of the state."""


@dataclass(frozen=True, slots=True)
class Concern:
    """Who owns one part of the state.

    Attributes:
        name: the field of `State` that holds the part.
        on: by class of event, what it does to the part; None: nothing. The most specific class that
            fits an event counts.
    """

    name: str
    on: Mapping[type[Event], Handler | None]

    def __post_init__(self) -> None:
        """Register the concern as the owner of its part."""
        OWNERS[self.name] = self

    def handler(self, event_class: type[Event]) -> Handler | None:
        """Return what events of a class do to the part; None where they leave it alone."""
        return next((self.on[base] for base in event_class.__mro__ if base in self.on), None)


Errands = Callable[["State"], Iterable[Errand]]
"""What a concern wants each owner to do once."""

Want = Callable[["State", datetime], Effect | None]
"""What a concern wants now; None when it wants nothing. The time is aware UTC."""
