"""`DECKHANDS_LOG_FORMAT=json`: every line of every worker is an object, and says which conversation it is about."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.door_parts import Producer, all_present
from tests.faults.harness import FaultCluster
from tests.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"DECKHANDS_LOG_FORMAT": "json"}
ROLES = {"c1": "controller", "t1": "tool", "d1": "door", "j1": "jobs", "b1": "beat"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultCluster]:
    """One worker of each kind."""
    async with FaultCluster(tmp_path_factory.mktemp("logs")).running() as found:
        found.start_controller(**JSON)
        tools = ",".join(f"tests.example_tools:{name}" for name in ("add", "fail"))
        found.start_tool(DECKHANDS_TOOLS=tools, **JSON)
        found.start_door(**JSON)
        found.start_jobs(**JSON)
        await all_present(found)
        found.start_beat(**JSON)
        yield found


def lines_of(cluster: FaultCluster, name: str) -> list[dict[str, Any]]:
    # A forked beat was imported before, of which Python warns before the beat begins.
    lines = [line for line in cluster.log_of(name).splitlines() if not line.startswith("<frozen runpy>")]
    found = [json.loads(line) for line in lines]
    assert all(isinstance(line, dict) for line in found)
    return found


async def test_the_lines_of_all_roles_name_their_role_and_their_conversation(cluster: FaultCluster) -> None:
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

    async def have_spoken() -> bool:
        return all(cluster.log_of(name) for name in ("c1", "t1", "j1", "b1"))

    await until(have_spoken, limit=60.0, what="a line of each")
    for name, role in ROLES.items():
        assert {line["role"] for line in lines_of(cluster, name)} <= {role}
    taken, settled = (
        [line for line in lines_of(cluster, "c1") if text in line["message"]] for text in ("is taken", "settles as")
    )
    assert [line["conversation_id"] for line in taken] == [line["conversation_id"] for line in settled] == ids
    assert all(line["worker_id"].startswith("controller") for line in taken)
    failed = [line for line in lines_of(cluster, "t1") if line["message"] == "the tool fail failed"]
    assert [line["conversation_id"] for line in failed] == ids
    assert failed[0]["error"] == "RuntimeError: broken"
    assert isinstance(failed[0]["action_id"], int)


async def test_an_error_of_the_settings_is_a_line_too(cluster: FaultCluster) -> None:
    cluster.start_controller("c2", DECKHANDS_IDLE_SECONDS="soon", **JSON)
    assert await cluster.until_ended("c2", limit=60.0) == 2
    *_, last = lines_of(cluster, "c2")
    assert "DECKHANDS_IDLE_SECONDS" in last["message"]
    assert (last["role"], last["level"]) == ("controller", "CRITICAL")


async def test_an_unknown_format_is_refused_by_name(cluster: FaultCluster, tmp_path: Path) -> None:
    cluster.start_door("d2", DECKHANDS_LOG_FORMAT="xml")
    assert await cluster.until_ended("d2", limit=60.0) == 2
    assert "DECKHANDS_LOG_FORMAT is 'xml'. Use text or json." in cluster.log_of("d2")
