"""Finds the shard of a conversation, also after the number of shards was raised.

Raising the number moves nothing. The store keeps every number it has had, such as `1,4`: an existing conversation stays
in the shard that an earlier number gave it, and a new one goes to the shard of the latest number. If the numbers give
different shards, the store is asked, once for each conversation and process.

Holds: no process forgets a number that it has seen. A worker with the right to do so restores numbers that the store
has lost in a fail-over. A conversation that is no longer where it was found is searched again. A process sees a higher
number at its next call after `REFRESH_SECONDS`, a worker at its next heartbeat. State that belongs to a name (a quota,
a budget, a schedule, a webhook) stays in the shard of the first number.
Keys: the field `shards` of `deck:store`; the field `shards` of `deck:{k}:clock`: the least number that a process must
know to create a conversation in this shard.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from broker.store.keys import STORE, ConversationKeys, ShardKeys, conversation_keys, shard_of

MAX_SHARDS = 1_024
FIELD = "shards"
READ_LAYOUT = ("HGET", STORE, FIELD)
REFRESH_SECONDS = 2.0
"""How long a process relies on the number of shards that it has read."""
MAX_NUMBERS = 16
"""How many numbers a store keeps: the first one, and those it was raised to."""
MAX_REMEMBERED = 65_536
NUMBERS = re.compile(r"[0-9]{1,4}(,[0-9]{1,4}){0,15}")


def parse_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of shards that a store has had, the first one first.

    Raises:
        ValueError: not up to `MAX_NUMBERS` ascending numbers from 1 to `MAX_SHARDS`, with commas between them.
    """
    numbers = tuple(map(int, text.split(","))) if NUMBERS.fullmatch(text) else ()
    if not numbers or numbers[0] < 1 or numbers[-1] > MAX_SHARDS or list(numbers) != sorted(set(numbers)):
        raise ValueError(f"{ascii(text)[:100]} is not a list of ascending numbers of shards")
    return numbers


class ShardLayout:
    """The numbers of shards that a store has had, and where conversations were found."""

    def __init__(self, *numbers: int, max_remembered: int = MAX_REMEMBERED) -> None:
        self.numbers = numbers
        self._max_remembered = max_remembered
        self._found: OrderedDict[str, ShardKeys] = OrderedDict()
        self._named: OrderedDict[str, ShardKeys] = OrderedDict()

    @property
    def count(self) -> int:
        """The number of shards now."""
        return self.numbers[-1]

    def update(self, numbers: tuple[int, ...]) -> None:
        """Add the numbers in the store. Known numbers stay known, even if the store has lost them in a fail-over."""
        merged = tuple(sorted({*self.numbers, *numbers}))
        if len(merged) <= MAX_NUMBERS:
            self.numbers = merged

    def list_shards(self, conversation_id: str) -> list[ShardKeys]:
        """Return the shards that may hold a conversation: that of the latest number first."""
        if len(self.numbers) == 1:
            return [ShardKeys(shard_of(conversation_id, self.count))]
        return [ShardKeys(shard) for shard in dict.fromkeys(shard_of(conversation_id, n) for n in self.numbers[::-1])]

    def find(self, conversation_id: str) -> ConversationKeys | None:
        """Return the keys of a conversation; None if only the store can tell."""
        if len(self.numbers) == 1:
            return conversation_keys(conversation_id, self.count)
        if (shard := self._found.get(conversation_id)) is not None:
            self._found.move_to_end(conversation_id)
            return ConversationKeys(shard, conversation_id)
        first, *others = self.list_shards(conversation_id)
        return None if others else ConversationKeys(first, conversation_id)

    def remember(self, keys: ConversationKeys) -> None:
        """Remember where an existing conversation is."""
        self._put(self._found, keys.conversation_id, keys.shard)

    def guess(self, conversation_id: str, named_by: ShardKeys | None = None) -> ConversationKeys:
        """Return the keys of a conversation that does not exist: in the shard that named it, or in that for a new one.

        Args:
            named_by: the shard that names it now, which is remembered.
        """
        shards = self.list_shards(conversation_id)
        if named_by in shards:
            self._put(self._named, conversation_id, named_by)
        found = self._named.get(conversation_id)
        return ConversationKeys(found if found in shards else shards[0], conversation_id)

    def plan(self, keys: ConversationKeys) -> None:
        """Choose and remember the shard of a new conversation, for data stored before its creation; see `guess`."""
        self._put(self._named, keys.conversation_id, keys.shard)

    def forget(self, conversation_id: str) -> None:
        """Forget the shard of a conversation, because it may have been deleted."""
        self._found.pop(conversation_id, None)
        self._named.pop(conversation_id, None)

    def _put(self, places: OrderedDict[str, ShardKeys], conversation_id: str, shard: ShardKeys) -> None:
        places[conversation_id] = shard
        places.move_to_end(conversation_id)
        if len(places) > self._max_remembered:
            places.popitem(last=False)
