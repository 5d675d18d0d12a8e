"""Settles the results that tool workers leave beside a log if their store user may not add to logs; see results.lua.

Holds: nothing is appended that a controller has not read. A tool worker that was taken over has the capabilities of the
actions that it claimed: with one of them it can answer that action, or say once when it ended if its controller has
stopped it, and add no other event. Of that news, only the seconds are the worker's.
Keys: `deck:{k}:c:<id>:results`, `deck:{k}:c:<id>:grants`, the field `reported_gap` of `deck:{k}:c:<id>:meta`.
"""

from __future__ import annotations

import logging

from broker.contract import Action, Event, EventSource, Observation, PartyStopped, codec
from broker.runtime import CorruptEntry
from broker.store import KEY_ID_BYTES, Argument, Store

FIELDS = 4
"""Of each result in a reply: its id, its action, the bytes of the action and of the observation."""

MAX_STOP_SECONDS = 86_400.0
"""A longer time from the order to the end of an action is not believed."""

_log = logging.getLogger(__name__)


async def settle_results(store: Store, conversation_id: str, *, checked_gap: str = "") -> str:
    """Append the results that wait and answer their actions; refuse all others and dispatch their actions again.

    Args:
        checked_gap: a reported loss that is recorded or disproved, as an earlier call has returned it.

    Returns:
        The loss that a tool worker reports, see `record_reported_gap`; empty for nothing.

    Raises:
        StoreTooNew, DataLocked: this process cannot read one, and leaves them to another controller.
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
    """Return what to append of a result of the action with these bytes; empty if the result does not answer it."""
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
    """Return the bytes of the event that an action has ended; the worker may have made up the time."""
    is_known = seconds is not None and 0 <= seconds <= MAX_STOP_SECONDS
    stopped = PartyStopped(party="tool", action_id=action_id, seconds=seconds if is_known else None)
    entry = codec.encode({**stopped.wire(), "timestamp": store.clock.now().isoformat()})
    cipher = await store.encryption.find_cipher(conversation_id)
    return entry if cipher is None else codec.encrypt_entry(entry, cipher, None)


async def _decode(store: Store, conversation_id: str, event_id: int, entry: bytes) -> Event:
    cipher = await store.encryption.find_cipher_of(conversation_id, codec.find_key_id(entry, KEY_ID_BYTES))
    return codec.decode(codec.decrypt_entry(entry, cipher, event_id), event_id)
