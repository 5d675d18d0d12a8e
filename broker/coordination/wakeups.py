"""Wake-ups for controller workers about new events: the ready stream of a shard and the mailbox of a worker.

If the store user of the tool workers may not add to logs, they leave their results beside a log; `settle_results`
appends them (see results.lua).

Holds: a wake-up is a hint; the log is the truth. Lost, late and repeated wake-ups cost time, never events. The wake-up
for an observation carries it, which saves the owner a round trip. The owner folds it only if it follows its last event.
Nothing is appended that a controller has not read. A compromised tool worker has the capabilities of the actions that
it claimed. Each lets it answer that action or, if its controller stopped the action, report its end once; it can add no
other event. It can forge only the seconds in that report.
Keys: `deck:{k}:ready`, `deck:{k}:ready:interactive` (group `controllers`), `deck:{k}:worker:<w>:mail`,
`deck:{k}:c:<id>:results`, `deck:{k}:c:<id>:grants`, the field `reported_gap` of `deck:{k}:c:<id>:meta`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from broker.contract import Action, Event, EventSource, Observation, PartyStopped, codec
from broker.coordination.quarantine import PARSE_ERRORS, Quarantine, find_conversation_keys
from broker.runtime import CorruptEntry, StoreMisconfigured, StoreRefused, StoreTooNew
from broker.store import (
    BLOCK_SECONDS,
    HEARTBEAT_SECONDS,
    KEY_ID_BYTES,
    MISSING_STREAM_ERRORS,
    Argument,
    GroupReader,
    ShardKeys,
    Store,
)

FIELDS = 4
"""Of each result in a reply: its id, its action, the bytes of the action and of the observation."""

MAX_STOP_SECONDS = 86_400.0
"""A longer time from the order to the end of an action is not believed."""


async def settle_results(store: Store, conversation_id: str, *, checked_gap: str = "") -> str:
    """Append the results that wait and answer their actions; refuse all others and dispatch their actions again.

    Args:
        checked_gap: a reported loss that an earlier call returned, and that has been recorded or disproved since.

    Returns:
        The loss that a tool worker reports, see `record_reported_gap`; empty for nothing.

    Raises:
        StoreTooNew, DataLocked: this process cannot read one of them and leaves all to another controller.
    """
    names = await store.locate(conversation_id)
    arguments: list[Argument] = [conversation_id, checked_gap]
    while True:
        _, gap, has_more, *found = await store.call_function("deck_settle", (names.root, names.shard.root), *arguments)
        if not found and not has_more:
            return str(gap.decode(errors="replace"))
        arguments = [conversation_id, ""]
        for at in range(0, len(found), FIELDS):
            result, action, asked, entry = found[at : at + FIELDS]
            arguments += [result, action, await _find_entry(store, conversation_id, int(action), asked, entry)]


async def _find_entry(store: Store, conversation_id: str, action_id: int, asked: bytes, entry: bytes) -> bytes:
    """Return the entry to append for a result of the action; empty if the result does not answer it."""
    try:
        action, answer = [await _decode(store, conversation_id, action_id, one) for one in (asked, entry)]
    except CorruptEntry as error:
        _log.warning("a result for event %d of %s cannot be read: %s", action_id, conversation_id, error)
        return b""
    if isinstance(action, Action) and answer.source in (EventSource.ENVIRONMENT, action.source):
        if isinstance(answer, PartyStopped) and (answer.party, answer.action_id) == ("tool", action_id):
            return await _encode_stop(store, conversation_id, action_id, answer.seconds)
        if isinstance(answer, Observation) and answer.cause == action_id and action.may_be_answered_by(answer):
            return entry
    _log.warning("a result for event %d of %s does not answer it: %s", action_id, conversation_id, answer.kind)
    return b""


async def _encode_stop(store: Store, conversation_id: str, action_id: int, seconds: float | None) -> bytes:
    """Return the bytes of the event that reports the end of an action. The worker may have forged the time."""
    is_known = seconds is not None and 0 <= seconds <= MAX_STOP_SECONDS
    stopped = PartyStopped(party="tool", action_id=action_id, seconds=seconds if is_known else None)
    entry = codec.encode({**stopped.wire(), "timestamp": store.clock.now().isoformat()})
    cipher = await store.encryption.find_cipher(conversation_id)
    return entry if cipher is None else codec.encrypt_entry(entry, cipher, None)


async def _decode(store: Store, conversation_id: str, event_id: int, entry: bytes) -> Event:
    cipher = await store.encryption.find_cipher_of(conversation_id, codec.find_key_id(entry, KEY_ID_BYTES))
    return codec.decode(codec.decrypt_entry(entry, cipher, event_id), event_id)


BATCH = 256
TRIM_MAILBOX_EVERY = 1_000
"""A mailbox is trimmed after this many entries, which the owner has read."""
TRIM_CARRIED_EVERY = 64
"""The same for entries with an observation. They are also trimmed after two seconds without a new one."""

_log = logging.getLogger(__name__)


class ReadyStream:
    """The conversations of one shard that have new events and no owner, in the order of their turns; see turns.lua.

    Interactive ones have their own stream, which a worker reads even if it has room for no others.
    """

    def __init__(self, store: Store, names: ShardKeys, worker_id: str, *, is_interactive: bool = False) -> None:
        self._store = store
        self._names = names
        self._unreadable = Quarantine(store)
        self._stream = names.ready_interactive if is_interactive else names.ready
        self._prefix = "ready:interactive|" if is_interactive else ""
        self._reader = GroupReader(store, "controllers", worker_id, [self._stream])

    async def read(self, *, limit: int) -> list[tuple[str, str]]:
        """Wait up to two seconds and return up to `limit` pairs of conversation id and entry.

        Claiming a conversation acknowledges its entry.
        """
        notified = []
        for _, entry, fields in await self._reader.read(limit=min(limit, BATCH)):
            entry_id = entry.decode()
            try:
                about = dict(zip(fields[::2], fields[1::2], strict=True))
                conversation_id = (await find_conversation_keys(self._store, self._names, about[b"c"])).conversation_id
                notified.append((conversation_id, self._prefix + entry_id))
            except PARSE_ERRORS as error:
                await self._unreadable.quarantine(
                    self._names, self._stream, entry_id, fields, error, group="controllers"
                )
        return notified

    async def aclose(self) -> None:
        """Close the connection."""
        await self._reader.aclose()


@dataclass(frozen=True, slots=True)
class CarriedEvent:
    """An event that the owner received together with its notification.

    Attributes:
        entry: its bytes, see `codec`.
        before: checksum of the event before it in the log.
        is_watched: a client follows the conversation.
    """

    event_id: int
    entry: bytes
    before: str
    is_watched: bool


class WorkerMailbox:
    """The wake-ups of one shard for the conversations that a worker owns."""

    def __init__(self, store: Store, names: ShardKeys, worker_id: str) -> None:
        self._store = store
        self._names = names
        self._unreadable = Quarantine(store)
        self._key = names.mailbox(worker_id)
        self._after = "0-0"
        self._read_since_trim = self._carried_since_trim = 0
        self._is_quiet = False
        self._gaps: dict[str, str] = {}
        self._connection = store.connection.another(reply_timeout_seconds=BLOCK_SECONDS + 5)

    async def read(self) -> dict[str, CarriedEvent | None]:
        """Wait up to two seconds and return the ids of conversations with new events, each once.

        Each id comes with its event, if the wake-up carried one and was the only one for that conversation.
        """
        entries = await self._read_entries()
        self._is_quiet = not entries
        if entries:
            self._after = entries[-1][0].decode()
        self._read_since_trim += len(entries)
        notified: dict[str, CarriedEvent | None] = {}
        with_results: dict[str, None] = {}
        for entry_id, fields in entries:
            try:
                about = dict(zip(fields[::2], fields[1::2], strict=True))
                conversation_id = (await find_conversation_keys(self._store, self._names, about[b"c"])).conversation_id
                carried = None
                if b"e" in about:
                    before, is_watched = about[b"p"].decode(), b"w" in about
                    carried = CarriedEvent(int(about[b"i"]), about[b"e"], before, is_watched=is_watched)
            except PARSE_ERRORS as error:
                await self._unreadable.quarantine(self._names, self._key, entry_id.decode(), fields, error)
            else:
                self._carried_since_trim += carried is not None
                if b"r" in about:  # settled, it comes again with its event
                    with_results[conversation_id] = None
                    continue
                notified[conversation_id] = None if conversation_id in notified else carried
        await self._settle(with_results)
        return notified

    def take_gaps(self) -> dict[str, str]:
        """Return the losses that tool workers have reported since the last call; see `record_reported_gap`."""
        gaps, self._gaps = self._gaps, {}
        return gaps

    async def _settle(self, conversation_ids: Iterable[str]) -> None:
        """Append the observations that tool workers have left beside the logs of conversations."""
        for conversation_id in conversation_ids:
            try:
                if gap := await settle_results(self._store, conversation_id):
                    self._gaps[conversation_id] = gap
            except (StoreRefused, StoreMisconfigured, StoreTooNew) as error:  # of one conversation: it affects no other
                _log.warning("the results of %s cannot be settled: %s", conversation_id, error)

    async def _read_entries(self) -> list[Any]:
        command: tuple[Argument, ...] = (
            "XREAD",
            "COUNT",
            BATCH,
            "BLOCK",
            int(BLOCK_SECONDS * 1000),
            "STREAMS",
            self._key,
            self._after,
        )
        # Trim with the next read, which saves a round trip.
        is_to_be_trimmed = (
            self._read_since_trim >= TRIM_MAILBOX_EVERY
            or self._carried_since_trim >= TRIM_CARRIED_EVERY
            or (self._is_quiet and self._carried_since_trim > 0)
        )
        commands: list[tuple[Argument, ...]] = [command]
        if is_to_be_trimmed:
            milliseconds, _, number = self._after.partition("-")
            commands.insert(0, ("XTRIM", self._key, "MINID", f"{milliseconds}-{int(number) + 1}"))
        try:
            *_, found = await self._store.retry(lambda: self._connection.call_many(commands))
        except StoreRefused as error:
            if not error.message.startswith(MISSING_STREAM_ERRORS):
                raise
            self._after = "0-0"
            await asyncio.sleep(HEARTBEAT_SECONDS)  # it has been moved away by then
            return []
        if is_to_be_trimmed:
            self._read_since_trim = self._carried_since_trim = 0
        return found[0][1] if found else []

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.aclose()


async def wake_conversations(store: Store, conversation_ids: Iterable[str]) -> None:
    """Notify conversations without new events, because a resource that they wait for is available.

    If a conversation's keys are damaged, its failed notification is logged and not raised.
    """
    calls = []
    for conversation_id in conversation_ids:
        names = await store.locate(conversation_id)
        calls.append(("FCALL", "deck_wake", 2, names.root, names.shard.root, conversation_id))
    try:
        await store.call_many(calls)
    except StoreRefused as error:
        _log.warning("a conversation could not be notified: %s", error)
