"""Deleting conversations: every key goes, in steps that a kill may come between, and nobody else loses anything."""

from __future__ import annotations

import pytest

from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.contract.workspace_sources import UploadedSource
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.coordination.stored_files import StoredFiles, make_content_name
from broker.log.conversations import Conversations
from broker.log.deletion import Deletion, NotDeleted
from broker.log.event_log import EventLog
from broker.log.selection import ConversationQuery, Selection
from broker.runtime.errors import StoreUnavailable, UnknownConversation
from broker.secrets.secrets import Secrets
from broker.store.keys import ConversationKeys
from broker.store.store import Store
from tests.broker_parts import CID, enter, message

LONG = "x" * 300_000
FILE = b"an archive"


async def filled(store: Store, conversation_id: str = CID) -> int:
    """Begin a conversation that has something under every key that stays; return its last event's id."""
    names, call = store.keys(conversation_id), store.connection.call
    await StoredFiles(store).keep(conversation_id, FILE)
    await Secrets(store, lambda: b"k" * 32).put(conversation_id, "TOKEN", "a long secret")
    source = UploadedSource(name="a.tar", format="tar", parcel=make_content_name(FILE))
    created = ConversationCreated(
        conversation_id=conversation_id, workspace=WorkspaceSpec(source=source), labels={"team": "a/b", "n": "1"}
    )
    log = EventLog(store)
    await log.create(created, [message(), message(LONG), message("y" + LONG)], key="begin")
    await log.append(conversation_id, [message()], key="again")
    for key, value in ((names.snapshot, "s"), (names.secrets_of, "another")):
        await call("SET", key, value)
    await call("HSET", names.meta, "node", "n1")
    for zset in (names.shard.dead, names.shard.parked):
        await call("ZADD", zset, 1, conversation_id)
    return await log.load_last_id(conversation_id)


def own_keys(names: ConversationKeys) -> list[str]:
    stay = (names.events, names.meta, names.once, names.snapshot, names.secrets, names.masked, names.secrets_of)
    return [*stay, names.stored_file(make_content_name(FILE))]


async def blob_keys(store: Store) -> list[str]:
    names = store.keys(CID)
    events = await EventLog(store).read(CID)
    return [names.blob(ref.sha256) for event in events for ref in (event.blobs or {}).values()]


async def existing(store: Store, keys: list[str]) -> int:
    return int(await store.connection.call("EXISTS", *keys))


async def test_every_key_is_gone_and_others_are_left(store: Store) -> None:
    last_id = await filled(store)
    await filled(store, "other-1")
    keys = own_keys(store.keys(CID)) + await blob_keys(store)
    assert len(keys) == 8 + 2
    assert await existing(store, keys) == len(keys)
    await Deletion(store).delete(CID, last_id=last_id)
    assert await existing(store, keys) == 0
    shard = store.keys(CID).shard
    for index in (shard.index, shard.dead, shard.parked, shard.label_index("team", "a/b"), shard.label_index("n", "1")):
        assert await store.connection.call("ZRANGE", index, 0, -1) == [b"other-1"]
    assert await store.connection.call("ZSCORE", f"{shard.root}:unread", CID) is None
    order = await store.connection.call("XRANGE", shard.actions("node:n1"), "-", "+")
    assert [fields for _, fields in order] == [[b"c", CID.encode(), b"a", b"0", b"x", b"close"]]
    assert await existing(store, own_keys(store.keys("other-1"))) == 8
    with pytest.raises(UnknownConversation):
        await Deletion(store).delete(CID, last_id=last_id)


async def test_what_continues_or_is_in_hand_is_not_deleted(store: Store) -> None:
    last_id = await filled(store)
    with pytest.raises(NotDeleted, match="has new events"):
        await Deletion(store).delete(CID, last_id=last_id - 1)
    await store.connection.call("HSET", store.keys(CID).meta, "awaited", "celery")
    with pytest.raises(NotDeleted, match="owned by an ingress"):
        await Deletion(store).delete(CID, last_id=last_id, limit_seconds=0)
    await store.connection.call("HDEL", store.keys(CID).meta, "awaited")
    await enter(store, "w1")
    assert isinstance(await Owners(store).claim(CID, "w1"), ClaimedConversation)
    with pytest.raises(NotDeleted, match="owned by w1"):
        await Deletion(store).delete(CID, last_id=last_id, limit_seconds=0)
    row = await Conversations(store).load_row(CID)
    assert not row.is_closed
    await EventLog(store).append(CID, [message()])


async def test_an_end_without_a_beginning_deletes_nothing(store: Store) -> None:
    await filled(store)
    names = store.keys(CID)
    assert await store.call_function("deck_end_deletion", (names.root, names.shard.root), CID) == ["kept"]
    assert await existing(store, own_keys(names)) == 8


class Killed(StoreUnavailable):
    """What a client that dies does not see."""


class Dying:
    """A connection over which so many commands get through before its process dies."""

    def __init__(self, store: Store, commands: int) -> None:
        self._inner = store.connection
        self._left = commands

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def call(self, *command: object) -> object:
        self._count()
        return await self._inner.call(*command)  # type: ignore[arg-type]

    async def call_many(self, commands: list[tuple[object, ...]]) -> list[object]:
        done = []
        for command in commands:
            self._count()
            done.append(await self._inner.call(*command))  # type: ignore[arg-type]
        return done

    def _count(self) -> None:
        if not self._left:
            raise Killed("It was killed.")
        self._left -= 1


async def test_deletion_killed_at_any_command_is_whole_or_completed(store: Store) -> None:
    index = Conversations(store)
    for commands in range(20):
        last_id = await filled(store)
        keys = own_keys(store.keys(CID)) + await blob_keys(store)
        dying = Store(Dying(store, commands), store.shards, store.generation, patience_seconds=0.0)  # type: ignore[arg-type]
        try:
            await Deletion(dying).delete(CID, last_id=last_id)
        except Killed:
            row = await index.load_row(CID)
            assert row.is_closed or await existing(store, keys) == len(keys)
            assert [page async for page in ConversationQuery(store, Selection({"n": "1"})).iterate_pages()] == [[row]]
            await Deletion(store).delete(CID, last_id=last_id)
        else:
            assert commands > 5
        assert await existing(store, keys) == 0
        assert await index.count() == 0
        if commands > 12:
            return
