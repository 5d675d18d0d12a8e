"""Conversations that have ended leave the store for the archive, and what is there is what was here."""

from __future__ import annotations

import hashlib
import io
import json
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
from broker.coordination.stored_files import StoredFiles
from broker.limits.ledger import Ledger, list_accounts
from broker.runtime.errors import UsageError
from deckhands.client.archive.archive import Archive
from deckhands.client.archive.archived_file import Manifest
from deckhands.client.archive.errors import ArchiveUnavailable
from deckhands.client.archive.retention import Retention
from deckhands.client.client import Client
from deckhands.client.reading.spending import compute_spending
from deckhands.operations.jobs.orphans import remove_orphans, sweep_store
from deckhands.operations.jobs.retiring import _RetirementRun
from tests.archive_parts import LONG_TEXT, begin_ended, delegate_ended, retired, services
from tests.stores import RealServer, emptied


@pytest.fixture
async def client(valkey_server: RealServer) -> AsyncIterator[Client]:
    async with await Client.connect(await emptied(valkey_server.url)) as client:
        yield client


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "archive"


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
    assert (await retired(client.store, place, tmp_path, everything)) == {
        "archived": 2,
        "deleted": 0,
        "kept": 1,
        "failed": 0,
    }
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
    assert await Client(client.store, place).restore("one-of-us")
    assert await ledger.list_conversation_ids("tenant:acme") == ["one-of-us"]
    await ledger.settle(owner, accounts, total_usd=total + 1.0)
    assert [(await ledger.load_account(name)).spent_usd for name in accounts] == pytest.approx([total + 1.0] * 3)


async def test_budget_includes_delegates_of_restored_conversations(client, place, tmp_path) -> None:
    ledger, tenancy = Ledger(client.store), Tenancy(tenant="acme")
    await begin_ended(client, "parent", delegate_ended("child", cost_usd=2.0), tenancy=tenancy)
    total = compute_spending(await client.events("parent")).spent_usd
    await retired(client.store, place, tmp_path)
    assert await Client(client.store, place).restore("parent")
    assert (await ledger.load_account("conversation:parent")).spent_usd == pytest.approx(total + 2.0)
    assert (await ledger.load_account("tenant:acme")).spent_usd == 0.0  # which has been charged for it before


@pytest.mark.parametrize("cost_usd", [float("nan"), float("inf"), -1.0, 1e300])
async def test_log_with_invalid_costs_is_not_restored(client, place, tmp_path, cost_usd) -> None:
    await begin_ended(client, "parent", delegate_ended("child", cost_usd=cost_usd), tenancy=Tenancy(tenant="acme"))
    assert (await retired(client.store, place, tmp_path))["archived"] == 1
    with pytest.raises(UsageError, match="costs"):
        await Client(client.store, place).restore("parent")
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
    assert interrupted.done["archived"] == 1  # the other conversation: the tree holds up nobody
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


async def test_what_a_workspace_began_with_is_kept(client, place, tmp_path) -> None:
    content = b"a tar file " * 1000
    name = await StoredFiles(client.store).keep("uploads", content)
    source = UploadedSource(name="a.tar", format="tar", parcel=name)
    await begin_ended(client, "uploads", workspace={"source": source.model_dump()})
    assert (await retired(client.store, place, tmp_path))["archived"] == 1
    assert await Archive(str(place)).upload("uploads", name) == content
    assert await keys_of(client) == []


async def test_what_cannot_be_archived_stays(client, place, tmp_path, caplog) -> None:
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
    names, call = client.store.keys("gone-before"), client.store.connection.call
    await call("SET", names.blob("0" * 64), "a text whose event was never appended")
    await call("HSET", names.once, "key", "1")
    count = len(await keys_of(client))
    bench = services(client.store, place, "", tmp_path)
    assert (await remove_orphans(bench))["removed"] == 0
    assert (await sweep_store(client.store, 0)) == {"removed": 2, "completed": 0}
    assert len(await keys_of(client)) == count - 2


async def test_store_without_idle_times_keeps_its_orphans(client, caplog) -> None:
    call = client.store.connection.call
    await call("SET", client.store.keys("gone-before").blob("0" * 64), "a text whose event was never appended")
    await call("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    try:
        assert (await sweep_store(client.store, 0)) == {"removed": 0, "completed": 0}
    finally:
        await call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert "maxmemory-policy noeviction" in caplog.text


async def test_a_deletion_that_was_interrupted_is_completed(client, place, tmp_path) -> None:
    await begin_ended(client, "parent", delegate_ended("child"))
    await begin_ended(client, "child", parent=Parent(conversation_id="parent", delegate_id=2))
    names = client.store.keys("parent")
    last_id = await client.log.load_last_id("parent")
    begun = await client.store.call_function("deck_begin_deletion", (names.root, names.shard.root), "parent", last_id)
    assert begun == ["begun"]
    assert await remove_orphans(services(client.store, place, "", tmp_path)) == {"removed": 0, "completed": 1}
    assert await keys_of(client) == []
