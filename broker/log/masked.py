"""Events without secrets, for an owner who folds them before they are appended.

Holds: an event is masked once; what an append begins with is not masked again unless the secrets have changed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from broker.contract import Event, codec
from broker.secrets import Masker

NOTHING_TO_HIDE = Masker()


@dataclass(frozen=True, slots=True)
class Masked:
    """Events without secrets, and what they were masked with."""

    events: tuple[Event, ...]
    masker: Masker

    @classmethod
    async def of(cls, events: Sequence[Event], masker: Masker) -> Masked:
        """Mask events."""
        if not masker:
            return cls(tuple(events), masker)
        wires = await asyncio.to_thread(lambda: [masker.wire(event.wire()) for event in events])
        found = [codec.event_from_wire(wire, event.id) for wire, event in zip(wires, events, strict=True)]
        return cls(tuple(found), masker)

    def has(self, position: int, masker: Masker) -> bool:
        """Return whether the event at a position of an append that begins with these hides what `masker` hides."""
        return position < len(self.events) and masker.values == self.masker.values


NOTHING_MASKED = Masked((), NOTHING_TO_HIDE)
