"""A password or a certificate changes under a running cluster (F58): it is read again, and no worker ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from celery import Celery

from broker.coordination.membership import list_members
from broker.runtime.errors import OutcomeUnknown, StoreMisconfigured, StoreUnavailable
from broker.store.connection import MultiplexedConnection
from broker.store.store import open_store
from deckhands.client.client import Client
from tests.certificates import certificate_in
from tests.faults.harness import FaultCluster, steps
from tests.faults.server_process import free_port
from tests.ingress_parts import saying
from tests.polling import until
from tests.stores import RealServer, redis_program, running, valkey_program

ROLES = {"c1": "controller", "t1": "tool", "d1": "ingress", "j1": "jobs"}


class Rotated(FaultCluster):
    """A cluster whose workers read the URL from a file."""

    server: RealServer
    password = "old"

    @property
    def file(self) -> Path:
        return self.root / "url"

    @property
    def url(self) -> str:
        return f"unix://:{self.password}@{self.server.socket}"

    def write_file(self) -> None:
        draft = self.file.with_name("draft")
        draft.write_text(f"{self.url}\n")
        draft.replace(self.file)

    def start_everybody(self) -> None:
        self.write_file()
        names = {"DECKHANDS_URL": "", "DECKHANDS_CELERY_URL": "", "DECKHANDS_URL_FILE": str(self.file)}
        self.start_controller(**names, DECKHANDS_ANY_MODEL="")
        self.start_tool(**names)
        self.start_ingress(**names)
        self.start_jobs(**names)

    async def rotate(self) -> None:
        """Change the server's password, and end all connections: they would live on with the old one."""
        connection = MultiplexedConnection(self.url)
        await connection.call("CONFIG", "SET", "requirepass", "new")
        await connection.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await connection.aclose()
        self.password = "new"

    async def run_as_task(self) -> None:
        """Send an agent as a Celery task, and wait until its result is there."""
        url = self.url.replace("unix", "redis+socket") + "?virtual_host=1"
        with Celery("shop", broker=url, backend=url, set_as_current=False) as app:
            result = app.send_task(
                "deckhands.run", ["do it"], {"model": self.script(*saying("done"))}, queue="deckhands"
            )
            await self.until(lambda: result.state == "SUCCESS", limit=60, what="result")

    async def pinged(self) -> set[str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "celery", "-b", self.url.replace("unix", "redis+socket") + "?virtual_host=1"),
            *("inspect", "ping", "--timeout", "5"),
            env={key: value for key, value in os.environ.items() if not key.startswith("DECKHANDS_")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return {role for role in ROLES.values() if f"{role}-" in output.decode()}


@pytest.fixture
async def rotated(tmp_path: Path) -> AsyncIterator[Rotated]:
    with contextlib.contextmanager(running)(valkey_program(), "--requirepass", "old") as server:
        cluster = Rotated(tmp_path)
        cluster.server = server
        cluster.client = Client(await open_store(cluster.url))
        try:
            yield cluster
        finally:
            for name in list(cluster.workers):
                cluster.kill(name)
            await cluster.close_workspaces()
            await cluster.client.aclose()


async def test_workers_read_a_rotated_password_again(rotated: Rotated) -> None:
    cluster = rotated
    cluster.start_everybody()
    await cluster.run_as_task()
    ids = await cluster.submit(steps(5, seconds=0.5), count=3)
    await cluster.until(lambda: all("begin-0" in cluster.effects(cid) for cid in ids))
    await cluster.client.aclose()
    await cluster.rotate()
    for name in ("c1", "t1"):
        await cluster.until(lambda name=name: "WRONGPASS" in cluster.log_of(name), what="line")  # type: ignore[misc]
        assert str(cluster.file) in cluster.log_of(name)
    cluster.client = Client(await open_store(cluster.url))
    cluster.write_file()
    await cluster.check(ids, commands=5)

    async def all_answer() -> bool:
        return await cluster.pinged() == set(ROLES.values())

    await cluster.until(all_answer, limit=60, what="answers of all workers on Celery's broker")
    await cluster.run_as_task()
    assert {name: worker.poll() for name, worker in cluster.workers.items()} == dict.fromkeys(ROLES)


async def test_a_first_login_that_is_refused_ends_the_process() -> None:
    started = contextlib.contextmanager(running)(valkey_program(), "--requirepass", "old")
    with started as server, pytest.raises(StoreMisconfigured, match="WRONGPASS"):
        await open_store(f"unix://:wrong@{server.socket}", opening_seconds=None)


async def test_certificates_are_read_again(tmp_path: Path) -> None:
    files, others = tmp_path / "files", tmp_path / "others"
    for folder in (files, others):
        folder.mkdir()
        certificate_in(folder)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", f"{files}/cert.pem", "--tls-key-file", f"{files}/key.pem"]
    options += ["--tls-ca-cert-file", f"{files}/cert.pem"]
    with contextlib.contextmanager(running)(redis_program(), *options) as server:
        connection = MultiplexedConnection(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files}/cert.pem")
        await connection.call("PING")
        admin = MultiplexedConnection(server.url)
        for name in ("tls-key-file", "tls-cert-file"):
            (files / name).write_bytes((others / name.replace("tls-", "").replace("-file", ".pem")).read_bytes())
        await admin.call(
            *("CONFIG", "SET", "tls-key-file", f"{files}/tls-key-file", "tls-cert-file", f"{files}/tls-cert-file")
        )
        await admin.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        said: list[str] = []

        async def is_refused() -> bool:  # the first call may find the connection that was ended
            try:
                await connection.call("PING")
            except (StoreUnavailable, OutcomeUnknown) as error:
                said.append(str(error))
            return bool(said) and "ssl_ca_certs=" in said[-1]

        await until(is_refused, what="refusal")
        (files / "cert.pem").write_bytes((others / "cert.pem").read_bytes())
        assert await connection.call("PING") == b"PONG"
        for one in (connection, admin):
            await one.aclose()


@pytest.mark.parametrize("names_store", ["DECKHANDS_URL", "DECKHANDS_URL_FILE"])
@pytest.mark.parametrize("names_celery", [False, True])
async def test_a_command_leaves_the_files_of_urls_to_its_worker(
    rotated: Rotated, names_store: str, names_celery: bool
) -> None:
    rotated.write_file()
    celery_file = rotated.root / "celery-url"
    celery_file.write_text(rotated.url.replace("unix", "redis+socket") + "?virtual_host=1")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DECKHANDS_", "LLM_"))}
    environment |= {"DECKHANDS_HOME": str(rotated.root / "home")}
    environment[names_store] = str(rotated.file) if names_store.endswith("_FILE") else rotated.url
    if names_celery:
        environment["DECKHANDS_CELERY_URL_FILE"] = str(celery_file)
    log = rotated.root / "controller.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deckhands", "controller"), env=environment, stdout=output, stderr=output
        )
    try:

        async def has_registered() -> bool:
            assert process.returncode is None, log.read_text()
            return bool(await list_members(rotated.client.store))

        await rotated.until(has_registered, limit=60, what="a controller worker")
        theirs = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        assert not any(variable.startswith("DECKHANDS_CELERY_URL=") for variable in theirs)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
