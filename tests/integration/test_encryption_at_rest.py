"""Clusters whose store is searched for planted texts: in its append-only file, its snapshot, and what lies beside it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable
from pathlib import Path

import pytest

from broker.contract.events import AgentSpec, LLMSpec, WorkspaceSpec
from broker.contract.specs import Tenancy
from broker.runtime.errors import DataLocked
from tests.faults.harness import FaultCluster, steps
from tests.integration.command_line import deckhands
from tests.server_parts import served_with_workers
from tests.turns import bash, finish, script

KEYS = f"one:{base64.b64encode(bytes(range(32))).decode()}"
SECRET_KEY = base64.b64encode(bytes(range(2, 34))).decode()
TASK, OUTPUT, REPLY, LONG, FILE = (f"planted-{name}-4711" for name in ("task", "output", "reply", "long", "file"))
VALUE = "planted-secret-4711"


def find_planted(folder: Path, texts: Iterable[str]) -> set[str]:
    """Return the texts that any file below a folder contains."""
    contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return {text for text in texts if any(text.encode() in content for content in contents)}


async def save_snapshot(cluster: FaultCluster) -> None:
    """Write the store's snapshot beside its append-only file, uncompressed."""
    call = cluster.client.store.connection.call
    await call("CONFIG", "SET", "rdbcompression", "no")
    await call("SAVE")


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_store_files_hold_planted_texts_only_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    variables = {"DECKHANDS_SECRET_KEY": SECRET_KEY} | ({"DECKHANDS_MASTER_KEYS": KEYS} if is_encrypted else {})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path / "home"))
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start(**variables, DECKHANDS_CHECKPOINTS=f"file://{tmp_path}/checkpoints")
        # Commands put texts together, so that only their output and their files contain them whole.
        turns = [
            {
                "text": REPLY,
                **bash(f"printf '%s-4711\\n' planted-output; printf '%s-4711\\n' planted-file > {FILE[:12]}"),
            },
            bash("for n in $(seq 4000); do printf '%s-4711 ' planted-long; done"),
            bash('echo "$TOKEN" | head -c 4'),
            finish("done"),
        ]
        cid = await cluster.client.submit(
            TASK,
            agent=AgentSpec(llm=LLMSpec(model=cluster.script(*turns)), enable_workspace_skills=False),
            workspace=WorkspaceSpec(sandbox="none"),
            tenancy=Tenancy(tenant="acme"),
            secrets={"TOKEN": VALUE},
        )
        await cluster.settle([cid])
        events = await cluster.client.events(cid, is_whole=True)
        text = " ".join(event.model_dump_json() for event in events)
        assert all(planted in text for planted in (TASK, OUTPUT, REPLY, LONG))
        assert (await cluster.client.verify(cid)).violations == ()
        await save_snapshot(cluster)
        names = {path.name for path in (tmp_path / "valkey").rglob("*") if path.is_file()}
        assert "dump.rdb" in names
        assert any(name.endswith(".aof") for name in names)
        found = find_planted(tmp_path / "valkey", (TASK, OUTPUT, REPLY, LONG, FILE, VALUE))
        places = find_planted(tmp_path / "checkpoints", (FILE[:12],))
        if is_encrypted:
            assert found == set()
            assert places == set()
            assert (await cluster.client.row(cid)).title == TASK
        else:
            assert {TASK} <= found
            assert VALUE not in found


async def test_files_fetched_through_the_server_leave_nothing_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in a store whose texts are not encrypted."""
    monkeypatch.setenv("DECKHANDS_SECRET_KEY", SECRET_KEY)
    async with served_with_workers(tmp_path, DECKHANDS_SECRET_KEY=SECRET_KEY) as found:
        key = await found.token("acme")
        turns = [
            bash("printf 'planted-%s-4711' file > kept.txt; printf 'planted-%s-4711' secret >> kept.txt"),
            finish(),
        ]
        model = script(tmp_path / "script.json", *turns)
        async with found.as_(key) as client:
            task = {"task": "Write it.", "model": model, "workspace": {"sandbox": "none"}}
            created = await client.post("/conversations", json=task)
            assert created.status_code == 201, created.text
            place = created.headers["location"]

            await found.client.wait_until_settled(place.rpartition("/")[2])
            fetched = await client.get(f"{place}/files/kept.txt")
            assert fetched.text == FILE + VALUE
            stored = await client.put(f"{place}/files/put.txt", content=f"{FILE} put".encode())
            assert stored.status_code < 300, stored.text
            assert (await client.get(f"{place}/patch")).status_code in (200, 404, 409)
            assert (await client.get(f"{place}/files")).status_code == 200
        assert list((tmp_path / "log").rglob("*.aof"))
        assert find_planted(tmp_path / "log", (FILE, VALUE)) == set()


async def test_keys_are_listed_rotated_and_deleted_by_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "master.keys"
    file.write_text(f"{KEYS}\n")
    monkeypatch.setenv("DECKHANDS_MASTER_KEYS_FILE", str(file))
    async with FaultCluster(tmp_path).running() as cluster:
        env = {"DECKHANDS_URL": cluster.store.url, "DECKHANDS_MASTER_KEYS_FILE": str(file), "HOME": str(tmp_path)}

        async def command(*arguments: str) -> tuple[int, str]:
            done = await asyncio.to_thread(deckhands, *arguments, env=env)
            return done.code, done.out + done.err

        code, text = await command("encryption", "ls")
        assert (code, "No conversation is encrypted" in text) == (0, True), text
        cid = await cluster.client.submit("Hello.", tenancy=Tenancy(tenant="acme"), agent=AgentSpec())
        code, text = await command("encryption", "ls")
        assert (code, "acme" in text, "one" in text) == (0, True, True), text
        new = KEYS.replace("one:A", "two:B")
        file.write_text(f"{new}\n{KEYS}\n")
        code, text = await command("doctor")
        assert "1 data key of 1 not under the first master key" in " ".join(text.split()), text
        code, text = await command("encryption", "rotate")
        assert (code, "1 data key changed to the master key two" in text) == (0, True), text
        code, text = await command("logs", cid)
        assert (code, "Hello." in text) == (0, True), text
        code, text = await command("encryption", "forget", "acme", "--yes")
        assert (code, "is deleted" in text) == (0, True), text
        code, text = await command("logs", cid)
        assert (code, "was deleted" in text) == (1, True), text
        code, text = await command("encryption", "forget", "acme", "--yes")
        assert (code, "no data key of the tenant acme" in text) == (2, True), text
        await cluster.client.submit("Again.", tenancy=Tenancy(tenant="acme"), agent=AgentSpec())
        env.pop("DECKHANDS_MASTER_KEYS_FILE")
        code, text = await command("doctor")
        assert "1 data key of 1 under master keys that are not set here: two" in " ".join(text.split()), text
        code, text = await command("submit", "-t", "more", "--model", "scripted/x")
        assert (code, "DECKHANDS_MASTER_KEYS_FILE" in text) == (1, True), text


async def test_deleted_key_stops_a_conversation_at_work_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_MASTER_KEYS", KEYS)
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start(DECKHANDS_MASTER_KEYS=KEYS)
        (doomed,) = await cluster.submit(steps(40, seconds=0.2), tenancy=Tenancy(tenant="acme"))
        (other,) = await cluster.submit(steps(6, seconds=0.2), tenancy=Tenancy(tenant="shop"))
        await cluster.until(lambda: all("end-1" in cluster.effects(cid) for cid in (doomed, other)))
        last_id = await cluster.client.log.load_last_id(doomed)
        assert await cluster.client.store.encryption.delete_key("acme")
        await cluster.check([other], commands=6)

        async def is_left() -> bool:
            row = await cluster.client.row(doomed)
            return (row.wait_reason, row.owner) == ("locked", "")

        cluster.kill("c1")  # the next owner finds a log that it cannot read
        cluster.start_controller("c2", DECKHANDS_MASTER_KEYS=KEYS)
        await cluster.until(is_left, what="a conversation that is left")
        assert await cluster.client.log.load_last_id(doomed) <= last_id + 10
        with pytest.raises(DataLocked, match="was deleted"):
            await cluster.client.events(doomed)
        assert (await cluster.client.row(doomed)).title == ""
        cluster.check_that_all_live()
