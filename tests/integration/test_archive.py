"""Conversations that have ended leave the store for the archive, are read and listed there, and come back."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import zipfile
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from broker.contract.events import Parent
from broker.contract.fencing import Ownership
from broker.contract.specs import Tenancy
from broker.contract.workspace_sources import UploadedSource
from broker.coordination.transfers import StoredFiles
from broker.limits.ledger import Ledger, list_accounts
from broker.log.invariants import find_violations
from broker.runtime.errors import UnknownConversation, UsageError
from deckhands.client.archive.archive import Archive
from deckhands.client.archive.archived_file import Manifest
from deckhands.client.archive.retention import Retention
from deckhands.client.archive.storage import ArchiveUnavailable
from deckhands.client.client import Client
from deckhands.client.deleting import QUESTION_LABELS, delete_left_questions
from deckhands.client.errors import IsArchived, IsBeingDeleted
from deckhands.client.reading.metrics import compute_spending
from deckhands.operations.jobs.cleanup import remove_orphans, sweep_store
from deckhands.operations.jobs.retiring import _RetirementRun
from tests.archive_parts import LONG_TEXT, begin_ended, delegate_ended, retired, services
from tests.faults.harness import FaultCluster, steps
from tests.ingress_parts import Producer
from tests.integration.command_line import Done, deckhands
from tests.polling import until
from tests.stores import RealServer, emptied
from tests.unit.deckhands.sample_log import state


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
async def client(valkey_server: RealServer, place: Path) -> AsyncIterator[Client]:
    async with await Client.connect(await emptied(valkey_server.url)) as connected:
        yield Client(connected.store, str(place))


async def keys_of(client: Client, name: str = "") -> list[bytes]:
    return await client.store.connection.call("KEYS", f"deck:*:c:{name}*")


def files(place: Path) -> dict[str, Path]:
    return {path.stem: path for path in place.rglob("*.zip")}


async def test_the_archived_log_is_the_log(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us", labels={"team": "ci"})
    before = await client.events("one-of-us", is_whole=True)
    assert await retired(client.store, place, tmp_path) == {"archived": 1, "deleted": 0, "kept": 0, "failed": 0}
    assert await keys_of(client) == []
    archive = Archive(str(place))
    assert await archive.events("one-of-us", is_whole=True) == before
    assert await archive.events("one-of-us", after=3, is_whole=True) == before[3:]
    manifest = await archive.manifest("one-of-us")
    assert (manifest.state, manifest.labels, manifest.last_event_id) == ("finished", {"team": "ci"}, len(before))
    assert await archive.events("another") is None


async def test_the_file_is_read_without_deckhands(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    await retired(client.store, place, tmp_path)
    with zipfile.ZipFile(files(place)["one-of-us"]) as found:
        manifest = json.loads(found.read("manifest.json"))
        for name, member in manifest["members"].items():
            content = found.read(name)
            assert (len(content), hashlib.sha256(content).hexdigest()) == (member["bytes"], member["sha256"])
        events = [json.loads(line) for line in found.read("events.jsonl").splitlines()]
        (reference,) = [event["blobs"]["content"] for event in events if "blobs" in event]
        assert found.read(f"blobs/{reference['sha256']}").decode() == LONG_TEXT
        assert json.loads(found.read("summary.json"))["state"] == "finished"
    assert [event["id"] for event in events] == [*range(1, len(events) + 1)]
    assert {path.stat().st_mode & 0o77 for path in [*place.rglob("*")]} == {0}


async def test_only_what_is_meant_and_old_enough_and_rests_goes(client, place, tmp_path) -> None:
    await begin_ended(client, "old-acme", tenancy=Tenancy(tenant="acme"))
    await begin_ended(client, "old-kept", tenancy=Tenancy(tenant="acme"), labels={"keep": "yes"})
    await begin_ended(client, "old-other")
    await begin_ended(client, "old-awake")
    await client.send_message("old-awake", "Continue.")
    rules = """
        [[rule]]
        labels = {keep = "yes"}
        age = "never"
        [[rule]]
        tenant = "acme"
        age = "0s"
        [[rule]]
        age = "1d"
    """
    assert (await retired(client.store, place, tmp_path, rules))["archived"] == 1
    assert [*files(place)] == ["old-acme"]
    clock = client.store.clock
    assert clock.now() - (await client.row("old-other")).updated < timedelta(days=1)
    everything = '[[rule]]\nage = "0s"'
    done = {"archived": 2, "deleted": 0, "kept": 1, "failed": 0}
    assert await retired(client.store, place, tmp_path, everything) == done
    assert [row.conversation_id for row in await client.recent()] == ["old-awake"]


async def test_budget_charges_restored_conversations_only_for_new_events(client, place, tmp_path) -> None:
    ledger, tenancy = Ledger(client.store), Tenancy(tenant="acme", experiment="swe")
    accounts = list_accounts("one-of-us", tenant="acme", experiment="swe")
    await begin_ended(client, "one-of-us", tenancy=tenancy)
    total = compute_spending(await client.events("one-of-us")).spent_usd
    assert total > 0
    owner = Ownership("one-of-us", "w", "1")
    await ledger.settle(owner, accounts, total_usd=total)
    assert (await retired(client.store, place, tmp_path))["archived"] == 1
    assert await client.store.connection.call("KEYS", "*budget:conversation*") == []
    assert await ledger.list_conversation_ids("tenant:acme") == []
    assert (await ledger.load_account("tenant:acme")).spent_usd == pytest.approx(total)
    assert await client.restore("one-of-us")
    assert await ledger.list_conversation_ids("tenant:acme") == ["one-of-us"]
    await ledger.settle(owner, accounts, total_usd=total + 1.0)
    assert [(await ledger.load_account(name)).spent_usd for name in accounts] == pytest.approx([total + 1.0] * 3)


async def test_budget_includes_delegates_of_restored_conversations(client, place, tmp_path) -> None:
    ledger, tenancy = Ledger(client.store), Tenancy(tenant="acme")
    await begin_ended(client, "parent", delegate_ended("child", cost_usd=2.0), tenancy=tenancy)
    total = compute_spending(await client.events("parent")).spent_usd
    await retired(client.store, place, tmp_path)
    assert await client.restore("parent")
    assert (await ledger.load_account("conversation:parent")).spent_usd == pytest.approx(total + 2.0)
    assert (await ledger.load_account("tenant:acme")).spent_usd == 0.0  # which has been charged for it before


@pytest.mark.parametrize("cost_usd", [float("nan"), float("inf"), -1.0, 1e300])
async def test_log_with_invalid_costs_is_not_restored(client, place, tmp_path, cost_usd) -> None:
    await begin_ended(client, "parent", delegate_ended("child", cost_usd=cost_usd), tenancy=Tenancy(tenant="acme"))
    assert (await retired(client.store, place, tmp_path))["archived"] == 1
    with pytest.raises(UsageError, match="costs"):
        await client.restore("parent")
    assert await keys_of(client) == []


async def test_delegates_go_with_their_parents(client, place, tmp_path) -> None:
    parent = Parent(conversation_id="parent", delegate_id=2)
    await begin_ended(client, "child", delegate_ended("grandchild"), parent=parent)
    await begin_ended(client, "grandchild", parent=Parent(conversation_id="child", delegate_id=2))
    await begin_ended(client, "parent", delegate_ended("child"), labels={"keep": "yes"})
    keep = '[[rule]]\nlabels = {keep = "yes"}\nage = "never"\n[[rule]]\nage = "0s"'
    assert (await retired(client.store, place, tmp_path, keep))["kept"] == 3
    assert (await retired(client.store, place, tmp_path))["archived"] == 1
    assert {*files(place)} == {"parent", "child", "grandchild"}
    assert await keys_of(client) == []
    assert (await Archive(str(place)).manifest("parent")).delegates == ("child",)


class Interrupted(Archive):
    """An archive behind whose back a delegate continues when its whole tree has been saved."""

    def __init__(self, url: str, client: Client) -> None:
        super().__init__(url)
        self._client = client

    async def save(self, *arguments: Any, **options: Any) -> Manifest:
        found = await super().save(*arguments, **options)
        if found.conversation_id == "parent":
            await self._client.send_message("one", "Continue.")
        return found


async def test_delegate_that_continues_during_archiving_stays_whole(client, place, tmp_path) -> None:
    for name in ("one", "two"):
        await begin_ended(client, name, parent=Parent(conversation_id="parent", delegate_id=2))
    await begin_ended(client, "parent", delegate_ended("one"), delegate_ended("two"))
    await begin_ended(client, "later")
    log = await client.events("one", is_whole=True)
    settings = services(client.store, place, '[[rule]]\nage = "0s"', tmp_path).settings
    retention = Retention.of_setting(settings.retention)
    interrupted = _RetirementRun(client.store, retention, Interrupted(str(place), client), "")
    await interrupted.run()
    assert interrupted.done["archived"] == 1  # the other conversation: the tree delays no other
    found = await client.events("one", is_whole=True)
    assert (found[:-1], len(found)) == (log, len(log) + 1)
    assert not (await client.row("parent")).is_closed
    assert await retired(client.store, place, tmp_path) == {"archived": 0, "deleted": 1, "kept": 2, "failed": 0}
    assert await keys_of(client, "two") == []


async def test_a_parent_with_a_delegate_that_works_stays(client, place, tmp_path) -> None:
    await begin_ended(client, "child", parent=Parent(conversation_id="parent", delegate_id=2))
    await begin_ended(client, "parent", delegate_ended("child"))
    await client.send_message("child", "Continue.")
    assert (await retired(client.store, place, tmp_path))["archived"] == 0
    assert files(place) == {}


async def test_initial_files_of_a_workspace_are_kept(client, place, tmp_path) -> None:
    content = b"a tar file " * 1000
    name = await StoredFiles(client.store).keep("uploads", content)
    source = UploadedSource(name="a.tar", format="tar", parcel=name)
    await begin_ended(client, "uploads", workspace={"source": source.model_dump()})
    assert (await retired(client.store, place, tmp_path))["archived"] == 1
    assert await Archive(str(place)).upload("uploads", name) == content
    assert await keys_of(client) == []


async def test_unarchivable_conversation_stays(client, place, tmp_path, caplog) -> None:
    await begin_ended(client, "torn")
    await begin_ended(client, "whole")
    (blob,) = await keys_of(client, "torn:blob")
    await client.store.connection.call("DEL", blob)
    assert await retired(client.store, place, tmp_path) == {"archived": 1, "deleted": 0, "kept": 0, "failed": 1}
    assert "torn stays in the store: Event 2 of torn" in caplog.text
    assert (await client.row("torn")).state == "finished"


async def test_a_file_sealed_with_another_key_keeps_only_its_conversation(client, place, tmp_path, caplog) -> None:
    name = await StoredFiles(client.store, lambda: b"k" * 32).keep("sealed", b"a tar file")
    source = UploadedSource(name="a.tar", format="tar", parcel=name)
    await begin_ended(client, "sealed", workspace={"source": source.model_dump()})
    await begin_ended(client, "whole")
    assert await retired(client.store, place, tmp_path) == {"archived": 1, "deleted": 0, "kept": 0, "failed": 1}
    assert "sealed stays in the store: The file was sealed with another key" in caplog.text


async def test_another_conversation_of_the_same_id_is_not_replaced(client, place, tmp_path, caplog) -> None:
    await begin_ended(client, "again")
    await retired(client.store, place, tmp_path)
    before = files(place)["again"].read_bytes()
    await begin_ended(client, "again")
    assert (await retired(client.store, place, tmp_path))["failed"] == 1
    assert "holds another conversation of this id" in caplog.text
    assert files(place)["again"].read_bytes() == before


async def test_without_an_archive_rules_delete_with_a_warning(client, tmp_path, caplog) -> None:
    await begin_ended(client, "one-of-us")
    assert (await retired(client.store, "", tmp_path))["kept"] == 1
    assert "nothing leaves the store" in caplog.text
    assert (await retired(client.store, "", tmp_path, '[[rule]]\nage = "0s"\nthen = "delete"'))["deleted"] == 1
    assert "deletes conversations permanently, without an archive" in caplog.text
    assert await keys_of(client) == []


async def test_an_archive_that_is_away_takes_nothing_from_the_store(client, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ArchiveUnavailable, match="DECKHANDS_ARCHIVE") as caught:
        await retired(client.store, tmp_path / "file" / "archive", tmp_path)
    assert caught.value.retryable
    assert (await client.row("one-of-us")).is_closed is False


class Worn(MemoryFileSystem):
    """A place that returns one byte of a file differently from how it was written."""

    protocol = "worn"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, **options)
        content = bytearray(self.store[self._strip_protocol(path)].getvalue())
        content[100] ^= 1  # in the log
        return io.BytesIO(content)


async def test_file_that_reads_back_differently_deletes_nothing(client, tmp_path, caplog) -> None:
    fsspec.register_implementation("worn", Worn, clobber=True)
    await begin_ended(client, "one-of-us")
    count = len(await keys_of(client))
    assert (await retired(client.store, "worn://archive", tmp_path))["failed"] == 1
    assert "one-of-us stays in the store" in caplog.text
    assert len(await keys_of(client)) == count


async def test_any_place_of_fsspec_will_do(client, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    assert (await retired(client.store, "memory://deckhands/archive", tmp_path))["archived"] == 1
    archive = Archive("memory://deckhands/archive")
    assert (await archive.manifest("one-of-us")).title == "Title of one-of-us"
    assert await archive.remove("one-of-us")
    assert not await archive.remove("one-of-us")


async def test_keys_that_nothing_names_are_removed_and_others_not(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    names, call = client.store.known_keys("gone-before"), client.store.connection.call
    await call("SET", names.blob("0" * 64), "a text whose event was never appended")
    await call("HSET", names.once, "key", "1")
    count = len(await keys_of(client))
    bench = services(client.store, place, "", tmp_path)
    assert (await remove_orphans(bench))["removed"] == 0
    assert (await sweep_store(client.store, 0)) == {"removed": 2, "completed": 0}
    assert len(await keys_of(client)) == count - 2


async def test_store_without_idle_times_keeps_its_orphans(client, caplog) -> None:
    call = client.store.connection.call
    await call("SET", client.store.known_keys("gone-before").blob("0" * 64), "a text whose event was never appended")
    await call("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    try:
        assert (await sweep_store(client.store, 0)) == {"removed": 0, "completed": 0}
    finally:
        await call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert "maxmemory-policy noeviction" in caplog.text


async def test_a_deletion_that_was_interrupted_is_completed(client, place, tmp_path) -> None:
    await begin_ended(client, "parent", delegate_ended("child"))
    await begin_ended(client, "child", parent=Parent(conversation_id="parent", delegate_id=2))
    names = client.store.known_keys("parent")
    last_id = await client.log.load_last_id("parent")
    begun = await client.store.call_function("deck_begin_deletion", (names.root, names.shard.root), "parent", last_id)
    assert begun == ["begun"]
    assert await remove_orphans(services(client.store, place, "", tmp_path)) == {"removed": 0, "completed": 1}
    assert await keys_of(client) == []


async def test_the_client_reads_it_as_if_it_were_there(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    events, summary = await client.events("one-of-us", is_whole=True), await client.summary("one-of-us")
    await retired(client.store, place, tmp_path)
    assert await client.events("one-of-us", is_whole=True) == events
    assert [event async for event in client.tail("one-of-us", after=2, is_whole=True)] == events[2:]
    assert await client.summary("one-of-us") == summary
    assert await client.wait_until_settled("one-of-us", timeout_seconds=30) == summary
    with pytest.raises(IsArchived, match="`deckhands restore one-of-us` brings it back"):
        await client.send_message("one-of-us", "Continue.")
    with pytest.raises(UnknownConversation):
        await client.events("another")


async def test_one_that_is_half_deleted_is_read_from_the_archive(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    events = await client.events("one-of-us", is_whole=True)
    assert client.archive is not None
    await client.archive.save(client.store, await client.events("one-of-us"))
    names = client.store.known_keys("one-of-us")
    await client.store.call_function("deck_begin_deletion", (names.root, names.shard.root), "one-of-us", events[-1].id)
    await client.store.connection.call("DEL", await blob_of(client, "one-of-us"))
    assert await client.events("one-of-us", is_whole=True) == events
    with pytest.raises(IsBeingDeleted):
        await client.restore("one-of-us")
    assert (await retired(client.store, place, tmp_path))["deleted"] == 1
    assert await client.restore("one-of-us")


async def blob_of(client: Client, name: str) -> bytes:
    (found,) = await keys_of(client, f"{name}:blob:")
    return found


async def test_it_comes_back_and_may_leave_again(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us", labels={"team": "ci"})
    events = await client.events("one-of-us", is_whole=True)
    assert await client.restore("one-of-us") is False
    await retired(client.store, place, tmp_path)
    assert [await client.restore("one-of-us") for _ in range(2)] == [True, False]
    assert await client.events("one-of-us", is_whole=True) == events
    row = await client.row("one-of-us")
    assert (row.state, row.labels, row.is_closed) == ("finished", {"team": "ci"}, False)
    assert row.title == "Title of one-of-us"
    await client.send_message("one-of-us", "One more thing.")
    await client.cancel("one-of-us")
    longer = await client.events("one-of-us")
    assert len(longer) == len(events) + 2
    with pytest.raises(UnknownConversation):
        await client.restore("another")


async def test_a_delegate_is_read_and_comes_back_with_nobody(client, place, tmp_path) -> None:
    await begin_ended(client, "parent", delegate_ended("child"))
    await begin_ended(client, "child", parent=Parent(conversation_id="parent", delegate_id=2))
    await retired(client.store, place, tmp_path)
    assert (await client.summary("child")).state == "finished"
    with pytest.raises(UsageError, match="Restore the parent"):
        await client.restore("child")
    assert await client.restore("parent")
    await client.delete("parent")
    assert [await client.is_archived(name) for name in ("parent", "child")] == [False, False]


async def test_fork_of_an_archived_conversation_has_events_and_upload(client, place, tmp_path) -> None:
    name = await StoredFiles(client.store).keep("uploads", b"a tar file")
    source = UploadedSource(name="a.tar", format="tar", parcel=name)
    await begin_ended(client, "uploads", workspace={"source": source.model_dump()})
    events = await client.events("uploads", is_whole=True)
    await retired(client.store, place, tmp_path)
    fork = await client.fork("uploads", at=5)
    assert [event.kind for event in await client.events(fork)] == [event.kind for event in events[:5]]
    assert await StoredFiles(client.store).fetch(fork, name) == b"a tar file"
    with pytest.raises(UsageError):
        await client.fork("uploads", at=500)


async def test_deleting_reaches_the_archive(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us")
    await retired(client.store, place, tmp_path)
    await client.delete("one-of-us")
    assert not [*place.rglob("*.zip")]
    with pytest.raises(UnknownConversation):
        await client.delete("one-of-us")


async def test_deleting_keeps_the_file_of_another_tenant(client, place, tmp_path) -> None:
    await begin_ended(client, "one-of-us", tenancy=Tenancy(tenant="acme"))
    await retired(client.store, place, tmp_path)
    await begin_ended(client, "one-of-us", tenancy=Tenancy(tenant="other"))
    await client.delete("one-of-us")
    assert set(files(place)) == {"one-of-us"}


async def test_abandoned_fork_of_a_question_is_deleted(client, place, tmp_path) -> None:
    await begin_ended(client, "question-old", labels=QUESTION_LABELS)
    await begin_ended(client, "a-label-only", labels=QUESTION_LABELS)
    log, now = client.log, client.store.clock.now()
    assert await delete_left_questions(log, before=now - timedelta(hours=1)) == 0
    assert await delete_left_questions(log, before=now + timedelta(hours=1)) == 1
    assert [row.conversation_id for row in await client.recent()] == ["a-label-only"]


async def test_the_command_line_reads_it_too(client, place, tmp_path, valkey_server) -> None:
    await begin_ended(client, "one-of-us")
    env = {"DECKHANDS_URL": valkey_server.url, "DECKHANDS_HOME": str(tmp_path), "DECKHANDS_ARCHIVE": str(place)}
    verbs = [
        ("show", "one-of-us"),
        ("show", "one-of-us@4"),
        ("logs", "one-of-us"),
        ("logs", "-f", "one-of-us"),
        ("export", "one-of-us"),
    ]

    async def said() -> list[tuple[int, str]]:
        done = [await asyncio.to_thread(deckhands, *verb, env=env) for verb in verbs]
        return [(one.code, one.out) for one in done]

    before = await said()
    await retired(client.store, place, tmp_path)
    assert await said() == before
    refused = await asyncio.to_thread(deckhands, "message", "one-of-us", "Continue.", env=env)
    assert (refused.code, "is archived" in refused.err, "deckhands restore one-of-us" in refused.err) == (2, True, True)
    forked = await asyncio.to_thread(deckhands, "fork", "one-of-us@5", "--json", env=env)
    assert json.loads(forked.out)["forked_from"] == "one-of-us"
    twice = [await asyncio.to_thread(deckhands, "restore", "one-of-us", "--json", env=env) for _ in range(2)]
    assert [json.loads(one.out)["restored"] for one in twice] == [True, False]
    gone = await asyncio.to_thread(deckhands, "rm", "one-of-us", env=env)
    assert (gone.code, [*place.rglob("*.zip")]) == (0, [])


LABELS = {"first": {"team": "ci"}, "second": {"team": "docs", "run": "7"}, "third": {"team": "docs"}}


@pytest.fixture
async def three_archived(client: Client, place: Path, tmp_path: Path) -> None:
    """Three conversations that have left the store, one after the other; the last one was stopped."""
    for number, name in enumerate(LABELS):
        await begin_ended(client, name, labels=LABELS[name])
        if name == "third":
            await client.log.append(name, [state("stopped")])
        await retired(client.store, place, tmp_path)
        os.utime(files(place)[name], (number, number))


async def listed(place: Path, *options: str) -> Done:
    """List what is archived, where no store can be reached."""
    env = {"DECKHANDS_URL": "redis://127.0.0.1:1", "DECKHANDS_HOME": str(place.parent), "DECKHANDS_ARCHIVE": str(place)}
    return await asyncio.to_thread(deckhands, "ls", "--archived", *options, env=env)


def ids(done: Done) -> list[str]:
    assert done.code == 0, done.err
    return [json.loads(line)["conversation_id"] for line in done.out.splitlines()]


@pytest.mark.usefixtures("three_archived")
async def test_archived_conversations_are_listed_with_the_filters_of_all(place: Path) -> None:
    assert ids(await listed(place, "--json")) == ["third", "second", "first"]
    assert ids(await listed(place, "--json", "--all", "--label", "team=docs")) == ["third", "second"]
    assert ids(await listed(place, "--json", "--label", "team=docs", "--label", "run=7")) == ["second"]
    assert ids(await listed(place, "--json", "--state", "stopped")) == ["third"]
    assert ids(await listed(place, "--json", "-n", "1", "--state", "finished")) == ["second"]
    fields = json.loads((await listed(place, "--json", "--state", "stopped")).out)
    assert (fields["is_archived"], fields["is_run"], fields["labels"]) == (True, False, {"team": "docs"})
    assert (fields["title"], fields["iterations"]) == ("Title of third", 1)
    table = await listed(place)
    assert "archive" in table.out
    assert "3 conversations: 2 finished, 1 stopped; 3 steps" in table.out
    none = await listed(place, "--label", "team=ops")
    assert "None of 3 archived conversations has the label team=ops." in none.err


@pytest.mark.usefixtures("three_archived")
async def test_a_damaged_file_is_named_and_hides_no_other(place: Path) -> None:
    files(place)["second"].write_bytes(b"no archive")
    for name in ("x.zip", "notes.txt", ".third.zip.part"):
        (place / name).write_text("somebody else's")
    done = await listed(place, "--json")
    assert ids(done) == ["third", "first"]
    assert "second" in done.err


@pytest.mark.usefixtures("three_archived")
async def test_the_client_lists_it_too(client: Client, place: Path) -> None:
    found = [one async for one in client.list_archived(labels={"team": "docs"})]
    assert [one.conversation_id for one in found] == ["third", "second"]
    assert (found[0].state, found[0].title, found[0].labels) == ("stopped", "Title of third", {"team": "docs"})
    assert [one.conversation_id async for one in client.list_archived(states=["finished"])] == ["second", "first"]
    assert [one async for one in Client(client.store).list_archived()] == []
    files(place)["first"].write_bytes(b"no archive")
    assert [one.conversation_id async for one in client.list_archived()] == ["third", "second"]


async def test_without_an_archive_the_setting_is_named(tmp_path: Path) -> None:
    env = {"DECKHANDS_HOME": str(tmp_path), "DECKHANDS_ARCHIVE": ""}
    done = await asyncio.to_thread(deckhands, "ls", "--archived", env=env)
    assert (done.code, "DECKHANDS_ARCHIVE" in done.err) == (2, True)
    env["DECKHANDS_ARCHIVE"] = str(tmp_path / "not-yet")
    done = await asyncio.to_thread(deckhands, "ls", "--archived", env=env)
    assert (done.code, "The archive is empty." in done.err) == (0, True)


LIMIT_SECONDS = 90.0
AGAIN = {"tool_calls": [{"name": "finish", "arguments": {"message": "done again"}}]}


async def test_an_agent_continues_where_it_was_archived(tmp_path: Path) -> None:
    place, rules = tmp_path / "archive", tmp_path / "retention.toml"
    rules.write_text('[[rule]]\nlabels = {keep = "no"}\nage = "0s"\n[[rule]]\nage = "0s"\n')
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller(DECKHANDS_IDLE_SECONDS="0.1")
        cluster.start_tool()
        cluster.start_jobs(DECKHANDS_ARCHIVE=str(place), DECKHANDS_RETENTION=str(rules))
        client, producer = Client(cluster.client.store, str(place)), Producer(cluster)
        (name,) = await cluster.submit([*steps(1), AGAIN])
        before = await client.wait_until_settled(name, timeout_seconds=LIMIT_SECONDS)
        events = await client.events(name, is_whole=True)

        async def is_gone() -> bool:
            producer.app.send_task("deckhands.jobs.retire", queue="deckhands.jobs", ignore_result=True)
            return not await client.recent()

        await until(is_gone, limit=LIMIT_SECONDS, what="an empty store")
        assert await Archive(str(place)).read_checked(name) == events
        assert await client.summary(name) == before
        rules.write_text("")  # restored files stay
        fork = await client.fork(name)
        assert await client.restore(name)
        for conversation_id in (name, fork):
            await client.send_message(conversation_id, "Once more.")
            summary = await client.wait_until_settled(conversation_id, timeout_seconds=LIMIT_SECONDS)
            assert (summary.state, summary.message) == ("finished", "done again")
            log = await client.events(conversation_id)
            assert not find_violations(log, conversation_id=conversation_id)
        assert (await client.events(name, is_whole=True))[: len(events)] == events
        assert cluster.effects(name) == ["begin-0", "end-0"]
        producer.close()
