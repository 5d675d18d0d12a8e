"""Agents for other agents: A2A, with the protocol's own client."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.types import a2a_pb2 as wire
from a2a.utils.errors import InvalidParamsError, TaskNotCancelableError, TaskNotFoundError, UnsupportedOperationError

from broker.runtime.settings import BrokerSettings
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.webhook_jobs import deliver, notify
from deckhands.server.auth.api_keys import Scope
from tests.ingress_parts import saying
from tests.integration.command_line import run_command
from tests.served_stores import environment_with, worker
from tests.server_parts import Served, served
from tests.turns import finish, script
from tests.webhook_parts import receiving

pytestmark = pytest.mark.asyncio(loop_scope="module")
PRIVATE = "127.0.0.1"
LIMIT_SECONDS = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("a2a")
    default = script(folder / "default.json", *saying("by default"))
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("DECKHANDS_WEBHOOK_PRIVATE", PRIVATE)
        patch.setenv("DECKHANDS_HOME", str(folder))
        found = await stack.enter_async_context(served(folder / "log", environment_with(folder)))
        environment = found.environment(folder / "home", LLM_MODEL=default)
        for module in ("controller_worker", "tool_worker"):
            await stack.enter_async_context(worker(module, environment))
        await found.working()
        yield found


@asynccontextmanager
async def speaking(server: Served, token: str, *, streaming: bool = False) -> AsyncIterator[Client]:
    """A client that knows the card alone, and has a key."""
    async with httpx.AsyncClient(timeout=LIMIT_SECONDS) as http:
        card = await A2ACardResolver(http, server.url).get_agent_card()
        http.headers["Authorization"] = f"Bearer {token}"
        async with ClientFactory(ClientConfig(streaming=streaming, httpx_client=http)).create(card) as client:
            yield client


LONG = " ".join(map(str, range(20_000)))
"""The log has its head and tail."""


def message(text: str, task_id: str = "", **configuration: Any) -> wire.SendMessageRequest:
    said = wire.Message(message_id=uuid.uuid4().hex, role=wire.ROLE_USER, parts=[wire.Part(text=text)], task_id=task_id)
    return wire.SendMessageRequest(message=said, configuration=wire.SendMessageConfiguration(**configuration))


async def answers(client: Client, request: wire.SendMessageRequest) -> list[wire.StreamResponse]:
    return [answer async for answer in client.send_message(request)]


async def test_a_task_is_begun_continued_and_shown(server: Served, tmp_path: Path) -> None:
    async with speaking(server, await server.token()) as client:
        request = message("do it")
        request.metadata.update({"model": script(tmp_path / "m.json", finish("first"), finish("second"))})
        (first,) = await answers(client, request)
        (again,) = await answers(client, request)
        assert (first.task.status.state, first.task.artifacts[0].parts[0].text) == (wire.TASK_STATE_COMPLETED, "first")
        assert again.task.id == first.task.id == first.task.context_id
        (second,) = await answers(client, message("more", first.task.id))
        assert second.task.status.message.parts[0].text == "second"
        shown = await client.get_task(wire.GetTaskRequest(id=first.task.id, history_length=10))
        assert [each.parts[0].text for each in shown.history] == ["do it", "first", "more", "second"]
        with pytest.raises(TaskNotCancelableError):
            await client.cancel_task(wire.CancelTaskRequest(id=first.task.id))


async def test_a_stream_has_the_task_its_work_and_its_end(server: Served, tmp_path: Path) -> None:
    async with speaking(server, await server.token(), streaming=True) as client:
        request = message("do it")
        request.metadata.update({"model": script(tmp_path / "m.json", run_command("echo one"), finish(LONG))})
        found = await answers(client, request)
        assert found[0].HasField("task")
        working = [each.status_update.status for each in found if each.HasField("status_update")]
        assert working[0].message.parts[0].text == "run: echo one"
        assert working[-1].state == wire.TASK_STATE_COMPLETED
        (artifact,) = [each.artifact_update.artifact for each in found if each.HasField("artifact_update")]
        assert artifact.parts[0].text == working[-1].message.parts[0].text == LONG
        held = message("do it", return_immediately=True)
        held.metadata.update({"model": script(tmp_path / "h.json", run_command("sleep 600"))})
        async for answer in client.send_message(held):
            task_id = answer.task.id
            break
        following = asyncio.create_task(anext(aiter(client.subscribe(wire.SubscribeToTaskRequest(id=task_id)))))
        assert (await following).task.id == task_id
        await client.cancel_task(wire.CancelTaskRequest(id=task_id))
        await server.client.wait_until_settled(task_id, timeout_seconds=LIMIT_SECONDS)
        assert (await client.get_task(wire.GetTaskRequest(id=task_id))).status.state == wire.TASK_STATE_CANCELED


async def test_changes_are_pushed_with_the_token_of_the_client(server: Served) -> None:
    async with receiving() as receiver, speaking(server, await server.token()) as client:
        config = wire.TaskPushNotificationConfig(url=receiver.url, token="from-the-client")
        (answer,) = await answers(client, message("do it", task_push_notification_config=config))
        asked = wire.ListTaskPushNotificationConfigsRequest(task_id=answer.task.id)
        (kept,) = (await client.list_task_push_notification_configs(asked)).configs
        assert (kept.url, kept.token) == (receiver.url, "")
        sent: list[tuple[str, ...]] = []
        settings = BrokerSettings(webhook_private=PRIVATE)
        bench = JobServices(server.client.store, settings, lambda _, arguments: sent.append(arguments))
        await notify(bench)
        await asyncio.gather(*(deliver(bench, *arguments) for arguments in sent))
        headers, body = receiver.requests[-1]
        update = json.loads(body)["statusUpdate"]
        assert (update["taskId"], update["status"]["state"]) == (answer.task.id, "TASK_STATE_COMPLETED")
        assert headers["x-a2a-notification-token"] == "from-the-client"
        this = {"task_id": answer.task.id, "id": kept.id}
        assert (
            await client.get_task_push_notification_config(wire.GetTaskPushNotificationConfigRequest(**this))
        ) == kept
        await client.delete_task_push_notification_config(wire.DeleteTaskPushNotificationConfigRequest(**this))
        assert not (await client.list_task_push_notification_configs(asked)).configs


async def test_key_has_its_rights_and_errors_are_named(server: Served) -> None:
    theirs = await server.client.submit("do it")
    async with speaking(server, await server.token()) as client:
        for task_id in (theirs, "nonsense"):
            with pytest.raises(TaskNotFoundError):
                await client.get_task(wire.GetTaskRequest(id=task_id))
        with pytest.raises(TaskNotFoundError):
            await answers(client, message("x", theirs))
        for wrong in (message(" "), message("x" * 100_001)):
            with pytest.raises(InvalidParamsError):
                await answers(client, wrong)
        private = wire.TaskPushNotificationConfig(url="http://10.0.0.1/")
        with pytest.raises(InvalidParamsError):
            await answers(client, message("x", task_push_notification_config=private))
        with pytest.raises(UnsupportedOperationError):
            await client.list_tasks(wire.ListTasksRequest())
    async with server.as_(await server.token(scopes=[Scope.READ])) as reader:
        params = {"message": {"messageId": "1", "role": "ROLE_USER", "parts": [{"text": "x"}]}}
        asked = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
        assert (await reader.post("/a2a", json=asked)).json()["code"] == "forbidden"
    async with server.as_() as nobody:
        assert (await nobody.post("/a2a", json={})).status_code == 401
