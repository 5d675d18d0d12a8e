"""Programs written for OpenHands' SDK on a cluster, with workers and the server killed while they run."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.faults.harness import FaultCluster, steps
from tests.faults.server_process import free_port, server
from tests.openhands_program import program
from tests.polling import until
from tests.sdk_peer import IS_INSTALLED
from tests.server_parts import add_key
from tests.turns import bash, finish

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="run benchmarks/peer/setup.sh to install OpenHands' SDK")
STEPS = 8
LIMIT = 200.0


async def events_on(url: str, key: str, name: str) -> list[str]:
    found: list[str] = []
    page: dict[str, Any] = {}
    async with httpx2.AsyncClient(base_url=url, headers={"X-Session-API-Key": key}) as client:
        while page.get("next_page_id", "") is not None:
            query = {"page_id": page["next_page_id"]} if page else {}
            answer = await client.get(f"/api/conversations/{name}/events/search", params=query)
            assert answer.status_code == 200, answer.text
            page = answer.json()
            found += [event["id"] for event in page["items"]]
    return found


@pytest.mark.parametrize("victim", ["controller", "tool worker", "server"])
async def test_sdk_program_sees_every_event_once_despite_kills(
    cluster: FaultCluster, tmp_path: Path, victim: str
) -> None:
    cluster.start()
    port, key = free_port(), await add_key(cluster.client.store, "acme")
    url = f"http://127.0.0.1:{port}"
    place = cluster.root / "work" / "project"
    place.mkdir(parents=True)
    model = cluster.script(*steps(STEPS, seconds=0.3))
    serving = contextlib.AsyncExitStack()

    def serve() -> Any:
        return serving.enter_async_context(server(cluster.store.url, tmp_path / "home", port, options=("--openhands",)))

    async with serving:
        running = await serve()
        given = {"url": url, "key": key, "model": model, "directory": str(place)}
        async with program("run_once", tmp_path, **given) as sdk:
            effects = place / "effects"

            def is_at_work() -> bool:
                return effects.exists() and "begin-2" in effects.read_text()

            await until(is_at_work, limit=LIMIT, what="the third step")
            match victim:
                case "controller":
                    cluster.kill("c1")
                    cluster.start_controller("c2")
                case "tool worker":
                    cluster.kill("t1")
                    cluster.start_tool("t2")
                case "server":
                    running.kill()
                    await running.wait()
                    await serve()
            async with asyncio.timeout(LIMIT):
                found = await sdk.result()
        assert found["status"] == "finished"
        log = await events_on(url, key, found["id"])
    assert found["events"] == log
    assert len(found["seen"]) == len(set(found["seen"])), "each event came once"
    assert set(found["seen"]) == set(log[1:]), "all came that were written after the client had connected"
    assert place.joinpath("effects").read_text().count(f"end-{STEPS - 1}") == 1


async def test_sdk_program_can_do_all_that_it_does_elsewhere(cluster: FaultCluster, tmp_path: Path) -> None:
    cluster.start()
    port, key = free_port(), await add_key(cluster.client.store, "acme")
    model = cluster.script(bash("echo one"), bash("echo two"), finish("Over."), finish("Over again."))
    async with server(cluster.store.url, tmp_path / "home", port, options=("--openhands",)):
        given = {"url": f"http://127.0.0.1:{port}", "key": key, "models": [model], "directory": "workspace/project"}
        async with program("use_everything", tmp_path, **given) as sdk, asyncio.timeout(LIMIT):
            found = await sdk.result()
    assert (found["asked"], found["ended"], found["again"]) == ("waiting_for_confirmation", "finished", "finished")
    assert found["fork"] == ["idle", True]
    assert found["fork_ended"] == "finished"
    assert found["attached"] == ["Named", {"team": "billing"}, "NeverConfirm"]
    assert {"SystemPromptEvent", "MessageEvent", "ActionEvent", "UserRejectObservation"} <= set(found["kinds"])
    assert found["deleted"] == 404
    assert found["title"]
