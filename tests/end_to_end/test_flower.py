"""Celery's own tools see workers and agents: remote control, and Flower behind a password."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec
from deckhands.ingress.context import derive_task_conversation_id
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, saying
from tests.polling import until

SERVE_FLOWER = Path(__file__).resolve().parents[2] / "deploy" / "serve-flower"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
LOGIN = httpx.BasicAuth("operator", "correct-horse-battery")
LIMIT_SECONDS = 30.0


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """One controller worker and one tool worker, and Celery's broker behind a password."""
    cluster = Cluster(ClusterSpec(tmp_path, environment={"PATH": PATH}, port=_free_port()))
    await cluster.start()
    try:
        await cluster.until_ready()
        yield cluster
    finally:
        await cluster.stop()


@pytest.mark.soak
async def test_settings_of_another_celery_application_are_not_the_workers(tmp_path: Path) -> None:
    others = {
        "CELERY_BROKER_URL": "redis://127.0.0.1:1/0",
        "CELERY_CONFIG_MODULE": "shop.celeryconfig",
        "CELERY_LOADER": "shop.loaders:Loader",
    }
    cluster = Cluster(ClusterSpec(tmp_path, environment={"PATH": PATH, **others}))
    await cluster.start()
    try:
        await cluster.until_ready()
        assert await _both(cluster, "inspect", "ping") == {"controller": {"ok": "pong"}, "tool": {"ok": "pong"}}
    finally:
        await cluster.stop()


async def test_flower_lists_workers_to_password_holders(cluster: Cluster) -> None:
    async with flower_of(cluster) as flower:
        assert (await flower.get("/healthcheck")).text == "OK"
        for path in ("/", "/workers", "/tasks", "/broker", "/api/workers", "/api/tasks"):
            assert (await flower.get(path)).status_code == 401, path
            assert (await flower.get(path, auth=("operator", "wrong"))).status_code == 401, path

        async def workers() -> str:
            answer = await flower.get("/api/workers", params={"refresh": "1"}, auth=LOGIN)
            assert answer.status_code == 200
            return answer.text

        async def both_are_listed() -> bool:
            return sorted(map(_role, json.loads(await workers()))) == ["controller", "tool"]

        await until(both_are_listed, limit=LIMIT_SECONDS, what="both workers in Flower's API")
        assert _password(cluster) not in await workers()

        async def both_are_on_the_page() -> bool:
            page = await flower.get("/workers", auth=LOGIN)
            return set(re.findall(r"\b(controller|tool)-\d+@", page.text)) == {"controller", "tool"}

        await until(both_are_on_the_page, limit=LIMIT_SECONDS, what="both workers on Flower's page")
        # It answers that they are on now: Flower had left them off, as each task would cost half as much again.
        replies = await _control(cluster, "control", "enable_events")
        assert [answer for reply in replies for answer in reply.values()] == [{"ok": "task events enabled"}] * 2


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({}, "set FLOWER_BASIC_AUTH to user:password; there is no default"),
        ({"FLOWER_BASIC_AUTH": ""}, "set FLOWER_BASIC_AUTH to user:password; there is no default"),
        ({"FLOWER_BASIC_AUTH": "operator"}, "FLOWER_BASIC_AUTH has no password: write user:password"),
        ({"FLOWER_BASIC_AUTH": "operator:"}, "the password in FLOWER_BASIC_AUTH is shorter than 16 characters"),
        ({"FLOWER_BASIC_AUTH": "operator:123456789012345"}, "the password in FLOWER_BASIC_AUTH is shorter than"),
        ({"FLOWER_BASIC_AUTH": ":1234567890123456"}, "FLOWER_BASIC_AUTH needs a user, and takes no commas"),
        ({"FLOWER_BASIC_AUTH": "operator:1234567890123456,x:y"}, "FLOWER_BASIC_AUTH needs a user, and takes no commas"),
        (
            {"FLOWER_BASIC_AUTH": "operator:1234567890123456", "FLOWER_UNAUTHENTICATED_API": "true"},
            "FLOWER_UNAUTHENTICATED_API would open Flower to everybody",
        ),
    ],
)
def test_flower_is_not_started_without_a_password(variables: dict[str, str], complaint: str) -> None:
    environment = {"PATH": PATH, "CELERY_BROKER_URL": "redis://127.0.0.1:1/0", **variables}
    ended = subprocess.run(
        [SERVE_FLOWER], check=False, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"serve-flower: {complaint}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _role(worker: str) -> str:
    return worker.partition("-")[0]


def _password(cluster: Cluster) -> str:
    found = re.search(r":(\w{48})@", cluster.store.celery_url)
    assert found is not None
    return found.group(1)


async def _both(cluster: Cluster, *command: str) -> dict[str, Any]:
    """Ask by remote control until both workers have answered, and return the answers by role."""
    answers: dict[str, Any] = {}

    async def both_answer() -> bool:
        answers.update({_role(name): said for name, said in (await _control(cluster, *command)).items()})
        return len(answers) == 2

    await until(both_answer, limit=LIMIT_SECONDS, what="answer of both workers")
    return answers


async def _control(cluster: Cluster, *command: str) -> Any:
    """Run Celery's command line and return its JSON output."""
    celery = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "celery", *command, "--json", "--timeout", "2"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": PATH, "CELERY_BROKER_URL": cluster.store.celery_url},
    )
    printed, _ = await celery.communicate()
    return json.loads(printed or "{}")


@asynccontextmanager
async def flower_of(cluster: Cluster | FaultCluster) -> AsyncIterator[httpx.AsyncClient]:
    """Run Flower as containers run it, and yield a client of it."""
    port = _free_port()
    environment = {
        "PATH": PATH,
        "CELERY_BROKER_URL": cluster.store.celery_url,
        "FLOWER_BASIC_AUTH": "operator:correct-horse-battery",
    }
    flower = await asyncio.create_subprocess_exec(
        SERVE_FLOWER, f"--port={port}", env=environment, stderr=asyncio.subprocess.PIPE
    )
    assert flower.stderr is not None
    reading = None
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            while f"Visit me at http://127.0.0.1:{port}" not in (line := (await flower.stderr.readline()).decode()):
                assert line, "Flower ended"
        # The rest must be read; a full pipe would stop it.
        reading = asyncio.create_task(flower.stderr.read())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_SECONDS) as client:
            yield client
    finally:
        flower.terminate()
        await flower.wait()
        if reading is not None:
            await reading


SECRET = "correct-horse-battery"


async def test_flower_shows_agents_as_tasks(producer: Producer) -> None:
    async with flower_of(producer.cluster) as flower:

        async def tasks() -> dict[str, Any]:
            answer = await flower.get("/api/tasks", auth=LOGIN)
            found: dict[str, Any] = answer.json()
            return found

        async def listens() -> bool:
            probe = producer.send("cancel", "no-such-conversation")
            await producer.until_state(probe, "FAILURE")
            return probe.id in await tasks()

        await until(listens, limit=60.0, what="a task in Flower")
        options = {**producer.options(saying("done")), "secrets": {"KEY": SECRET}}
        done = producer.send("run", f"use {SECRET}; " + "long " * 500, kwargs=options)
        await producer.value(done)
        refused = producer.send("run")
        await producer.until_state(refused, "FAILURE")
        states = {done.id: "SUCCESS", refused.id: "FAILURE"}

        async def both_have_ended() -> bool:
            found = await tasks()
            return all(found.get(name, {}).get("state") == state for name, state in states.items())

        await until(both_have_ended, limit=60.0, what="the end of both tasks in Flower")
        shown = (await tasks())[done.id]
        assert shown["name"] == "deckhands.run"
        assert shown["received"] is not None
        assert shown["started"] is not None
        assert "use <secret_hidden>; long" in shown["args"]
        assert SECRET not in str(await tasks())
        assert max(len(shown["args"]), len(shown["kwargs"])) <= 200
        assert derive_task_conversation_id(done.id) in shown["result"]
