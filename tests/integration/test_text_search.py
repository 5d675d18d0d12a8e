"""The search in the texts of all conversations: in the store and the archive, in bounded steps, within a key's rights."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import sys
import zipfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import fsspec  # type: ignore[import-untyped]
import httpx2
import pytest
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from broker.contract import codec
from broker.contract.actions import SystemMessageAction
from broker.contract.events import ConversationCreated, Event
from broker.contract.specs import Tenancy
from broker.log.entries import parse_entry
from broker.log.selection import Selection
from broker.runtime.errors import DataLocked, UsageError
from broker.store.encryption import MasterKeys
from broker.store.store import open_store
from deckhands.client.archive.archive import Archive
from deckhands.client.client import Client
from deckhands.client.text_search import EVENT_CHARS, KEPT_FILES, MAX_TEXT_CHARS, SearchPage, SearchQuery, TextSearch
from deckhands.cluster.home import Home
from deckhands.server.gateway import SEARCHES_AT_ONCE, SEARCHES_WAITING
from tests.archive_parts import begin_ended, retired
from tests.integration.command_line import deckhands, environment
from tests.polling import until
from tests.server_parts import Served, served
from tests.stores import RealServer, emptied
from tests.unit.deckhands.sample_log import command, output, state, user

KEYS = f"one:{base64.b64encode(bytes(range(32))).decode()}"
KEEP = '[[rule]]\nlabels = {keep = "yes"}\nage = "never"\n[[rule]]\nage = "0s"'
LIVE = {"labels": {"keep": "yes"}}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
async def client(valkey_server: RealServer, place: Path) -> AsyncIterator[Client]:
    async with await Client.connect(await emptied(valkey_server.url)) as connected:
        yield Client(connected.store, str(place))


async def search(client: Client, text: str, **options: object) -> list[str]:
    return [found.conversation_id async for found in client.search(text, **options)]  # type: ignore[arg-type]


async def add(client: Client, name: str, *texts: str, **created: object) -> None:
    log: list[Event] = [
        user(f"The task of {name}."),
        state("running"),
        command("make test"),
        output(4, "\n".join(texts)),
    ]
    first = ConversationCreated.model_validate({"conversation_id": name, "title": f"Title of {name}", **created})
    await client.log.create_from(first, [*log, state("finished")], key=f"begin:{name}")


async def turn_pages(
    searcher: TextSearch, query: SearchQuery, *, limit_seconds: float = 0.0, limit_chars: int = 0, limit: int = 20
) -> list[SearchPage]:
    """Return all pages of a search whose calls end as soon as they have read anything."""
    pages, cursor = [], ""
    while True:
        page = await searcher.load_page(
            query, cursor, limit=limit, limit_seconds=limit_seconds, limit_chars=limit_chars
        )
        if page.place == "listing":
            await asyncio.sleep(0)
        else:
            pages.append(page)
        if page.next_cursor is None:
            return pages
        assert page.next_cursor != cursor or page.place == "listing", "a call did not advance"
        cursor = page.next_cursor


async def test_titles_tasks_and_events_are_found_live_and_archived(client: Client, place: Path, tmp_path: Path) -> None:
    for name in ("old-1", "old-2"):
        await add(client, name, "A needle in the haystack.")
    await add(client, "old-3", "nothing")
    await retired(client.store, place, tmp_path)
    for number, name in enumerate(("old-1", "old-2", "old-3")):
        os.utime(next(place.rglob(f"{name}.zip")), (1_000 + number, 1_000 + number))
    await add(client, "new-1", "Another NEEDLE\nin a haystack", **LIVE)
    await add(client, "new-2", title="Needle, haystack", **LIVE)
    found = [one async for one in client.search("haystack needle")]
    assert [one.conversation_id for one in found] == ["new-2", "new-1", "old-2", "old-1"]
    assert [one.is_archived for one in found] == [False, False, True, True]
    assert [one.match.event_id for one in found] == [None, 5, 5, 5]
    assert found[1].match.snippet == "Another NEEDLE in a haystack"
    assert found[2].title == "Title of old-2"
    assert await search(client, "task of") == ["new-2", "new-1", "old-3", "old-2", "old-1"]
    assert await search(client, "needle", place="archive") == ["old-2", "old-1"]
    assert await search(client, "needle", place="store") == ["new-2", "new-1"]
    assert await search(client, "needle", labels={"keep": "yes"}) == ["new-2", "new-1"]
    assert await search(client, "needle", states=["error"]) == []
    assert await search(client, "needle elsewhere") == []
    assert await search(client, "observation.run") == [], "the names of kinds are no texts"


async def test_restored_conversation_is_found_once(client: Client, place: Path, tmp_path: Path) -> None:
    await add(client, "back-1", "needle")
    await retired(client.store, place, tmp_path)
    await client.restore("back-1")
    assert next(place.rglob("back-1.zip")).exists()
    assert [one.is_archived async for one in client.search("needle")] == [False]


async def test_middle_of_a_long_text_is_searched(client: Client, place: Path, tmp_path: Path) -> None:
    middle = f"{'hay ' * 20_000}needle{' hay' * 20_000}"
    await client.log.create_from(
        ConversationCreated(conversation_id="long-1"), [user(middle), state("running"), state("finished")], key="x"
    )
    stored = (await client.events("long-1"))[1].wire()
    assert "needle" not in stored["content"], "the log has only the ends of a long text"
    assert await search(client, "needle") == ["long-1"]
    await retired(client.store, place, tmp_path)
    found = [one async for one in client.search("needle")]
    assert [(one.conversation_id, one.is_archived) for one in found] == [("long-1", True)]
    assert len(found[0].match.snippet) <= 202
    assert "needle" in found[0].match.snippet


async def test_event_loop_decodes_and_compares_no_event(client: Client) -> None:
    middle = f"{'hay ' * 20_000}needle{' hay' * 20_000}"
    lines = [user(f"line {number}") for number in range(1_500)]
    first = ConversationCreated(conversation_id="long-1")
    await client.log.create_from(first, [user("hay " * 20_000), *lines, user(middle), state("finished")], key="x")
    steps = (codec.decode, codec.restore, codec.event_from_wire, parse_entry, SearchQuery.find_in)
    codes = {step.__code__: step.__name__ for step in steps}
    counts: Counter[str] = Counter()

    def count_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in codes:
            counts[codes[frame.f_code]] += 1

    sys.setprofile(count_call)  # of this thread
    try:
        page = await client.text_search.load_page(SearchQuery.parse("needle"), limit_seconds=600.0)
    finally:
        sys.setprofile(None)
    assert [one.match.event_id for one in page.found] == [1_503]
    assert counts == {"find_in": 1}, "only the title"


async def test_unreadable_text_hides_no_other(client: Client) -> None:
    middles = [f"{'hay ' * 20_000}needle-{number}{' hay' * 20_000}" for number in range(5)]
    await client.log.create_from(ConversationCreated(conversation_id="long-1"), [*map(user, middles)], key="x")
    damaged = (await client.events("long-1"))[2]
    assert damaged.blobs is not None
    (ref,) = damaged.blobs.values()
    await client.store.connection.call("SET", client.store.known_keys("long-1").blob(ref.sha256), b"damaged")
    assert await search(client, "needle-1") == []
    for number in (0, 2, 3, 4):
        assert await search(client, f"needle-{number}") == ["long-1"], number


async def test_system_prompts_are_not_searched(client: Client) -> None:
    first = ConversationCreated(conversation_id="one-1", title="One")
    await client.log.create_from(first, [SystemMessageAction(content="needle"), user("hay")], key="begin")
    assert await search(client, "needle") == []
    assert await search(client, "hay") == ["one-1"]


async def test_search_continues_in_the_middle_of_a_log(client: Client, place: Path, tmp_path: Path) -> None:
    events = [state("running"), *(user(f"line {number}") for number in range(900)), user("needle"), state("finished")]
    for name in ("long-1", "long-2"):
        await client.log.create_from(ConversationCreated(conversation_id=name), events, key=name)
    await retired(client.store, place, tmp_path)
    await client.log.create_from(ConversationCreated(conversation_id="live-1"), events, key="live-1")
    await add(client, "live-2", "needle")
    query = SearchQuery.parse("needle")
    pages = await turn_pages(client.text_search, query, limit_seconds=600.0, limit_chars=50 * EVENT_CHARS)
    found = [one.conversation_id for page in pages for one in page.found]
    assert (found[:2], set(found[2:]), len(found)) == (["live-2", "live-1"], {"long-1", "long-2"}, 4)
    assert sum(page.searched for page in pages) == 4
    assert len(pages) > 3 * 900 / 50, "each call has read a part of a log"
    whole = await client.text_search.load_page(query)
    assert [one.conversation_id for one in whole.found] == found
    one_each = await turn_pages(client.text_search, query, limit=1, limit_seconds=60, limit_chars=10**9)
    assert [one.conversation_id for page in one_each for one in page.found] == found
    assert max(len(page.found) for page in one_each) == 1


async def test_encrypted_logs_are_searched_with_the_key_alone(
    valkey_server: RealServer, place: Path, tmp_path: Path
) -> None:
    store = await open_store(await emptied(valkey_server.url), masters=MasterKeys(KEYS))
    async with Client(store, str(place)) as client:
        await begin_ended(client, "of-acme", user("a needle"), tenancy=Tenancy(tenant="acme"))
        await begin_ended(client, "of-shop", user("a needle"), tenancy=Tenancy(tenant="shop"))
        await retired(store, place, tmp_path)
        await begin_ended(client, "live-1", user("a needle"), tenancy=Tenancy(tenant="acme"))
        assert sorted(await search(client, "needle")) == ["live-1", "of-acme", "of-shop"]
        archived = [one async for one in client.search("needle", place="archive", tenant="acme")]
        assert [one.title for one in archived] == ["Title of of-acme"]
        without = await open_store(valkey_server.url, deploys=False)
        async with Client(without, str(place)) as locked:
            page = await locked.text_search.load_page(SearchQuery.parse("needle"))
            assert (page.found, page.searched, page.unreadable) == ((), 0, 3)
        await store.encryption.delete_key("acme")
        other = await open_store(valkey_server.url, masters=MasterKeys(KEYS))
        async with Client(other, str(place)) as reader:
            page = await reader.text_search.load_page(SearchQuery.parse("needle"))
            assert [one.conversation_id for one in page.found] == ["of-shop"]
            assert page.unreadable == 2


async def test_damaged_files_and_logs_are_counted_and_hide_no_other(
    client: Client, place: Path, tmp_path: Path
) -> None:
    for name in ("one-1", "two-2"):
        await add(client, name, "needle", tenancy=Tenancy(tenant="acme"))
    await retired(client.store, place, tmp_path)
    next(place.rglob("one-1.zip")).write_bytes(b"no zip")
    await add(client, "three-3", "needle")
    await client.store.connection.call("XADD", client.store.known_keys("three-3").events, "9-0", "e", b"rubbish")
    page = await client.text_search.load_page(SearchQuery.parse("needle"))
    assert ([one.conversation_id for one in page.found], page.unreadable) == (["two-2"], 2)
    theirs = await client.text_search.load_page(SearchQuery.parse("needle", Selection(tenant="acme")))
    assert ([one.conversation_id for one in theirs.found], theirs.unreadable) == (["two-2"], 0)


async def test_values_of_secrets_are_not_found(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path / "home"))
    cid = await client.submit("Fix it.", secrets={"TOKEN": "correct-horse-battery"})
    await client.send_message(cid, "It is correct-horse-battery.")
    assert await search(client, "correct-horse-battery") == []
    assert [one.match.snippet async for one in client.search("secret_hidden")] == ["It is <secret_hidden>."]


async def test_pictures_alone_are_not_searched(client: Client) -> None:
    picture = "data:image/png;base64,bmVlZGxl"
    await add(client, "one-1", 'data: {"step": 1}\nneedle')
    await add(client, "two-2", f"{picture}\nneedle")
    await add(client, "three-3", "data:text/plain;base64,needle")
    await add(client, "four-4", picture)
    assert set(await search(client, "needle")) == {"one-1", "two-2", "three-3"}
    assert await search(client, "bmVlZGxl") == ["two-2"]


@pytest.mark.parametrize("cursor", ["!", "YTow", "é", "x" * 200, base64.b64encode(b"a:1:zz").decode()])
async def test_forged_cursors_are_refused(client: Client, cursor: str) -> None:
    with pytest.raises(UsageError, match="cursor cannot be used"):
        await client.text_search.load_page(SearchQuery.parse("x"), cursor)


@pytest.mark.parametrize("millis", ["253402300800000", "9" * 15])
async def test_times_after_the_last_year_are_refused(client: Client, millis: str) -> None:
    await add(client, "one-1", "needle")
    with pytest.raises(UsageError, match="cursor cannot be used"):
        await client.text_search.load_page(SearchQuery.parse("needle"), make_cursor(f"s:1:{millis}:one-1"), limit=1)
    last = make_cursor("s:1:253402300799999:one-1")
    page = await client.text_search.load_page(SearchQuery.parse("needle"), last, limit=1)
    assert [one.conversation_id for one in page.found] == ["one-1"]


@pytest.mark.parametrize(
    ("place", "cursor"),
    [("archive", "s"), ("archive", "s:1:1000:one-1"), ("store", "l:1000"), ("store", f"a:1:{'0' * 32}")],
)
async def test_cursors_of_the_other_place_are_refused(
    client: Client, place: Literal["store", "archive"], cursor: str
) -> None:
    await add(client, "one-1", "needle")
    with pytest.raises(UsageError, match="cursor cannot be used"):
        await client.text_search.load_page(SearchQuery.parse("needle", place=place), make_cursor(cursor))


def make_cursor(text: str) -> str:
    """Return a cursor as its holder may make it."""
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize("text", ["", " \n", "x " * 11 + "y1 y2 y3 y4 y5 y6 y7 y8 y9 y10", "x" * (MAX_TEXT_CHARS + 1)])
def test_queries_without_words_or_with_too_many_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        SearchQuery.parse(text)


async def test_patterns_are_plain_texts(client: Client) -> None:
    await add(client, "one-1", "(a+)+$ costs nothing")
    await add(client, "two-2", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!")
    assert await search(client, "(a+)+$") == ["one-1"]


async def test_listing_is_waited_for_no_longer_than_the_call_lasts(client: Client, place: Path, tmp_path: Path) -> None:
    await add(client, "one-1", "needle")
    await retired(client.store, place, tmp_path)
    query = SearchQuery.parse("needle", place="archive")
    page = await client.text_search.load_page(query, limit_seconds=0.0)
    assert (page.place, page.found) == ("listing", ())
    assert page.next_cursor is not None
    rest = await client.text_search.load_page(query, page.next_cursor, limit_seconds=60.0)
    assert [one.conversation_id for one in rest.found] == ["one-1"]


class CountedFiles(LocalFileSystem):  # type: ignore[misc]
    """A file system that counts the bytes that are read."""

    protocol = "counted"
    read_bytes = 0

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        read = file.read

        def read_counted(size: int = -1) -> bytes:
            content: bytes = read(size)
            CountedFiles.read_bytes += len(content)
            return content

        file.read = read_counted
        return file


async def archive_large_logs(
    client: Client, place: Path, folder: Path, *names: str, count: int, **created: Any
) -> None:
    """Archive logs of `count` events of 10 KB that hardly compress, with the words at their end."""
    draw = random.Random(1)
    texts = [f"part-{number} {base64.b64encode(draw.randbytes(7_500)).decode()}" for number in range(count)]
    events = [state("running"), *map(user, texts), user("needle"), state("finished")]
    for name in names:
        await client.log.create_from(ConversationCreated(conversation_id=name, **created), events, key=name)
    await retired(client.store, place, folder)


def open_counted(client: Client, place: Path) -> Client:
    fsspec.register_implementation("counted", CountedFiles, clobber=True)
    CountedFiles.read_bytes = 0
    return Client(client.store, f"counted://{place}")


async def test_large_archived_log_is_read_once_over_all_calls(client: Client, place: Path, tmp_path: Path) -> None:
    await archive_large_logs(client, place, tmp_path, "large-1", count=1_000)
    size = next(place.rglob("large-1.zip")).stat().st_size
    counted = open_counted(client, place)
    query = SearchQuery.parse("needle", place="archive")
    pages = await turn_pages(counted.text_search, query, limit_seconds=600.0, limit_chars=2**20)
    assert [one.conversation_id for page in pages for one in page.found] == ["large-1"]
    assert len(pages) >= 8
    assert CountedFiles.read_bytes < 1.5 * size, f"{CountedFiles.read_bytes / size:.1f} times the file"
    await counted.aclose()


async def test_a_spent_call_reads_a_piece_of_one_file(client: Client, place: Path, tmp_path: Path) -> None:
    names = [f"large-{number}" for number in range(8)]
    await archive_large_logs(client, place, tmp_path, *names, count=400)
    size = next(place.rglob("large-1.zip")).stat().st_size
    counted = open_counted(client, place)
    query = SearchQuery.parse("needle", place="archive")
    page = await counted.text_search.load_page(query, limit_seconds=600.0, limit_chars=0)
    assert (page.found, page.searched, page.place) == ((), 0, "archive")
    assert CountedFiles.read_bytes < size, "a piece is less than half of a file"
    await counted.aclose()


async def test_search_continues_in_a_log_at_another_server(client: Client, place: Path, tmp_path: Path) -> None:
    await archive_large_logs(client, place, tmp_path, "large-1", "large-2", count=300)
    query = SearchQuery.parse("needle", place="archive")
    found: list[str] = []
    cursor, calls = "", 0
    while True:
        other = Client(client.store, str(place))
        page = await other.text_search.load_page(query, cursor, limit_seconds=600.0, limit_chars=2**20)
        found += [one.conversation_id for one in page.found]
        calls += 1
        if page.next_cursor is None:
            break
        assert page.next_cursor != cursor, "a call did not advance"
        cursor = page.next_cursor
    assert sorted(found) == ["large-1", "large-2"]
    assert calls >= 4


async def test_few_interrupted_searches_keep_files_open(client: Client, place: Path, tmp_path: Path) -> None:
    names = [f"large-{number}" for number in range(KEPT_FILES + 2)]
    await archive_large_logs(client, place, tmp_path, *names, count=150)
    reader = Client(client.store, str(place))
    query = SearchQuery.parse("nowhere", place="archive")
    for position in await positions(place):
        cursor = make_cursor(f"a:1:{position}")
        page = await reader.text_search.load_page(query, cursor, limit_seconds=600.0, limit_chars=0)
        assert page.next_cursor is not None
    assert len(find_open_files(place)) == KEPT_FILES
    reader.text_search.close()
    assert find_open_files(place) == []


def find_open_files(place: Path) -> list[str]:
    """Return the files below a folder that this process has open."""
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            paths.append(str(link.readlink()))
    return [path for path in paths if path.startswith(str(place)) and path.endswith(".zip")]


@pytest.mark.parametrize("change", ["removed", "damaged", "replaced"])
async def test_file_that_changes_between_calls(client: Client, place: Path, tmp_path: Path, change: str) -> None:
    await archive_large_logs(client, place, tmp_path, "large-1", count=300)
    query = SearchQuery.parse("needle", place="archive")
    first = await client.text_search.load_page(query, limit_seconds=600.0, limit_chars=2**20)
    assert first.next_cursor is not None
    path = next(place.rglob("large-1.zip"))
    if change == "removed":
        path.unlink()
    elif change == "damaged":
        path.write_bytes(path.read_bytes()[:-1_000])
    else:
        stamp = path.stat().st_mtime
        with zipfile.ZipFile(path, "a") as file:
            file.comment = b"larger"
        os.utime(path, (stamp, stamp))
    page = await client.text_search.load_page(query, first.next_cursor, limit_seconds=600.0)
    expected = {"removed": (0, 0), "damaged": (0, 1), "replaced": (1, 0)}[change]
    assert (len(page.found), page.unreadable) == expected
    assert page.next_cursor is None


async def test_damage_at_the_end_of_a_log_is_noticed(client: Client, place: Path, tmp_path: Path) -> None:
    await archive_large_logs(client, place, tmp_path, "large-1", count=10)
    path = next(place.rglob("large-1.zip"))
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    contents["events.jsonl"] = contents["events.jsonl"].replace(b"needle", b"noodle")
    with zipfile.ZipFile(path, "w") as file:
        for name, content in contents.items():
            file.writestr(name, content)
    page = await client.text_search.load_page(SearchQuery.parse("nowhere"), limit_seconds=600.0)
    assert (page.searched, page.unreadable) == (0, 1)


async def test_deleted_key_ends_an_interrupted_search(valkey_server: RealServer, place: Path, tmp_path: Path) -> None:
    store = await open_store(await emptied(valkey_server.url), masters=MasterKeys(KEYS))
    async with Client(store, str(place)) as client:
        await archive_large_logs(client, place, tmp_path, "large-1", count=300, tenancy=Tenancy(tenant="acme"))
        query = SearchQuery.parse("needle", place="archive")
        first = await client.text_search.load_page(query, limit_seconds=600.0, limit_chars=2**20)
        assert first.next_cursor is not None
        again = await client.text_search.load_page(query, first.next_cursor, limit_seconds=600.0, limit_chars=2**20)
        assert again.next_cursor is not None
        manifest = await client.archive.manifest("large-1")  # type: ignore[union-attr]
        await store.encryption.delete_key("acme")

        async def is_forgotten() -> bool:
            try:
                await client.archive.load_cipher(manifest)  # type: ignore[union-attr, arg-type]
            except DataLocked:
                return True
            return False

        await until(is_forgotten, limit=60.0, what="the end of the cached key")
        page = await client.text_search.load_page(query, again.next_cursor, limit_seconds=600.0)
        assert (page.found, page.unreadable, page.next_cursor) == ((), 1, None)


@pytest.fixture
async def server(tmp_path: Path, place: Path, programs: dict[str, str]) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", programs, archive=str(place)) as found:
        yield found


async def search_over_http(client: httpx2.AsyncClient, **query: str | int) -> list[dict[str, Any]]:
    """Search to the end."""
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        answer = (await client.get("/search", params={**query, "cursor": cursor})).json()
        found += answer["conversations"]
        cursor = answer["next_cursor"]
        if cursor is None:
            return found


async def fill_for_two_tenants(served: Served, place: Path, folder: Path) -> None:
    client = Client(served.client.store, str(place))
    async with await Client.connect(served.log.admin) as admin:
        for tenant in ("acme", "other"):
            await add(client, f"{tenant}-old", "needle", tenancy=Tenancy(tenant=tenant))
        await retired(admin.store, place, folder)
        for tenant in ("acme", "other"):
            await add(client, f"{tenant}-new", "needle", tenancy=Tenancy(tenant=tenant), **LIVE)


async def test_a_key_finds_its_tenants_conversations_alone(server: Served, place: Path, tmp_path: Path) -> None:
    await fill_for_two_tenants(server, place, tmp_path)
    async with server.as_(await server.token()) as acme, server.as_(await server.token("*")) as every:
        found = await search_over_http(acme, text="NEEDLE")
        assert [(one["conversation_id"], one["is_archived"]) for one in found] == [
            ("acme-new", False),
            ("acme-old", True),
        ]
        assert found[0]["match"] == {"event_id": 5, "snippet": "needle"}
        page = (await acme.get("/search?text=needle")).json()
        assert (page["searched"], page["unreadable"]) == (2, 0), "others are not counted"
        assert await search_over_http(acme, text="needle", tenant="other") == []
        assert len(await search_over_http(every, text="needle")) == 4
        theirs = await search_over_http(every, text="needle", tenant="other", limit=1)
        assert [one["conversation_id"] for one in theirs] == ["other-new", "other-old"]
        # A cursor that names a conversation of another tenant, as its holder may make it.
        stream = await server.client.row("other-new")
        place_of_other = f"s:1:{stream.created.timestamp() * 1000:.0f}:other-new"
        for text in (place_of_other, *(f"a:1:{one}" for one in await positions(place))):
            answer = (await acme.get("/search", params={"text": "needle", "cursor": make_cursor(text)})).json()
            assert {one["conversation_id"] for one in answer["conversations"]} <= {"acme-new", "acme-old"}
        for wrong in ("cursor=!", "state=none", "label=%20", "limit=0", f"cursor={'x' * 201}"):
            assert (await acme.get(f"/search?text=needle&{wrong}")).status_code in (400, 422)
        late, other_place = make_cursor(f"s:1:{'9' * 15}:acme-new"), make_cursor("s")
        for wrong in (f"cursor={late}&limit=1", f"cursor={other_place}&place=archive"):
            assert (await acme.get(f"/search?text=needle&{wrong}")).status_code == 422
        assert (await acme.get("/search?text=")).status_code in (400, 422)
        assert (await acme.get(f"/search?text={'x' * 301}")).status_code == 422


async def positions(place: Path) -> Iterable[str]:
    index = await Archive(str(place)).listing.load(since=0, limit_seconds=60.0)
    assert index is not None
    return [position.hex() for position, _ in index.find_after(b"", 10)]


async def test_many_searches_of_a_tenant_leave_room_for_others(server: Served) -> None:
    store = Client(server.client.store)
    for number in range(5):
        await add(store, f"one-{number}", "hay", tenancy=Tenancy(tenant="acme"))
    async with server.as_(await server.token()) as acme, server.as_(await server.token("other")) as other:
        held = [await server.gateway.search_slots.acquire() for _ in range(SEARCHES_AT_ONCE)]
        many = [asyncio.create_task(acme.get("/search?text=needle")) for _ in range(3 * SEARCHES_WAITING)]
        refused = 3 * SEARCHES_WAITING - SEARCHES_WAITING - 1
        await until(lambda: sum(task.done() for task in many) >= refused, limit=60.0, what="the refusals")
        assert {task.result().json()["code"] for task in many if task.done()} == {"too_many_requests_of_tenant"}
        theirs = asyncio.create_task(other.get("/search?text=needle"))
        assert (await other.get("/conversations")).status_code == 200, "short requests do not wait for searches"
        for _ in held:
            server.gateway.search_slots.release()
        assert (await theirs).status_code == 200
        codes = [(await task).status_code for task in many]
        assert codes.count(200) == SEARCHES_WAITING + 1


def test_ls_finds_text_in_runs_the_cluster_and_the_archive(
    valkey_server: RealServer, place: Path, tmp_path: Path
) -> None:
    async def fill() -> None:
        async with await Client.connect(await emptied(valkey_server.url)) as connected:
            client = Client(connected.store, str(place))
            await add(client, "old-1", "a needle")
            await add(client, "old-2", "hay")
            await retired(client.store, place, tmp_path)
            await add(client, "new-1", "a needle", **LIVE)
            await add(client, "new-2", "hay", **LIVE)

    asyncio.run(fill())
    env = environment(tmp_path, DECKHANDS_URL=valkey_server.url, DECKHANDS_ARCHIVE=str(place))
    listed = deckhands("ls", "--text", "Needle", "--json", env=env).json
    assert [(line["conversation_id"], line["is_archived"]) for line in listed] == [("new-1", False), ("old-1", True)]
    assert listed[0]["match"] == {"event_id": 5, "snippet": "a needle"}
    shown = deckhands("ls", "--text", "needle", env=env)
    assert "new-1" in shown.out
    assert "[5] a needle" in shown.out
    archived = deckhands("ls", "--archived", "--text", "needle", "--json", env=env).json
    assert [line["conversation_id"] for line in archived] == ["old-1"]
    labelled = deckhands("ls", "--text", "needle", "--label", "keep=yes", "--json", env=env).json
    assert [line["conversation_id"] for line in labelled] == ["new-1"]
    one = deckhands("ls", "--text", "a", "-n", "1", "--json", env=env).json
    assert [line["conversation_id"] for line in one] == ["new-2"]
    none = deckhands("ls", "--text", "nowhere", env=env)
    assert (none.code, none.out, none.err) == (0, "", "None of the 4 conversations that were searched has this text.\n")
    empty = deckhands("ls", "--text", " ", env=env)
    assert (empty.code, empty.err) == (2, "deckhands: The search has no words.\n  Give at least one.\n")


async def test_ls_finds_text_in_the_archive_without_a_cluster(client: Client, place: Path, tmp_path: Path) -> None:
    await add(client, "old-1", "a needle")
    await add(client, "old-2", "hay")
    await retired(client.store, place, tmp_path)
    env = environment(tmp_path, DECKHANDS_ARCHIVE=str(place))
    for options in ([], ["--archived"]):
        done = await asyncio.to_thread(deckhands, "ls", *options, "--text", "needle", "--json", env=env)
        assert ([line["conversation_id"] for line in done.json], done.err) == (["old-1"], ""), options
    none = await asyncio.to_thread(deckhands, "ls", "--archived", "--text", "nowhere", env=env)
    assert (none.code, none.err) == (0, "None of the 2 conversations that were searched has this text.\n")
    (Home(tmp_path).cluster / "valkey").mkdir(parents=True)
    done = await asyncio.to_thread(deckhands, "ls", "--text", "needle", "--json", env=env)
    assert [line["conversation_id"] for line in done.json] == ["old-1"]
    assert done.err == "The cluster is not up, so its conversations are not searched.\n"


def test_ls_refuses_to_search_without_an_archive(tmp_path: Path) -> None:
    done = deckhands("ls", "--archived", "--text", "needle", env=environment(tmp_path))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("deckhands: There is no archive.")
