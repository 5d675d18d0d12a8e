"""A concern: one part of the controller's state, with the handlers that update it.

Holds: a handler is pure and returns the part after the next event. Handlers read the state before that event, so their
order does not matter. A handler returns its own part only, so it cannot change another concern's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from broker.contract import Event
from controller_worker.core.effects import Effect, SideEffect

PartT = TypeVar("PartT")

if TYPE_CHECKING:
    from dataclasses import replace as evolve

    from controller_worker.core.state import State
else:

    def evolve(part: Any, **changes: Any) -> Any:
        """Return a copy of a part, or of the state, with some fields replaced.

        A fold calls this for every event. `dataclasses.replace` takes ten times as long, because it looks up every
        field of the class. Field names are checked by the type checker.
        """
        return make_from(part, {**part.__dict__, **changes})


def make_from(part: PartT, values: dict[str, Any]) -> PartT:
    """Return an instance of a part's class, or of the state, with the values of all its fields."""
    other = _new(type(part))
    _set(other, "__dict__", values)
    return other


_new = object.__new__
_set = object.__setattr__  # a frozen instance is filled before it is shared


__all__ = ["OWNERS", "Concern", "Decision", "Handler", "SideEffects", "evolve", "make_from"]

Handler = Callable[[Any, Any, "State"], Any]
"""Takes a part, an event and the state before the event; returns the part after it."""


OWNERS: dict[str, Concern] = {}
"""Every concern, by its part of the state."""


@dataclass(frozen=True, slots=True)
class Concern:
    """The owner of one part of the state.

    Attributes:
        name: the field of `State` that holds the part.
        on: handlers by event class; None ignores the event. The most specific class of an event wins.
    """

    name: str
    on: Mapping[type[Event], Handler | None]

    def __post_init__(self) -> None:
        """Register the concern as the owner of its part."""
        OWNERS[self.name] = self

    def find_handler(self, event_class: type[Event]) -> Handler | None:
        """Return the handler for an event class, or None if the part ignores such events."""
        return next((self.on[base] for base in event_class.__mro__ if base in self.on), None)


SideEffects = Callable[["State"], Iterable[SideEffect]]
"""Returns the side effects of a concern that each owner runs once."""

Decision = Callable[["State", datetime], Effect | None]
"""Returns a concern's next effect, or None. The time is aware UTC."""
