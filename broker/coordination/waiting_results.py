"""Settles the results that tool workers leave beside a log if their store user may not add to logs; see results.lua.

Holds: nothing is appended that a controller has not read. A tool worker that was taken over has the capabilities of the
actions that it claimed: with one of them it can answer that action, and add no other event.
Keys: `deck:{k}:c:<id>:results`, `deck:{k}:c:<id>:grants`, the field `reported_gap` of `deck:{k}:c:<id>:meta`.
"""

from __future__ import annotations

import logging

from broker.contract import Action, Event, Observation, PartyStopped, codec
from broker.runtime import CorruptEntry
from broker.store import KEY_ID_BYTES, Argument, Store

FIELDS = 4
"""Of each result in a reply: its id, its action, the bytes of the action and of the observation."""

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
            is_answer = await _is_answer(store, conversation_id, int(action), asked, entry)
            arguments += [result, action, entry if is_answer else b""]


async def _is_answer(store: Store, conversation_id: str, action_id: int, asked: bytes, entry: bytes) -> bool:
    """Return whether the bytes of an event answer the action with these bytes, or say that it has ended."""
    try:
        action, answer = [await _decode(store, conversation_id, action_id, one) for one in (asked, entry)]
    except CorruptEntry as error:
        _log.warning("a result for event %d of %s cannot be read: %s", action_id, conversation_id, error)
        return False
    if isinstance(answer, PartyStopped):
        return (answer.party, answer.action_id, answer.cause) == ("tool", action_id, None)
    is_one = isinstance(action, Action) and isinstance(answer, Observation) and action.may_be_answered_by(answer)
    if is_one and answer.cause == action_id:
        return True
    _log.warning("a result for event %d of %s does not answer it: %s", action_id, conversation_id, answer.kind)
    return False


async def _decode(store: Store, conversation_id: str, event_id: int, entry: bytes) -> Event:
    cipher = await store.encryption.find_cipher_of(conversation_id, codec.find_key_id(entry, KEY_ID_BYTES))
    return codec.decode(codec.decrypt_entry(entry, cipher, event_id), event_id)
