"""The examples of producers: each is run as a stranger would run it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker.store import keys
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, all_present, saying
from tests.polling import until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "producers"
LIMIT_SECONDS = 90.0
NODE_CLIENT = "redis@5"


@pytest.fixture
async def reached(tmp_path: Path) -> AsyncIterator[Producer]:
    """A cluster whose store has a port, as that of `deckhands up --port` has."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    async with FaultCluster(tmp_path, port=port).running() as cluster:
        cluster.start_controller()
        cluster.start_ingress()
        await all_present(cluster)
        found = Producer(cluster)
        yield found
        found.close()


async def printed(command: Sequence[str], folder: Path, **variables: str) -> list[str]:
    """Run a program, and return the lines that it prints."""
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        check=False,
        cwd=folder,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def address_of(producer: Producer) -> str:
    address = producer.cluster.store.port_url
    assert address is not None
    return address


async def test_the_chord(reached: Producer) -> None:
    model = reached.options(saying("write more tests"))["model"]
    command = [sys.executable, str(EXAMPLES / "celery_chord.py"), reached.cluster.store.celery_url, "--model", model]
    assert await printed([*command, "--timeout", str(LIMIT_SECONDS)], reached.cluster.root) == ["write more tests"]
    assert len(await reached.cluster.client.recent()) == 21


async def test_the_beat_of_another_application(reached: Producer) -> None:
    send = """
import celery_beat
from celery.beat import Scheduler

beat = Scheduler(celery_beat.app)
print(*[beat.apply_entry(entry) or entry.task for entry in beat.schedule.values()])
"""
    found = {"DECKHANDS_CELERY": reached.cluster.store.celery_url, "PYTHONPATH": str(EXAMPLES)}
    model = reached.options(saying("all is well"))["model"]
    sent = await printed([sys.executable, "-c", send], reached.cluster.root, DECKHANDS_MODEL=model, **found)
    assert sent == ["deckhands.run"]

    async def has_begun() -> bool:
        rows = await reached.cluster.client.recent()
        return [dict(row.labels) for row in rows] == [{"example": "celery-beat"}]

    await until(has_begun, limit=LIMIT_SECONDS, what="the conversation of a tick")


async def test_the_inbox_from_python(reached: Producer) -> None:
    model = reached.options(saying("listed"))["model"]
    command = [sys.executable, str(EXAMPLES / "inbox.py"), address_of(reached), 'List "the" files']
    lines = await printed(command, reached.cluster.root, MODEL=model)
    assert [line.split() for line in lines] == [["accepted"], ["settled", "finished", "listed"]]


async def test_the_inbox_from_node(reached: Producer, tmp_path: Path) -> None:
    if (shutil.which("node") is None or shutil.which("npm") is None) and "CI" not in os.environ:
        pytest.skip("node is not installed")
    folder = tmp_path / "node"
    folder.mkdir()
    shutil.copy(EXAMPLES / "inbox.mjs", folder)
    await printed(["npm", "install", "--no-audit", "--no-fund", "--silent", NODE_CLIENT], folder)
    model = reached.options(saying("listed"))["model"]
    for address in (address_of(reached), reached.cluster.store.url):  # the second has its password before a path
        lines = await printed(["node", "inbox.mjs", address, 'List "the" files'], folder, MODEL=model)
        assert [line.split() for line in lines] == [["accepted"], ["settled", "finished", "listed"]]


async def test_the_inbox_from_a_shell(reached: Producer) -> None:
    model = reached.options(saying("listed"))["model"]
    client = shutil.which("redis-cli") or shutil.which("valkey-cli")
    assert client is not None, "redis-cli is missing (on Debian: apt-get install redis-tools)"
    command = [str(EXAMPLES / "inbox.sh"), 'List "the" files']
    address = urlsplit(address_of(reached))
    variables = {"MODEL": model, "REDIS_CLI": f"{client} -p {address.port}", "REDISCLI_AUTH": address.password or ""}
    assert await printed(command, reached.cluster.root, **variables) == ["accepted", "settled"]
    (row,) = await reached.cluster.client.recent()
    assert row.title == 'List "the" files'
    assert await reached.cluster.client.store.connection.call("XLEN", keys.INBOX) == 0
