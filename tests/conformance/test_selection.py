"""Conversations chosen by label and state, in pages: all of them, each once, whatever happens in between."""

from __future__ import annotations

import pytest

from broker.contract.events import AgentSpec, ConversationCreated
from broker.contract.interventions import ConversationChanged
from broker.log import selection
from broker.log.append_call import Appended
from broker.log.conversations import ConversationRow
from broker.log.deletion import Deletion
from broker.log.event_log import EventLog
from broker.log.selection import ConversationQuery, Selection
from broker.log.status import make_changed_fields
from broker.store.store import Store
from tests.broker_parts import message

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
        await store.connection.call("HSET", store.keys(name).meta, *fields)
    assert {row.conversation_id for row in await found(store, Selection(states=frozenset(states)))} == names


async def test_a_label_is_found_without_reading_the_others(store: Store) -> None:
    await begin(store, "labelled", {"team": "a"})
    await begin(store, "other-1")
    await store.connection.call("SET", store.keys("other-1").meta, "to read this is an error")
    assert [row.conversation_id for row in await found(store, Selection({"team": "a"}))] == ["labelled"]


async def test_a_repeated_start_is_indexed_once(store: Store) -> None:
    for _ in range(2):
        await begin(store, "labelled", {"team": "a"})
    assert await store.connection.call("ZCARD", store.all_shards[0].label_index("team", "a")) == 1


async def listed(store: Store, created: dict[str, int]) -> None:
    """Enter conversations that were begun in certain milliseconds."""
    commands: list[tuple[str | int, ...]] = []
    for name, millis in created.items():
        names = store.keys(name)
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
            await store.connection.call("ZREM", store.keys(row.conversation_id).shard.index, row.conversation_id)
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
