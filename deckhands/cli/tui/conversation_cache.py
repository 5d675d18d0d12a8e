"""A cache of all conversations of a store, refreshed a few at a time.

Holds: one refresh reads at most `ROWS_AT_ONCE` conversations and a page of new ones, however many there are: first
those on the screen, then those that workers own, in turn, then the others, in turn.
Does not: see every change at once: a conversation off the screen that no worker owns waits for its turn.
Keys: reads `deck:{k}:index`, `deck:{k}:dead`, `deck:{k}:worker:<w>:owned` and `deck:{k}:c:<id>:meta`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from broker.store import Store, decode_text, parse_number, read_tolerantly
from deckhands.client import clean_line

PAGE = 500
ROWS_AT_ONCE = 240
OTHERS_AT_ONCE = 60
"""How many of a refresh are reserved for conversations off the screen that no worker owns."""
MOST_OWNERS = 64
MOST_DEAD = 1_000
DEAD = "dead"
FIELDS = (
    *("last_id", "state", "wait_reason", "owner", "iterations", "cost_usd", "has_unknown_cost"),
    *(
        "prompt_tokens",
        "completion_tokens",
        "updated_ms",
        "created_ms",
        "title",
        "tenant",
        "labels",
        "closed",
        "data_key",
    ),
)
TITLE = FIELDS.index("title")
MAX_TITLE_CHARS = 200


@dataclass(frozen=True, slots=True)
class CachedConversation:
    """A conversation as `top` lists it; texts are cleaned.

    Attributes:
        state: see `AgentState`; `dead` if three workers died with it.
        worker: its owner, or empty.
        cost_usd: the cost, including ended delegates; a lower bound if `has_unknown_cost`.
        updated, created: seconds since the epoch, by the store's clock.
        words: the text that a filter searches, in lower case.
    """

    conversation_id: str
    state: str = ""
    wait_reason: str = ""
    worker: str = ""
    steps: int = 0
    cost_usd: float = 0.0
    tokens: int = 0
    updated: float = 0.0
    created: float = 0.0
    title: str = ""
    tenant: str = ""
    has_unknown_cost: bool = False
    words: str = field(default="", compare=False)


class ConversationCache:
    """The cached conversations of a store.

    Args:
        rows_at_once: how many conversations one refresh reads, not counting new ones.
        others_at_once: how many of them are reserved for conversations that are off the screen and without a worker.
    """

    def __init__(self, store: Store, *, rows_at_once: int = ROWS_AT_ONCE, others_at_once: int = OTHERS_AT_ONCE) -> None:
        self.rows: dict[str, CachedConversation] = {}
        self._rows_at_once = rows_at_once
        self._others_at_once = others_at_once
        self._store = store
        self._newest: defaultdict[int, float] = defaultdict(float)
        self._owned_turn = self._others_turn = 0
        self._owned: list[str] = []
        self._dead: frozenset[str] = frozenset()

    async def load(self) -> AsyncIterator[int]:
        """Read all conversations, newest first; after each page, yield how many have been read.

        Raises:
            StoreError: the store does not answer.
        """
        for shard, names in enumerate(await self._store.load_shards()):
            start = 0
            while True:
                asked = ("ZREVRANGE", names.index, start, start + PAGE - 1, "WITHSCORES")
                (flat,) = await read_tolerantly(self._store.connection, [asked])
                if not flat:
                    break
                self._newest[shard] = max(self._newest[shard], parse_number(flat[1]))
                await self._read([decode_text(cid) for cid in flat[::2]])
                start += PAGE
                yield len(self.rows)

    async def refresh(self, seen: Sequence[str], workers: Iterable[str]) -> bool:
        """Refresh, and return whether anything has changed.

        Args:
            seen: the conversations on the screen.
            workers: the controller workers that may own conversations.

        Raises:
            StoreError: the store does not answer.
        """
        new = await self._new(list(islice(workers, MOST_OWNERS)))
        wanted = dict.fromkeys(seen[: self._rows_at_once])
        wanted.update(dict.fromkeys(new))
        room = self._rows_at_once - self._others_at_once - len(wanted)
        owned, self._owned_turn = _next_in_turn(self._owned, self._owned_turn, max(0, room))
        wanted.update(dict.fromkeys(owned))
        others = list(self.rows)
        rest, self._others_turn = _next_in_turn(others, self._others_turn, self._others_at_once)
        wanted.update(dict.fromkeys(rest))
        return await self._read(list(wanted))

    async def _new(self, workers: list[str]) -> list[str]:
        """Return the ids that are not cached yet; record which ones workers own and which are dead."""
        shards = await self._store.load_shards()
        commands: list[tuple[Any, ...]] = [
            ("ZRANGEBYSCORE", names.index, f"{self._newest[names.shard]:.0f}", "+inf", "WITHSCORES", "LIMIT", 0, PAGE)
            for names in shards
        ]
        commands += [("ZRANGE", names.dead, 0, MOST_DEAD - 1) for names in shards]
        commands += [("SMEMBERS", names.worker_conversations(worker)) for names in shards for worker in workers]
        replies = await read_tolerantly(self._store.connection, commands)
        found: list[str] = []
        for shard, flat in enumerate(replies[: len(shards)]):
            if flat:
                self._newest[shard] = max(self._newest[shard], parse_number(flat[-1]))
                found += [decode_text(cid) for cid in flat[::2]]
        dead = frozenset(decode_text(cid) for reply in replies[len(shards) : 2 * len(shards)] for cid in reply or ())
        turned = dead ^ self._dead
        self._dead = dead
        self._owned = [decode_text(cid) for reply in replies[2 * len(shards) :] for cid in reply or ()]
        return [*(cid for cid in found if cid not in self.rows), *turned]

    async def _read(self, ids: list[str]) -> bool:
        keys = [names.meta for names in await self._store.locate_all(ids)]
        replies = await read_tolerantly(self._store.connection, [("HMGET", key, *FIELDS) for key in keys])
        await self._decrypt(ids, replies)
        has_changed = False
        for cid, reply in zip(ids, replies, strict=True):
            known = self.rows.get(cid)
            found = row_of(cid, reply, is_dead=cid in self._dead)
            if found is None:
                has_changed |= self.rows.pop(cid, None) is not None
            elif found != known:
                self.rows[cid] = found
                has_changed = True
        return has_changed

    async def _decrypt(self, ids: list[str], replies: list[Any]) -> None:
        """Decrypt the titles in replies to HMGET, in place."""
        found = [(cid, reply) for cid, reply in zip(ids, replies, strict=True) if reply and reply[-1] is not None]
        titles = [{b"title": reply[TITLE] or b"", b"data_key": reply[-1]} for _, reply in found]
        await self._store.encryption.decrypt_fields([cid for cid, _ in found], titles)
        for (_, reply), title in zip(found, titles, strict=True):
            reply[TITLE] = title[b"title"]


def row_of(conversation_id: str, values: Any, *, is_dead: bool = False) -> CachedConversation | None:
    """Return the fields of a conversation in the order of `FIELDS`; None if it does not exist."""
    if not isinstance(values, list) or len(values) != len(FIELDS) or values[0] is None:
        return None
    have = dict(zip(FIELDS, values, strict=True))
    if is_dead:
        state = DEAD
    elif have["closed"] is not None:
        state = "closed"
    else:
        state = clean_line(decode_text(have["state"]), limit=40)
    wait_reason = "" if is_dead else clean_line(decode_text(have["wait_reason"]), limit=40)
    worker, title = (
        clean_line(decode_text(have["owner"])),
        clean_line(decode_text(have["title"]), limit=MAX_TITLE_CHARS),
    )
    tenant = clean_line(decode_text(have["tenant"]), limit=64)
    labels = _labels(decode_text(have["labels"]))
    words = f"{conversation_id} {state} {wait_reason} {worker} {title} {tenant} {labels}".lower()
    return CachedConversation(
        clean_line(conversation_id),
        state,
        wait_reason,
        worker,
        int(parse_number(have["iterations"])),
        parse_number(have["cost_usd"]),
        int(parse_number(have["prompt_tokens"]) + parse_number(have["completion_tokens"])),
        parse_number(have["updated_ms"]) / 1000,
        parse_number(have["created_ms"]) / 1000,
        title,
        tenant,
        has_unknown_cost=decode_text(have["has_unknown_cost"]) == "1",
        words=words,
    )


def _labels(written: str) -> str:
    try:
        found = json.loads(written) if written else {}
    except (ValueError, RecursionError):
        return ""
    return clean_line(" ".join(f"{name}={label}" for name, label in found.items())) if isinstance(found, dict) else ""


def _next_in_turn(ids: Sequence[str], start: int, count: int) -> tuple[list[str], int]:
    """Return the next ids in turn, and where the following turn starts."""
    if not ids or count <= 0:
        return [], start
    start %= len(ids)
    found = [*ids[start : start + count]]
    return found, start + len(found)


SORTS: Mapping[str, str] = {
    "updated": "updated",
    "age": "created",
    "cost": "cost_usd",
    "steps": "steps",
    "tokens": "tokens",
    "state": "state",
    "title": "title",
}
"""The sort keys of rows, and the field of each."""
RISING = frozenset(("state", "title"))
"""Sorted in ascending order unless reversed."""


def arrange(
    rows: Iterable[CachedConversation], *, by: str = "updated", is_turned: bool = False, words: str = ""
) -> list[CachedConversation]:
    """Return the rows that contain all words of a filter, sorted.

    Args:
        by: a key of `SORTS`.
        words: words separated by blanks; `-word` excludes rows that contain the word.
    """
    wanted = words.lower().split()
    without = [word[1:] for word in wanted if word.startswith("-") and len(word) > 1]
    having = [word for word in wanted if not word.startswith("-")]
    chosen = list(rows)
    if having or without:
        chosen = [
            row
            for row in chosen
            if all(word in row.words for word in having) and not any(word in row.words for word in without)
        ]
    name = SORTS[by]
    chosen.sort(key=lambda row: getattr(row, name), reverse=(by not in RISING) != is_turned)
    return chosen
