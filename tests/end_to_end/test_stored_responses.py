"""Responses in the background with OpenAI's own client: shown, followed from a number, cancelled, deleted, after kills."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.faults.harness import FaultCluster, steps
from tests.faults.server_process import free_port
from tests.faults.server_process import server as server_process
from tests.ingress_parts import saying
from tests.integration.command_line import run_command
from tests.polling import until
from tests.server_parts import Served, add_key, served_with_model
from tests.turns import finish, script

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_SECONDS = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served_with_model(tmp_path_factory.mktemp("stored"), saying("by default")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=await server.token(), max_retries=0) as found:
        yield found


async def until_over(client: openai.AsyncOpenAI, response_id: str) -> openai.types.responses.Response:
    async def is_over() -> bool:
        return (await client.responses.retrieve(response_id)).status not in ("queued", "in_progress")

    await until(is_over, limit=LIMIT_SECONDS, what="the end of the response", every=0.5)
    return await client.responses.retrieve(response_id)


async def test_response_in_background_is_shown_and_followed_from_any_number(
    server: Served, client: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    model = f"CodeActAgent/{script(tmp_path / 'm.json', run_command('echo one'), finish('first'), finish('second'))}"
    begun = await client.responses.create(model=model, input="do it", background=True, metadata={"team": "poets"})
    assert begun.status == "in_progress"
    done = await until_over(client, begun.id)
    assert (done.status, done.output_text, done.model, done.metadata["team"]) == ("completed", "first", model, "poets")
    more = await client.responses.create(model=model, input="more", background=True, previous_response_id=begun.id)
    assert (await until_over(client, more.id)).output_text == "second"
    assert await client.responses.retrieve(begun.id) == done
    for response_id, text in ((begun.id, "first"), (more.id, "second")):
        events = [event async for event in await client.responses.retrieve(response_id, stream=True)]
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(len(events)))
        assert (events[-1].type, events[-1].response.output_text) == ("response.completed", text)
        for seen in numbers[:-1]:
            rest = await client.responses.retrieve(response_id, stream=True, starting_after=seen)
            assert [event async for event in rest] == events[seen + 1 :]


async def test_stream_of_a_background_response_equals_its_later_reading(
    client: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    model = f"CodeActAgent/{script(tmp_path / 'm.json', run_command('echo one'), finish('first'))}"
    stream = await client.responses.create(model=model, input="do it", background=True, stream=True)
    events = [event async for event in stream]
    again = await client.responses.retrieve(events[0].response.id, stream=True)
    assert [event async for event in again] == events


async def test_running_response_is_cancelled_and_an_ended_one_is_not(
    server: Served, client: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    model = f"CodeActAgent/{script(tmp_path / 'm.json', run_command('sleep 600'), finish('more'))}"
    begun = await client.responses.create(model=model, input="do it", background=True)
    assert (await client.responses.cancel(begun.id)).status == "cancelled"
    assert (await client.responses.retrieve(begun.id)).status == "cancelled"
    events = [event async for event in await client.responses.retrieve(begun.id, stream=True)]
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    ended = await client.responses.create(model="CodeActAgent", input="x")
    assert (await client.responses.cancel(ended.id)).status == "completed"


async def test_deleted_response_is_gone_but_never_one_of_several(server: Served, client: openai.AsyncOpenAI) -> None:
    alone = await client.responses.create(model="CodeActAgent", input="x")
    await client.responses.delete(alone.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(alone.id)
    first = await client.responses.create(model="CodeActAgent", input="x")
    await client.responses.create(model="CodeActAgent", input="y", previous_response_id=first.id)
    with pytest.raises(openai.ConflictError, match="one of several"):
        await client.responses.delete(first.id)
    assert (await client.responses.retrieve(first.id)).output_text == "by default"


async def test_responses_of_others_and_invented_ones_do_not_exist(server: Served, client: openai.AsyncOpenAI) -> None:
    mine = await client.responses.create(model="CodeActAgent", input="x")
    cid = mine.metadata["conversation_id"]
    for invented in (f"resp_{cid}_1", f"resp_{cid}_2", f"resp_{cid}_5", f"resp_{cid}_999", "resp_nothing_0"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(invented)
    with pytest.raises(openai.UnprocessableEntityError):
        await client.responses.retrieve("resp_")
    stranger = client.with_options(api_key=await server.token("mill"))
    for call in (stranger.responses.retrieve, stranger.responses.cancel, stranger.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await call(mine.id)
    reader = client.with_options(api_key=await server.token(scopes=["read"]))
    for call in (reader.responses.cancel, reader.responses.delete):
        with pytest.raises(openai.PermissionDeniedError):
            await call(mine.id)
    assert (await client.responses.retrieve(mine.id)).status == "completed"


@pytest.mark.timeout(900)
async def test_kills_of_server_and_controller_lose_no_event(tmp_path: Path) -> None:
    port = free_port()
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start()
        key = await add_key(cluster.client.store)
        model = f"CodeActAgent/{script(tmp_path / 'm.json', *steps(6, seconds=0.3))}"
        seen: list[openai.types.responses.ResponseStreamEvent] = []
        response_id = ""
        for kill in (True, True, False):
            async with (
                server_process(cluster.store.url, tmp_path / "home", port),
                openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key) as client,
            ):
                if not response_id:
                    response_id = (await client.responses.create(model=model, input="do it", background=True)).id
                after = seen[-1].sequence_number if seen else -1
                more = len(seen) + 8
                stream = await client.responses.retrieve(response_id, stream=True, starting_after=after)
                async for event in stream:
                    seen.append(event)
                    if kill and len(seen) >= more:
                        break
            if kill:
                cluster.kill("c1")
                cluster.start_controller("c1")
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert (seen[-1].type, seen[-1].response.status) == ("response.completed", "completed")
        assert seen[-1].response.output_text.endswith("all done")


async def test_paused_response_gets_its_answer_after_it_is_resumed(
    server: Served, client: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    model = f"CodeActAgent/{script(tmp_path / 'm.json', run_command('echo one'), finish('first'))}"
    agent = {"confirmation": {"mode": "always"}}
    begun = await client.responses.create(
        model=model, input="do it", background=True, extra_body={"deckhands": {"agent": agent}}
    )
    cid = (begun.metadata or {})["conversation_id"]

    async def asks() -> bool:
        return (await server.client.summary(cid)).state == "awaiting_user_confirmation"

    await until(asks, limit=LIMIT_SECONDS, what="the question")
    assert (await client.responses.retrieve(begun.id)).status == "in_progress"
    before = [event async for event in await client.responses.retrieve(begun.id, stream=True)]
    await server.client.confirm(cid)
    assert (await until_over(client, begun.id)).output_text == "first"
    seen = before[-1].sequence_number
    rest = await client.responses.retrieve(begun.id, stream=True, starting_after=seen)
    after = [event async for event in rest]
    assert [event.sequence_number for event in after] == list(range(seen + 1, seen + 1 + len(after)))
    assert after[-1].type == "response.completed"
