"""The observability of one cluster of real processes: logs as JSON, and metrics of every process at one address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from broker.celery import redis_url
from broker.coordination.membership import list_members
from broker.store.connection import MultiplexedConnection
from deckhands.operations.monitoring.endpoint import make_server, metrics_app
from deckhands.operations.monitoring.exposition import CONTENT_TYPE, Exposition
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, all_present
from tests.integration.test_cluster_metrics import Samples, samples_in, value_of
from tests.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"DECKHANDS_LOG_FORMAT": "json"}
LOOPS = ("controller", "tool", "ingress", "jobs")
ROLES = {"c1": "controller", "t1": "tool", "d1": "ingress", "j1": "jobs", "b1": "beat"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultCluster]:
    """One worker of each kind."""
    async with FaultCluster(tmp_path_factory.mktemp("logs")).running() as found:
        found.start_controller(**JSON)
        tools = ",".join(f"tests.example_tools:{name}" for name in ("add", "fail"))
        found.start_tool(DECKHANDS_TOOLS=tools, **JSON)
        found.start_ingress(**JSON)
        found.start_jobs(**JSON)
        await all_present(found)
        found.start_beat(**JSON)
        yield found


def lines_of(cluster: FaultCluster, name: str) -> list[dict[str, Any]]:
    # A forked beat was imported before, of which Python warns before the beat starts.
    lines = [line for line in cluster.log_of(name).splitlines() if not line.startswith("<frozen runpy>")]
    found = [json.loads(line) for line in lines]
    assert all(isinstance(line, dict) for line in found)
    return found


async def test_log_lines_name_their_role_and_conversation(cluster: FaultCluster) -> None:
    turns = [
        {"tool_calls": [{"name": "fail", "arguments": {"is_expected": False}}]},
        {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
    ]
    ids = await cluster.submit(turns, tools=["fail"])
    await cluster.settle(ids)
    producer = Producer(cluster)
    job = producer.app.send_task("deckhands.jobs.orphans", ["one too many"], queue="deckhands.jobs")
    with pytest.raises(Exception, match="arguments do not fit"):
        await producer.value(job)
    producer.close()
    speakers = ("c1", "t1", "j1", "b1")
    await until(lambda: all(map(cluster.log_of, speakers)), limit=60.0, what="a line of each")
    for name, role in ROLES.items():
        assert {line["role"] for line in lines_of(cluster, name)} <= {role}
    taken, settled = (
        [line for line in lines_of(cluster, "c1") if text in line["message"]] for text in ("is claimed", "settles as")
    )
    assert [line["conversation_id"] for line in taken] == [line["conversation_id"] for line in settled] == ids
    assert all(line["worker_id"].startswith("controller") for line in taken)
    failed = [line for line in lines_of(cluster, "t1") if line["message"] == "the tool fail failed"]
    assert [line["conversation_id"] for line in failed] == ids
    assert failed[0]["error"] == "RuntimeError: broken"
    assert isinstance(failed[0]["action_id"], int)


async def test_what_celery_says_at_the_end_is_a_line_too(cluster: FaultCluster) -> None:
    cluster.start_jobs("j2", **JSON)

    async def has_come() -> bool:
        return len([member for member in await list_members(cluster.client.store) if member.role == "jobs"]) == 2

    await until(has_come, limit=60.0, what="the second jobs worker")
    cluster.signal("j2", signal.SIGTERM)
    assert await cluster.until_ended("j2", limit=60.0) == 0
    assert [line["message"] for line in lines_of(cluster, "j2")][-1] == "worker: Warm shutdown (MainProcess)"


async def test_an_error_of_the_settings_is_a_line_too(cluster: FaultCluster) -> None:
    cluster.start_controller("c2", DECKHANDS_IDLE_SECONDS="soon", **JSON)
    cluster.start_ingress("d2", DECKHANDS_LOG_FORMAT="xml")
    assert await cluster.until_ended("c2", limit=60.0) == 2
    *_, last = lines_of(cluster, "c2")
    assert "DECKHANDS_IDLE_SECONDS" in last["message"]
    assert (last["role"], last["level"]) == ("controller", "CRITICAL")
    assert await cluster.until_ended("d2", limit=60.0) == 2
    assert "DECKHANDS_LOG_FORMAT is 'xml'. Use text or json." in cluster.log_of("d2")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exposition(cluster: FaultCluster) -> AsyncIterator[Exposition]:
    celery = MultiplexedConnection(redis_url(cluster.store.celery_url))
    yield Exposition(cluster.client.store, celery)
    await celery.aclose()


async def test_every_process_is_in_the_metrics(cluster: FaultCluster, exposition: Exposition) -> None:
    turns = [
        {
            "tool_calls": [{"name": "execute_bash", "arguments": {"command": "echo hello"}}],
            "usage": {"prompt_tokens": 70, "completion_tokens": 30},
        },
        {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
    ]
    await cluster.settle(await cluster.submit(turns))
    seen: Samples = {}

    async def are_all_there() -> bool:
        seen.clear()
        seen.update(samples_in(await exposition.text()))
        return all(
            value_of(seen, name, **labels) > 0
            for name, labels in (
                ("deckhands_steps_total", {"role": "controller"}),
                ("deckhands_prompt_tokens_total", {"role": "controller"}),
                ("deckhands_model_calls_total", {"outcome": "answered"}),
                ("deckhands_settled_total", {"state": "finished"}),
                ("deckhands_actions_total", {"role": "tool", "kind": "observation.run"}),
                ("deckhands_conversations", {"state": "finished"}),
                ("deckhands_workers", {"role": "jobs"}),
                ("deckhands_beat_up", {}),
                *(("deckhands_loop_late_seconds_total", {"role": role}) for role in LOOPS),
            )
        )

    await until(are_all_there, limit=60.0, what="metrics of all")
    assert value_of(seen, "deckhands_steps_total") >= 2
    assert value_of(seen, "deckhands_scrape_failures") == 0


async def test_the_command_prints_the_same_metrics_once(cluster: FaultCluster) -> None:
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deckhands", "metrics", "--once"),
        env={**os.environ, "DECKHANDS_URL": cluster.store.url, "DECKHANDS_CELERY_URL": cluster.store.celery_url},
        stdout=asyncio.subprocess.PIPE,
    )
    written, _ = await done.communicate()
    assert done.returncode == 0
    assert value_of(samples_in(written), "deckhands_workers") == 4


@contextlib.asynccontextmanager
async def served(exposition: Exposition, token: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a server of the metrics."""
    server = make_server(metrics_app(exposition, token=token), "127.0.0.1", 0)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listening]))
        await until(lambda: server.started, what="a server")
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
            yield client
        server.should_exit = True
        await serving


async def test_one_address_serves_them_to_those_who_have_the_token(exposition: Exposition) -> None:
    token = "a-token-of-sixteen"
    async with served(exposition, token) as client:
        found = await client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
        assert (found.status_code, found.headers["content-type"]) == (200, CONTENT_TYPE)
        assert value_of(samples_in(found.content), "deckhands_store_up") == 1
        for headers in ({}, {"Authorization": f"Bearer {token}x"}, {"Authorization": token}, {"Authorization": "\xff"}):
            refused = await client.get("/metrics", headers={k: v.encode("latin-1") for k, v in headers.items()})
            assert refused.status_code == 401
            assert b"deckhands_" not in refused.content
        assert (await client.get("/other")).status_code == 404
        assert (await client.post("/metrics", content=b"x" * 100_000)).status_code == 405
        with contextlib.suppress(httpx2.TransportError):  # the server need not read it to the end
            assert (await client.get("/metrics", headers={"x": "y" * 100_000})).status_code == 400
        assert (await client.get("/other")).status_code == 404
