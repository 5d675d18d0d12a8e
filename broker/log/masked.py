"""Events with masked secrets, for an owner that folds them before it appends them.

Holds: an event is masked once. An append masks it again only if the secrets have changed since.
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
    """Events with masked secrets, and the masker that was used."""

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
        """Return whether the event at a position of the append is one of these and was masked with the same secrets."""
        return position < len(self.events) and masker.values == self.masker.values


NOTHING_MASKED = Masked((), NOTHING_TO_HIDE)
