"""Opening a store: facts checked, functions deployed by version, another store than before noticed."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import lupa.lua51
import pytest

import broker
from broker.contract.events import ConversationCreated
from broker.log.append_call import Duplicate
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.runtime.errors import (
    FunctionsReplaced,
    FunctionsTooOld,
    OutcomeUnknown,
    StoreError,
    StoreMisconfigured,
    StoreTooNew,
)
from broker.store import function_library, keys
from broker.store.connection import Connection
from broker.store.function_library import (
    ANNOUNCED_FIELD,
    ANNOUNCED_UNTIL_FIELD,
    LIBRARY,
    VERSION_FIELD,
    VERSIONS,
    WORKER_FIELD,
    FunctionsVersion,
    build_source,
    deploy,
    own_version,
)
from broker.store.store import Store, open_store
from tests.broker_parts import LosingConnection, begin, enter, message

Connect = Callable[[], Connection]
OWN = own_version()
MOST_LOCALS, LOCALS_OF_A_MODULE = 200, 120
NEWER = FunctionsVersion(OWN.order + 1, "abcdef0123456789", OWN.order)
NEWER_ALONE = FunctionsVersion(OWN.order + 1, "abcdef0123456789", OWN.order + 1)
OLDER = FunctionsVersion(OWN.order - 1, "0123456789abcdef", 1)


def test_a_changed_source_has_a_new_version() -> None:
    following = len(VERSIONS) + 1
    assert OWN.order, (
        f'The Lua has changed. Add to VERSIONS: FunctionsVersion({following}, "{OWN.code}", OLDEST), where OLDEST is '
        f"{following}, or the lowest order of the workers that can call the changed functions."
    )
    assert VERSIONS[-1] == OWN
    assert [version.order for version in VERSIONS] == list(range(1, following))
    assert all(1 <= version.oldest <= version.order for version in VERSIONS)


def test_no_version_is_changed_or_removed_once_another_follows() -> None:
    """Until then it belongs to no release: work that is merged before one shares its order."""
    path = Path(function_library.__file__)
    line = re.compile(r'^([-+ ])?\s+FunctionsVersion\((\d+), "([0-9a-f]{16})", (\d+)\)', re.MULTILINE)

    def ask(*arguments: str) -> str:
        git = ["git", "-C", str(path.parent), *arguments]
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout

    try:
        changes = ask("log", "-p", "--format=commit:%H", "--", path.name).split("commit:")[1:]
        changes.append(f"HEAD\n{ask('diff', 'HEAD', '--', path.name)}")
        for change in changes:
            commit, _, diff = change.partition("\n")
            removed = [found for found in line.findall(diff) if found[0] == "-"]
            before = commit if commit == "HEAD" else f"{commit}^"
            last = max(
                (int(found[1]) for found in line.findall(ask("show", f"{before}:./{path.name}"))) if removed else [0]
            )
            for _, order, code, oldest in removed:
                version = FunctionsVersion(int(order), code, int(oldest))
                assert int(order) == last or version in VERSIONS, f"the version {version} is gone; add a line instead"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this tree is no git repository")


MODULES = sorted(Path(broker.__file__).parent.rglob("*.lua"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_leaves_room_for_locals(path: Path) -> None:
    """Lua allows 200 locals in a chunk: the module compiles with 80 more, so it has 120 at most."""
    text, returned, value = path.read_text().rpartition("\nreturn ")
    more = "".join(f"\nlocal more_{number}" for number in range(MOST_LOCALS - LOCALS_OF_A_MODULE))
    code = f"{text}{more}{returned}{value}" if returned and "\n" not in value.strip() else path.read_text() + more
    lupa.lua51.LuaRuntime().compile(code)


def test_each_lua_file_is_a_module_of_the_library() -> None:
    names = re.findall(r"^sources\['([\w/]+)'\]", build_source(), re.MULTILINE)
    assert names == [str(path.relative_to(Path(broker.__file__).parent).with_suffix("")) for path in MODULES]
    assert {name for path in MODULES for name in re.findall(r"require\('([\w/]+)'\)", path.read_text())} <= {*names}


@pytest.mark.parametrize(
    ("functions", "caller", "expected"),
    [
        (OWN, OWN, True),
        (NEWER, OWN, True),
        (NEWER_ALONE, OWN, False),
        (OLDER, OWN, False),
        (FunctionsVersion(OWN.order, "another", 1), OWN, False),
        (FunctionsVersion(0, "unknown", 0), OWN, False),
        (OWN, FunctionsVersion(0, "unknown", 0), False),
        (FunctionsVersion(0, "unknown", 0), FunctionsVersion(0, "unknown", 0), True),
    ],
)
def test_which_callers_functions_serve(functions: FunctionsVersion, caller: FunctionsVersion, expected: bool) -> None:
    assert functions.serves(caller) is expected
    assert FunctionsVersion.parse(functions.stamp) == functions


@pytest.fixture
async def opened(connect: Connect) -> AsyncIterator[Connect]:
    """Makes connections like `connect`; they are closed at the end."""
    made: list[Connection] = []

    def make() -> Connection:
        made.append(connect())
        return made[-1]

    yield make
    for connection in made:
        await connection.aclose()


async def with_functions(connection: Connection, version: FunctionsVersion) -> None:
    """Load functions that say which they are, under a version."""
    code = build_source() + f"\nredis.register_function('deck_other', function() return {{'{version.order}'}} end)"
    await connection.call("FUNCTION", "LOAD", "REPLACE", code)
    await connection.call("HSET", keys.STORE, VERSION_FIELD, version.stamp)


async def are_there(connection: Connection, version: FunctionsVersion) -> bool:
    reply: Any = await connection.call("FCALL", "deck_other", 1, "deck:{0}")
    return bool(reply == [str(version.order).encode()])


async def test_newer_functions_are_left_alone_and_used(opened: Connect, caplog: pytest.LogCaptureFixture) -> None:
    connection = opened()
    await with_functions(connection, NEWER)
    with caplog.at_level(logging.WARNING):
        store = await open_store(connection)
    assert await are_there(connection, NEWER)
    assert f"version {NEWER}; this process has {OWN}" in caplog.text
    await begin(store)


@pytest.mark.parametrize("version", [NEWER_ALONE, FunctionsVersion(OWN.order, "another", 1)])
async def test_functions_that_do_not_serve_are_named(opened: Connect, version: FunctionsVersion) -> None:
    await with_functions(opened(), version)
    with pytest.raises(StoreTooNew, match=re.escape(f"version {version}; this build is made for version {OWN}")):
        await open_store(opened())
    assert await are_there(opened(), version)


async def test_lost_newer_functions_are_not_replaced_by_older_ones(opened: Connect) -> None:
    connection = opened()
    await connection.call("HSET", keys.STORE, VERSION_FIELD, NEWER.stamp)
    with pytest.raises(StoreTooNew, match="has lost its functions"):
        await open_store(connection)
    assert not await opened().call("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY)


@pytest.mark.parametrize("stamp", ["0:abc", OLDER.stamp, "rubbish"])
async def test_older_functions_are_replaced(opened: Connect, stamp: str) -> None:
    connection = opened()
    await connection.call(
        "FUNCTION", "LOAD", "#!lua name=deckhands\nredis.register_function('deck_leave', function() end)"
    )
    await connection.call("HSET", keys.STORE, VERSION_FIELD, stamp)
    store = await open_store(connection)
    assert await store.call_function("deck_leave", (store.all_shards[0].root,), "w") == ["left"]
    assert await connection.call("HGET", keys.STORE, VERSION_FIELD) == OWN.stamp.encode()


async def test_missing_functions_are_deployed_again(opened: Connect) -> None:
    connection = opened()
    await connection.call("HSET", keys.STORE, VERSION_FIELD, OWN.stamp)
    store = await open_store(connection)
    await begin(store)


async def test_a_client_deploys_only_into_a_store_without_functions(opened: Connect) -> None:
    client = await open_store(opened(), deploys=False)
    assert not await client.connection.call("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY)
    await begin(client)
    assert await client.connection.call("HGET", keys.STORE, VERSION_FIELD) == OWN.stamp.encode()


async def test_a_client_does_not_replace_functions_deployed_since(opened: Connect) -> None:
    client = await open_store(opened(), deploys=False)
    await with_functions(opened(), NEWER)
    older = FunctionsVersion(OWN.order - 1, "0123456789abcdef", OWN.order - 1)
    await opened().call("HSET", keys.STORE, VERSION_FIELD, older.stamp)
    with pytest.raises(FunctionsTooOld):
        await begin(client)
    assert await opened().call("HGET", keys.STORE, VERSION_FIELD) == older.stamp.encode()


async def test_an_announcement_ends_by_itself(opened: Connect) -> None:
    connection = opened()
    worker = await open_store(connection)
    seconds = int((await connection.call("TIME"))[0])
    announcement = ("HSET", keys.STORE, ANNOUNCED_FIELD, NEWER_ALONE.stamp, ANNOUNCED_UNTIL_FIELD)
    await connection.call(*announcement, seconds + 3600)
    with pytest.raises(FunctionsReplaced):
        await worker.functions.check(connection)
    await connection.call(*announcement, seconds - 1)
    await worker.functions.check(connection)
    await enter(worker, "w1")
    await begin(await open_store(opened(), deploys=False))


async def test_setup_withdraws_an_announcement_that_was_left_behind(opened: Connect) -> None:
    connection = opened()
    worker = await open_store(connection)
    await connection.call("HSET", keys.STORE, ANNOUNCED_FIELD, NEWER_ALONE.stamp)
    await deploy(connection)  # a worker that starts meanwhile
    with pytest.raises(FunctionsReplaced):
        await worker.functions.check(connection)
    assert await deploy(connection, is_setup=True) == OWN
    await worker.functions.check(connection)


@pytest.mark.parametrize(("count", "more"), [(5, ""), (7, " and 2 more")])
async def test_older_functions_stay_while_workers_need_them(opened: Connect, count: int, more: str) -> None:
    connection = opened()
    store = await open_store(connection)
    for number in range(count):
        await enter(store, f"w{number}")
        await connection.call("HDEL", store.all_shards[0].worker_facts(f"w{number}"), WORKER_FIELD)
    await with_functions(connection, OLDER)
    with pytest.raises(FunctionsTooOld, match=rf"w\d \(version [^,]*\){more}\. Version"):
        await deploy(connection)
    assert await are_there(connection, OLDER)


@pytest.mark.parametrize(("version", "error"), [(OLDER, FunctionsTooOld), (NEWER_ALONE, StoreTooNew)])
async def test_a_client_of_another_version_reads_but_does_not_write(
    opened: Connect, version: FunctionsVersion, error: type[Exception]
) -> None:
    connection = opened()
    await begin(await open_store(connection), "conversation-1")
    await with_functions(connection, version)
    client = await open_store(opened(), deploys=False)
    assert await client.call("HGET", client.known_keys("conversation-1").meta, "state") is not None
    await client.now(client.all_shards[0])
    with pytest.raises(error, match=re.escape(f"version {version}")) as refused:
        await begin(client, "conversation-2")
    assert str(OWN) in str(refused.value)
    assert await are_there(connection, version)


async def test_a_refused_call_of_a_worker_names_the_replaced_functions(opened: Connect) -> None:
    worker = await open_store(opened())
    await worker.connection.call(
        "FUNCTION", "LOAD", "REPLACE", "#!lua name=deckhands\nredis.register_function('deck_new', function() end)"
    )
    await worker.connection.call("HSET", keys.STORE, VERSION_FIELD, NEWER_ALONE.stamp)
    with pytest.raises(FunctionsReplaced, match=re.escape(str(NEWER_ALONE))):
        await begin(worker)


async def test_a_store_keeps_its_facts(connect: Callable[[], Connection]) -> None:
    first = await open_store(connect(), shards=4)
    second = await open_store(connect(), shards=9)
    assert (first.shards, second.shards) == (4, 4)
    assert first.generation == second.generation
    assert [names.root for names in first.all_shards] == ["deck:{0}", "deck:{1}", "deck:{2}", "deck:{3}"]
    for store in (first, second):
        await store.aclose()


async def test_conversations_spread_over_the_shards(connect: Callable[[], Connection]) -> None:
    store = await open_store(connect(), shards=4)
    ids = [f"conversation-{n}" for n in range(40)]
    for cid in ids:
        await begin(store, cid)
    rows = await Conversations(store).list_recent(limit=100)
    assert sorted(row.conversation_id for row in rows) == sorted(ids)
    assert len(await Conversations(store).list_recent(limit=7)) == 7
    assert {store.known_keys(cid).shard.shard for cid in ids} == {0, 1, 2, 3}
    await store.aclose()


async def test_the_newest_conversation_is_listed_first(store: Store) -> None:
    for cid in ("aaa", "bbb", "ccc"):
        await begin(store, cid)
    await store.connection.call("ZADD", store.all_shards[0].index, 9_999_999_999_999, "bbb")
    assert [row.conversation_id for row in await Conversations(store).list_recent(limit=1)] == ["bbb"]


async def test_an_emptied_store_is_another_store(store: Store, connect: Callable[[], Connection]) -> None:
    await store.check_generation()
    await store.connection.call("DEL", keys.STORE)
    with pytest.raises(StoreMisconfigured, match="was emptied or replaced"):
        await store.check_generation()
    again = await open_store(connect())
    with pytest.raises(StoreMisconfigured, match="was emptied or replaced"):
        await store.check_generation()
    await again.check_generation()
    await again.aclose()


async def test_a_store_of_a_newer_schema_is_refused(connect: Callable[[], Connection]) -> None:
    connection = connect()
    await connection.call("HSET", keys.STORE, "schema", 99)
    with pytest.raises(StoreTooNew, match="The store has schema version 99; this version of Deckhands reads up to 2"):
        await open_store(connection)


async def test_function_error_is_an_error_of_the_store(store: Store) -> None:
    await store.connection.call("SET", store.known_keys("conversation-1").meta, "not a hash")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await begin(store)


async def test_an_append_is_repeated_until_its_outcome_is_known(connect: Callable[[], Connection]) -> None:
    losing = LosingConnection(connect(), lambda sent: sent[0] == "FCALL" and losing.lost < 3)
    store = await open_store(losing)
    log = EventLog(store)
    # Written by the first try, whose reply was lost; the fourth returned the answer.
    assert await log.create(ConversationCreated(conversation_id="conversation-1")) == Duplicate(1, 1)
    assert losing.lost == 3
    await asyncio.gather(*(log.append("conversation-1", [message(str(n))]) for n in range(20)))
    assert [event.id for event in await log.read("conversation-1")] == list(range(1, 22))
    await store.aclose()


async def test_patience_ends(connect: Callable[[], Connection]) -> None:
    losing = LosingConnection(connect(), lambda sent: sent[0] == "FCALL")
    store = await open_store(losing, patience_seconds=0.1)
    with pytest.raises(OutcomeUnknown):
        await begin(store)
    assert losing.lost >= 2
    await store.aclose()
