"""Steering an agent at work over HTTP, with its effects: real workers, one cluster for all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from deckhands.client.tasks.spec import TaskSpec
from deckhands.client.tasks.tasks import derive_task_conversation_id
from tests.ingress_parts import saying
from tests.integration.command_line import run_command, script
from tests.polling import until
from tests.served_stores import environment_with, worker
from tests.server_parts import Served, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_SECONDS = 60.0
ASKING = {"name": "CodeActAgent", "confirmation": {"mode": "always"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("steering")
    default = script(folder / "default.json", *saying("by default"))
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(served(folder / "log", environment_with(folder)))
        environment = found.environment(folder / "home", LLM_MODEL=default)
        for module in ("controller_worker", "tool_worker"):
            await stack.enter_async_context(worker(module, environment, found.log))
        await found.working()
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Served) -> AsyncIterator[httpx2.AsyncClient]:
    async with server.as_(await server.token()) as client:
        yield client


async def settled(client: httpx2.AsyncClient, path: str, state: str) -> dict[str, Any]:
    """The summary, once the conversation has settled in a state."""
    found: dict[str, Any] = {}

    async def is_so() -> bool:
        found.update((await client.get(path)).json())
        return found["is_settled"] and found["summary"]["state"] == state

    await until(is_so, limit=LIMIT_SECONDS, what=f"the state {state}")
    return dict(found["summary"])


async def next_question(client: httpx2.AsyncClient, path: str, asked: int) -> int:
    """Return the action that an agent asks about after another one."""
    found: list[int] = []

    async def asks_about_another() -> bool:
        summary = (await client.get(path)).json()["summary"]
        found.append(summary["asked_id"])
        return summary["state"] == "awaiting_user_confirmation" and summary["asked_id"] not in (None, asked)

    await until(asks_about_another, limit=LIMIT_SECONDS, what="the next question")
    return found[-1]


async def begun(client: httpx2.AsyncClient, **request: Any) -> str:
    answer = await client.post("/conversations", json={"task": "do it", "headless": False, **request})
    assert answer.status_code == 201, answer.text
    return str(answer.headers["location"])


async def test_asking_agent_is_refused_with_reason_confirmed_and_changed(
    client: httpx2.AsyncClient, tmp_path: Path
) -> None:
    turns = [run_command(f"echo {name} > {name}.txt") for name in ("one", "two", "three", "four")]
    path = await begun(client, model=script(tmp_path / "m.json", *turns, *saying("done")), agent=ASKING)
    asked = (await settled(client, path, "awaiting_user_confirmation"))["asked_id"]
    wrong = await client.post(f"{path}/confirm", json={"action_id": asked + 1})
    assert (wrong.status_code, wrong.json()["code"]) == (409, "conflict")
    await client.post(f"{path}/reject", json={"action_id": asked, "reason": "Not one."})
    asked = await next_question(client, path, asked)
    edited = {"command": "mkdir d; echo edited > d/two.txt"}
    answer = await client.post(f"{path}/confirm", json={"action_id": asked, "edited": edited, "reason": "better so"})
    assert answer.status_code == 202
    await next_question(client, path, asked)
    change = {"confirmation": "never", "labels": {"team": "poets"}, "limits": {"max_iterations": 40}, "reason": "trust"}
    assert (await client.patch(path, json=change)).status_code == 202
    assert (await client.post(f"{path}/confirm", json={})).status_code == 202
    assert (await settled(client, path, "finished"))["message"] == "done"

    listed = (await client.get(f"{path}/files")).json()
    assert [each["name"] for each in listed] == ["d", "four.txt", "three.txt"]
    assert [each["kind"] for each in listed] == ["directory", "file", "file"]
    assert [each["name"] for each in (await client.get(f"{path}/files?path=d")).json()] == ["two.txt"]
    assert (await client.get(f"{path}/files?path=none")).status_code == 404
    assert (await client.get(f"{path}/files?path=../..")).json()["code"] == "bad_path"
    patch = await client.get(f"{path}/patch")
    assert (patch.headers["deckhands-left-out"], b"+edited" in patch.content) == ("0", True)

    found = (await client.get("/conversations?label=team=poets")).json()["conversations"]
    assert [each["conversation_id"] for each in found] == [path.rpartition("/")[2]]
    events = (await client.get(f"{path}/events?limit=1000")).json()["events"]
    acted = [each["action"] for each in events if each["kind"] == "conversation.operator_acted"]
    assert acted == ["reject", "confirm", "change", "confirm"]
    (changed,) = [each for each in events if each["kind"] == "conversation.changed"]
    assert (changed["by"].startswith("key "), changed["reason"]) == (True, "trust")
    assert any("Not one." in str(each) and each["source"] != "user" for each in events), "the agent reads the reason"


async def test_command_beside_the_agent_runs_once_and_names_its_author(
    server: Served, client: httpx2.AsyncClient, tmp_path: Path
) -> None:
    model = script(tmp_path / "m.json", run_command("echo one > one.txt"), *saying("done"))
    path = await begun(client, model=model)
    await settled(client, path, "finished")
    asked = {"command": "echo x >> n.txt; cat one.txt; (exit 3)", "reason": "a look"}
    once = {"Idempotency-Key": f"look {path}"}
    answers = [await client.post(f"{path}/execute", json=asked, headers=once) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    first, again = (answer.json() for answer in answers)
    assert (first["output"].split(), first["exit_code"]) == (["one"], 3)
    assert again == first
    assert (await client.get(f"{path}/files/n.txt")).content == b"x\n"
    event = (await client.get(f"{path}/events/{first['event_id']}")).json()
    assert (event["kind"], event["by"][:4], event["reason"]) == ("action.execute", "key ", "a look")
    before = (await client.get(f"{path}/events/{first['event_id'] - 1}")).json()
    assert (before["action"], before["reason"]) == ("execute", "a look")
    for body in ({"command": " \n"}, {"command": "a\0b"}, {"command": "ls", "timeout_seconds": 4_000}):
        assert (await client.post(f"{path}/execute", json=body)).status_code == 422
    for change in ({"agent": "NoSuchAgent"}, {}):
        refused = await client.patch(path, json=change | {"reason": "test"})
        assert (refused.status_code, refused.json()["code"]) == (422, "usage")


async def test_running_work_is_interrupted(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    path = await begun(client, model=script(tmp_path / "m.json", run_command("sleep 600"), *saying("done")))

    async def runs() -> bool:
        events = (await client.get(f"{path}/events?kind=action.run")).json()["events"]
        return len(events) == 1

    await until(runs, limit=LIMIT_SECONDS, what="the command")
    answer = await client.post(f"{path}/interrupt", json={"reason": "too slow"})
    assert answer.status_code == 202
    await settled(client, path, "paused")
    ended = (await client.get(f"{path}/events?kind=conversation.operator_acted")).json()["events"]
    assert [(each["action"], each["reason"]) for each in ended] == [("interrupt", "too slow")]
    await client.post(f"{path}/cancel", json={"reason": "over"})


async def test_the_models_on_offer_are_listed(server: Served, client: httpx2.AsyncClient) -> None:
    found = (await client.get("/models")).json()
    assert found["profiles"] == []
    assert [name.rpartition("/")[2] for name in found["defaults"]] == ["default.json"]


async def test_a_listing_finds_the_conversation_of_a_task(server: Served, client: httpx2.AsyncClient) -> None:
    begun_by_task = derive_task_conversation_id("shop-17")
    request = TaskSpec(task="do it", tenant="acme")
    await server.client.submit(request, conversation_id=begun_by_task)

    async def listed(client: httpx2.AsyncClient, **query: str) -> list[str]:
        answer = await client.get("/conversations", params=query)
        assert answer.status_code == 200, answer.text
        return [row["conversation_id"] for row in answer.json()["conversations"]]

    assert await listed(client, task="shop-17") == [begun_by_task]
    assert await listed(client, task="shop-17", label="team=billing") == []
    assert await listed(client, task="shop-18") == []
    async with server.as_(await server.token("other")) as stranger:
        assert await listed(stranger, task="shop-17") == []
