"""Conversations chosen by label and state, each once; and deleted, every key in steps that a kill may come between."""

from __future__ import annotations

import pytest

from broker.contract.events import AgentSpec, ConversationCreated, WorkspaceSpec
from broker.contract.interventions import ConversationChanged
from broker.contract.workspace_sources import UploadedSource
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.coordination.transfers import StoredFiles, make_content_name
from broker.log import selection
from broker.log.append_call import Appended
from broker.log.conversations import ConversationRow, Conversations
from broker.log.deletion import Deletion, NotDeleted
from broker.log.event_log import EventLog
from broker.log.selection import ConversationQuery, Selection
from broker.log.status import make_changed_fields
from broker.runtime.errors import StoreUnavailable, UnknownConversation
from broker.secrets.secrets import Secrets
from broker.store.keys import ConversationKeys
from broker.store.store import Store
from tests.broker_parts import CID, enter, message

PAGE = selection.PAGE_SIZE


async def begin(store: Store, name: str, labels: dict[str, str] | None = None) -> None:
    await EventLog(store).create(ConversationCreated(conversation_id=name, labels=labels), [message()], key="begin")


async def found(store: Store, chosen: Selection) -> list[ConversationRow]:
    return [row async for page in ConversationQuery(store, chosen).iterate_pages() for row in page]


async def test_all_labels_must_match(store: Store) -> None:
    await begin(store, "one", {"team": "a", "run": "1"})
    await begin(store, "two", {"team": "a", "run": "2"})
    await begin(store, "three", {"team": "b", "empty": ""})
    await begin(store, "four")

    async def ids(**labels: str) -> set[str]:
        return {row.conversation_id for row in await found(store, Selection(labels))}

    assert await ids(team="a") == {"one", "two"}
    assert await ids(team="a", run="2") == {"two"}
    assert await ids(team="b", run="2") == set()
    assert await ids(empty="") == {"three"}
    assert await ids(unknown="x") == set()
    assert await ids() == {"one", "two", "three", "four"}
    assert (await found(store, Selection({"run": "1"})))[0].labels == {"team": "a", "run": "1"}


@pytest.mark.parametrize(
    ("states", "names"),
    [({"running"}, {"one", "two"}), ({"waiting"}, {"two", "three"}), (set(), {"one", "two", "three"})],
)
async def test_one_of_the_states_must_match(store: Store, states: set[str], names: set[str]) -> None:
    for name, *fields in (
        ("one", "state", "running"),
        ("two", "state", "running", "wait_reason", "rate_limit"),
        ("three", "state", "awaiting_user_input"),
    ):
        await begin(store, name)
        await store.connection.call("HSET", store.known_keys(name).meta, *fields)
    assert {row.conversation_id for row in await found(store, Selection(states=frozenset(states)))} == names


async def test_part_of_a_title_matches_in_any_case(store: Store) -> None:
    for name, title in (("one", "Fix the Cart"), ("two", "Cart: again"), ("three", "Release notes")):
        await EventLog(store).create(ConversationCreated(conversation_id=name, title=title), [message()], key="begin")
    assert {row.conversation_id for row in await found(store, Selection(title="cart"))} == {"one", "two"}
    rows, place = await ConversationQuery(store, Selection(title="THE CART")).load_page(None, limit=10)
    assert ([row.conversation_id for row in rows], place) == (["one"], None)
    assert await found(store, Selection(title="none")) == []


async def test_a_label_is_found_without_reading_the_others(store: Store) -> None:
    await begin(store, "labelled", {"team": "a"})
    await begin(store, "other-1")
    await store.connection.call("SET", store.known_keys("other-1").meta, "to read this is an error")
    assert [row.conversation_id for row in await found(store, Selection({"team": "a"}))] == ["labelled"]


async def test_a_repeated_start_is_indexed_once(store: Store) -> None:
    for _ in range(2):
        await begin(store, "labelled", {"team": "a"})
    assert await store.connection.call("ZCARD", store.all_shards[0].label_index("team", "a")) == 1


async def listed(store: Store, created: dict[str, int]) -> None:
    """Add conversations that were created in certain milliseconds."""
    commands: list[tuple[str | int, ...]] = []
    for name, millis in created.items():
        names = store.known_keys(name)
        commands.append(("ZADD", names.shard.index, millis, name))
        commands.append(("HSET", names.meta, "last_id", 1, "created_ms", millis, "state", "running"))
    await store.connection.call_many(commands)


async def test_pages_neither_skip_nor_repeat(store: Store) -> None:
    await listed(store, {f"many-{n:05}": 1_000 + n // 7 for n in range(PAGE * 2 + 100)})
    await listed(store, {f"tied-{n:05}": 5_000 for n in range(PAGE * 3)})
    seen: list[str] = []
    sizes: list[int] = []
    async for page in ConversationQuery(store, Selection()).iterate_pages():
        sizes.append(len(page))
        seen += [row.conversation_id for row in page]
        for row in page[::2]:  # deleted while others are still to come
            await store.connection.call("ZREM", store.known_keys(row.conversation_id).shard.index, row.conversation_id)
        await listed(store, {f"new-{len(sizes)}": 9_000})
    assert max(sizes) == PAGE
    assert len(seen) == len(set(seen)) == PAGE * 5 + 100
    assert seen == sorted(seen, key=lambda name: (name.startswith("tied"), name), reverse=True)


async def test_key_in_place_of_an_index_is_moved_aside(store: Store) -> None:
    index = store.all_shards[0].label_index("team", "a")
    await store.connection.call("SET", index, "forged")
    await begin(store, "labelled", {"team": "a"})
    assert [row.conversation_id for row in await found(store, Selection({"team": "a"}))] == ["labelled"]
    assert await store.connection.call("GET", f"{index}:unreadable") == b"forged"
    await store.connection.call("DEL", index)
    await store.connection.call("SET", index, "forged")
    await Deletion(store).delete("labelled", last_id=2)
    assert await found(store, Selection()) == []


async def test_labels_that_are_changed_move_in_the_index(store: Store) -> None:
    await begin(store, "one", {"team": "a", "run": "1"})
    change = ConversationChanged(labels={"team": "b"}, agent=AgentSpec(name="Other"))
    outcome = await EventLog(store).append("one", [change], fields=dict(make_changed_fields(change)))
    assert isinstance(outcome, Appended)
    assert await found(store, Selection({"team": "a"})) == []
    assert await found(store, Selection({"run": "1"})) == []
    (row,) = await found(store, Selection({"team": "b"}))
    assert (row.conversation_id, row.labels, row.fields["agent"]) == ("one", {"team": "b"}, "Other")
    none = ConversationChanged(labels={})
    await EventLog(store).append("one", [none], fields=dict(make_changed_fields(none)))
    assert await found(store, Selection({"team": "b"})) == []
    assert (await found(store, Selection()))[0].labels == {}
    await Deletion(store).delete("one", last_id=4)
    assert await store.connection.call("EXISTS", store.all_shards[0].label_index("team", "b")) == 0


async def test_a_fork_and_a_restored_conversation_have_the_latest_labels(store: Store) -> None:
    created = ConversationCreated(conversation_id="two", labels={"team": "a"})
    change = ConversationChanged(id=3, labels={"team": "b"})
    await EventLog(store).create_from(created, [message(), change], key="restore")
    assert [row.labels for row in await found(store, Selection({"team": "b"}))] == [{"team": "b"}]
    assert await found(store, Selection({"team": "a"})) == []


LONG = "x" * 300_000
FILE = b"an archive"


async def filled(store: Store, conversation_id: str = CID) -> int:
    """Create a conversation with a value under every permanent key; return its last event's id."""
    names, call = store.known_keys(conversation_id), store.connection.call
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
    names = store.known_keys(CID)
    events = await EventLog(store).read(CID)
    return [names.blob(ref.sha256) for event in events for ref in (event.blobs or {}).values()]


async def existing(store: Store, keys: list[str]) -> int:
    return int(await store.connection.call("EXISTS", *keys))


async def test_every_key_is_gone_and_others_are_left(store: Store) -> None:
    last_id = await filled(store)
    await filled(store, "other-1")
    keys = own_keys(store.known_keys(CID)) + await blob_keys(store)
    assert len(keys) == 8 + 2
    assert await existing(store, keys) == len(keys)
    await Deletion(store).delete(CID, last_id=last_id)
    assert await existing(store, keys) == 0
    shard = store.known_keys(CID).shard
    for index in (shard.index, shard.dead, shard.parked, shard.label_index("team", "a/b"), shard.label_index("n", "1")):
        assert await store.connection.call("ZRANGE", index, 0, -1) == [b"other-1"]
    assert await store.connection.call("ZSCORE", f"{shard.root}:unread", CID) is None
    order = await store.connection.call("XRANGE", shard.actions("node:n1"), "-", "+")
    assert [fields for _, fields in order] == [[b"c", CID.encode(), b"a", b"0", b"x", b"close"]]
    assert await existing(store, own_keys(store.known_keys("other-1"))) == 8
    with pytest.raises(UnknownConversation):
        await Deletion(store).delete(CID, last_id=last_id)


async def test_what_continues_or_is_in_hand_is_not_deleted(store: Store) -> None:
    last_id = await filled(store)
    with pytest.raises(NotDeleted, match="has new events"):
        await Deletion(store).delete(CID, last_id=last_id - 1)
    await store.connection.call("HSET", store.known_keys(CID).meta, "awaited", "celery")
    with pytest.raises(NotDeleted, match="owned by an ingress"):
        await Deletion(store).delete(CID, last_id=last_id, limit_seconds=0)
    await store.connection.call("HDEL", store.known_keys(CID).meta, "awaited")
    await enter(store, "w1")
    assert isinstance(await Owners(store).claim(CID, "w1"), ClaimedConversation)
    with pytest.raises(NotDeleted, match="owned by w1"):
        await Deletion(store).delete(CID, last_id=last_id, limit_seconds=0)
    row = await Conversations(store).load_row(CID)
    assert not row.is_closed
    await EventLog(store).append(CID, [message()])


async def test_an_end_without_a_beginning_deletes_nothing(store: Store) -> None:
    await filled(store)
    names = store.known_keys(CID)
    assert await store.call_function("deck_end_deletion", (names.root, names.shard.root), CID) == ["kept"]
    assert await existing(store, own_keys(names)) == 8


class Killed(StoreUnavailable):
    """An exception in place of a client's death, invisible to the client."""


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
        keys = own_keys(store.known_keys(CID)) + await blob_keys(store)
        dying = Store(Dying(store, commands), store.layout, store.generation, patience_seconds=0.0)  # type: ignore[arg-type]
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
