"""Agents through the protocols that others speak (OpenAI, MCP, A2A, ACP), with those protocols' own clients."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import acp
import httpx
import httpx2
import openai
import pytest
import pytest_asyncio
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.types import a2a_pb2 as wire
from a2a.utils.errors import InvalidParamsError, TaskNotCancelableError, TaskNotFoundError, UnsupportedOperationError
from acp.schema import AllowedOutcome, DeniedOutcome
from mcp import Client as McpClient
from mcp import MCPError
from mcp.client import ClientExtension
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolRequest, CallToolRequestParams, EmptyResult

from broker.contract.actions import MessageAction
from broker.contract.events import EventSource
from broker.contract.policies import ConfirmationPolicy
from broker.runtime.settings import BrokerSettings
from deckhands.client.changing import Change
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.webhook_jobs import deliver, notify
from deckhands.server.auth.api_keys import Scope
from tests.ingress_parts import saying
from tests.integration.command_line import run_command
from tests.polling import until
from tests.server_parts import Served, served_with_model
from tests.turns import call, finish, script
from tests.webhook_parts import receiving
from tool_worker.tools.mcp.tasks import (
    ANSWER,
    CancelTask,
    CreatedTask,
    GetTask,
    TaskParams,
    TasksExtension,
    TaskState,
    UpdateParams,
    UpdateTask,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_SECONDS = 60.0
USED = {"usage": {"prompt_tokens": 100, "completion_tokens": 1}}
PICTURE = "data:image/png;base64,iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"files": {"type": "integer"}}, "required": ["files"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder, roots = tmp_path_factory.mktemp("ingresses"), str(tmp_path_factory.getbasetemp())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECKHANDS_WEBHOOK_PRIVATE", PRIVATE)
        async with served_with_model(folder, saying("by default"), DECKHANDS_WORKSPACE_ROOTS=roots) as found:
            yield found


@pytest_asyncio.fixture(loop_scope="module")
async def chat(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=await server.token()) as client:
        yield client


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def ended(server: Served, conversation_id: str) -> str:
    """The last message of a conversation, once it has finished."""
    summary = await server.client.wait_until_settled(conversation_id, timeout_seconds=LIMIT_SECONDS)
    return summary.message


async def test_openai_model_is_an_agent_and_id_continues_its_conversation(
    server: Served, chat: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    assert "CodeActAgent" in [model.id async for model in chat.models.list()]
    turns = (run_command("echo one"), finish("first"), finish("second"))
    model = f"CodeActAgent/{script(tmp_path / 'm.json', *(turn | USED for turn in turns))}"
    first = await chat.chat.completions.create(model=model, messages=said("do it"), metadata={"team": "poets"})
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("first", "stop")
    cid = first.model_extra["metadata"]["conversation_id"]
    assert (await server.client.row(cid)).labels == {"team": "poets"}
    messages = [*said("do it"), {"role": "assistant", "content": "first"}, *said("more")]
    again = chat.chat.completions.with_raw_response
    raw = await again.create(model="CodeActAgent", messages=messages, metadata={"conversation_id": cid})
    second = raw.parse()
    assert (second.choices[0].message.content, raw.headers["location"]) == ("second", f"/conversations/{cid}")
    assert second.model_extra["metadata"]["conversation_id"] == cid
    assert (first.usage.prompt_tokens, second.usage.prompt_tokens, second.usage.total_tokens) == (200, 100, 101)
    sent = [e.content for e in await server.client.events(cid) if e.kind == "action.message" and e.source == "user"]
    assert sent == ["do it", "more"]


async def test_openai_stream_separates_work_from_answer_and_may_be_left(
    server: Served, chat: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    model = f"CodeActAgent/{script(tmp_path / 'm.json', run_command('echo one') | USED, finish('done'))}"
    options = {"include_usage": True}
    text = thoughts = reason = usage = ""
    async with await chat.chat.completions.create(
        model=model, messages=said("do it"), stream=True, stream_options=options
    ) as stream:
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                thoughts += choice.delta.model_extra.get("reasoning_content", "")
                reason = choice.finish_reason or reason
    assert (text, thoughts.strip(), reason) == ("done", "run: echo one", "stop")
    assert usage.total_tokens == 101
    async with await chat.chat.completions.create(model=model, messages=said("do it"), stream=True) as stream:
        async for chunk in stream:
            left = chunk.model_extra["metadata"]["conversation_id"]
            break
    assert await ended(server, left) == "done"


async def test_openai_an_answer_has_the_form_that_was_asked_for(chat: openai.AsyncOpenAI, tmp_path: Path) -> None:
    turn = finish("done", output={"files": 3})
    form = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
    model = f"CodeActAgent/{script(tmp_path / 'm.json', turn)}"
    answer = await chat.chat.completions.create(model=model, messages=said("count"), response_format=form)
    assert answer.choices[0].message.content == '{"files": 3}'


async def test_openai_errors_have_its_form_and_nothing_begins_twice(
    server: Served, chat: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    create = chat.chat.completions.create
    with pytest.raises(openai.AuthenticationError) as refused:
        await chat.with_options(api_key="dh_nonsense").models.list()
    assert (refused.value.code, refused.value.type) == ("unauthorized", "authentication_error")
    reader = chat.with_options(api_key=await server.token(scopes=["read"]))
    with pytest.raises(openai.PermissionDeniedError):
        await reader.chat.completions.create(model="CodeActAgent", messages=said("do it"))
    theirs = await server.client.submit("do it")
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="CodeActAgent", messages=said("x"), metadata={"conversation_id": theirs})
    assert missing.value.code == "unknown_conversation"
    for wrong, named in (
        ({"model": "NoAgent"}, "NoAgent"),
        ({"n": 2}, "body.n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "body.tools"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": said("x" * 100_001)}, "task"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=named):
            await create(**{"model": "CodeActAgent", "messages": said("do it"), **wrong})
    failing = f"CodeActAgent/{script(tmp_path / 'm.json', {'error': {'code': 'authentication', 'times': None}})}"
    with pytest.raises(openai.InternalServerError, match="ended in an error"):
        await create(model=failing, messages=said("do it"), metadata={"team": "failing"})
    async with server.as_(chat.api_key) as client:
        assert len((await client.get("/conversations?label=team=failing")).json()["conversations"]) == 1


async def deltas_of(chat: openai.AsyncOpenAI, **asked: Any) -> list[str]:
    """Return the pieces of the text of a response."""
    events = await chat.responses.create(stream=True, **asked)
    return [event.delta async for event in events if event.type == "response.output_text.delta"]


async def test_openai_an_answer_is_whole_however_long_it_is(chat: openai.AsyncOpenAI, tmp_path: Path) -> None:
    text = " ".join(map(str, range(20_000)))
    model = f"CodeActAgent/{script(tmp_path / 'm.json', run_command('echo one'), finish(text))}"
    assert (await chat.responses.create(model=model, input="do it")).output_text == text
    whole = {"model": model, "input": "do it", "extra_query": {"deltas": "false"}}
    assert await deltas_of(chat, **whole) == [text]
    assert "".join(await deltas_of(chat, model=model, input="do it")) == text
    answer = await chat.chat.completions.create(model=model, messages=said("do it"))
    assert answer.choices[0].message.content == text


async def test_openai_pictures_belong_to_the_messages_that_they_come_with(
    server: Served, chat: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    model = f"CodeActAgent/{script(tmp_path / 'm.json', finish('seen'), finish('again'))}"
    asked = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    first = await chat.chat.completions.create(model=model, messages=[{"role": "user", "content": asked}])
    cid = first.model_extra["metadata"]["conversation_id"]
    told = [*said("look"), {"role": "assistant", "content": "seen"}, {"role": "user", "content": asked}]
    await chat.chat.completions.create(model="CodeActAgent", messages=told, metadata={"conversation_id": cid})
    shown = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": PICTURE}]
    answer = await chat.responses.create(model=model, input=[{"role": "user", "content": shown}])
    found = [*await server.client.events(cid), *await server.client.events(answer.metadata["conversation_id"])]
    messages = [event for event in found if isinstance(event, MessageAction) and event.source == EventSource.USER]
    assert [(event.content, event.image_urls) for event in messages] == [("look", (PICTURE,))] * 3


async def test_openai_a_response_is_continued_by_its_id(
    server: Served, chat: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    turns = (run_command("echo one"), finish("first"), finish("second"), finish("third"))
    model = f"CodeActAgent/{script(tmp_path / 'm.json', *(turn | USED for turn in turns))}"
    first = await chat.responses.create(model=model, input="do it", metadata={"team": "poets"})
    assert (first.output_text, first.status, first.usage.input_tokens) == ("first", "completed", 200)
    more = [{"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
    second = await chat.responses.create(model="CodeActAgent", input=more, previous_response_id=first.id)
    assert (second.output_text, second.usage.input_tokens) == ("second", 100)
    cid = second.metadata["conversation_id"]
    assert (await server.client.row(cid)).labels == {"team": "poets"}
    kinds, deltas = [], ""
    async with chat.responses.stream(model="CodeActAgent", input="again", previous_response_id=second.id) as stream:
        async for event in stream:
            kinds.append(event.type)
            deltas += event.delta if event.type == "response.output_text.delta" else ""
        assert (await stream.get_final_response()).output_text == deltas == "third"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    turn = finish("done", output={"files": 3})
    form: Any = {"format": {"type": "json_schema", "name": "count", "schema": SCHEMA}}
    formed = f"CodeActAgent/{script(tmp_path / 'f.json', turn)}"
    assert (await chat.responses.create(model=formed, input="count", text=form)).output_text == '{"files": 3}'
    assert await deltas_of(chat, model=formed, input="count", text=form) == ['{"files": 3}']
    failing = f"CodeActAgent/{script(tmp_path / 'e.json', {'error': {'code': 'authentication', 'times': None}})}"
    with pytest.raises(openai.InternalServerError, match="ended in an error"):
        await chat.responses.create(model=failing, input="do it")
    theirs = await server.client.submit("do it")
    with pytest.raises(openai.NotFoundError):
        await chat.responses.create(model="CodeActAgent", input="x", previous_response_id=f"resp_{theirs}_0")
    with pytest.raises(openai.UnprocessableEntityError, match="tools"):
        await chat.responses.create(model="CodeActAgent", input="x", tools=[{"type": "web_search"}])


@asynccontextmanager
async def mcp(server: Served, token: str, *extensions: ClientExtension) -> AsyncIterator[McpClient]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=LIMIT_SECONDS) as http,
        McpClient(streamable_http_client(f"{server.url}/mcp", http_client=http), extensions=extensions) as client,
    ):
        yield client


async def test_mcp_an_agent_is_started_followed_answered_and_cancelled(server: Served, tmp_path: Path) -> None:
    heard: list[str] = []
    long = " ".join(map(str, range(20_000)))

    async def hear(_progress: float, _total: float | None, message: str | None) -> None:
        heard.append(message or "")

    model = script(tmp_path / "m.json", run_command("echo one"), finish("first"), finish(long))
    async with mcp(server, await server.token()) as client:
        tools = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
        assert sorted(tools) == ["cancel", "send_message", "start_task", "wait"]
        asked = {"task": "do it", "model": model, "idempotency_key": "one"}
        begun = (await client.call_tool("start_task", asked)).structured_content
        again = (await client.call_tool("start_task", asked)).structured_content
        assert begun["conversation_id"] == again["conversation_id"]
        this = {"conversation_id": begun["conversation_id"]}
        done = await client.call_tool("wait", this | {"timeout_seconds": LIMIT_SECONDS}, progress_callback=hear)
        found = done.structured_content
        assert (found["state"], found["is_settled"], found["message"]) == ("finished", True, "first")
        assert heard == ["run: echo one"]
        more = await client.call_tool("send_message", this | {"content": "more", "wait_seconds": LIMIT_SECONDS})
        assert more.structured_content["message"] == long
        held = script(tmp_path / "held.json", run_command("sleep 600"))
        working = (await client.call_tool("start_task", {"task": "x", "model": held})).structured_content
        this = {"conversation_id": working["conversation_id"]}
        assert not (await client.call_tool("wait", this | {"timeout_seconds": 0})).structured_content["is_settled"]
        await client.call_tool("cancel", this | {"reason": "not needed"})
        stopped = await client.call_tool("wait", this | {"timeout_seconds": LIMIT_SECONDS})
        assert stopped.structured_content["state"] == "stopped"


def call_as_task(task: str, model: str) -> CallToolRequest:
    arguments = {"task": task, "model": model, "wait_seconds": 600}
    return CallToolRequest(params=CallToolRequestParams(name="start_task", arguments=arguments))


async def test_mcp_client_of_tasks_follows_an_agent_as_one(server: Served, tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", {"text": "Which one?"}, finish("the blue one"))
    async with mcp(server, await server.token(), TasksExtension()) as client:

        async def load(task_id: str) -> TaskState:
            return await client.session.send_request(GetTask(params=TaskParams(task_id=task_id)), TaskState)

        async def until_status(task_id: str, status: str) -> TaskState:
            async def has_status() -> bool:
                return (await load(task_id)).status == status

            await until(has_status, limit=LIMIT_SECONDS, what=status, every=0.5)
            return await load(task_id)

        created = await client.session.send_request(call_as_task("do it", model), ANSWER)
        assert isinstance(created, CreatedTask)
        asked = await until_status(created.task_id, "input_required")
        ((name, question),) = (asked.input_requests or {}).items()
        assert question["params"]["message"] == "Which one?"
        answers = {name: {"action": "accept", "content": {"answer": "blue"}}}
        update = UpdateTask(params=UpdateParams(task_id=created.task_id, input_responses=answers))
        for _ in range(2):  # a repeated answer has no effect
            await client.session.send_request(update, EmptyResult)
        done = await until_status(created.task_id, "completed")
        assert done.result is not None
        assert done.result["content"][0]["text"] == "the blue one"
        assert done.result["structuredContent"]["conversation_id"] == created.task_id
        events = await server.client.events(created.task_id)
        assert [event.content for event in events if isinstance(event, MessageAction) and event.source == "user"] == [
            "do it",
            "blue",
        ]
        held = script(tmp_path / "held.json", run_command("sleep 600"))
        working = await client.session.send_request(call_as_task("x", held), ANSWER)
        assert isinstance(working, CreatedTask)
        await client.session.send_request(CancelTask(params=TaskParams(task_id=working.task_id)), EmptyResult)
        await until_status(working.task_id, "cancelled")
    async with mcp(server, await server.token(tenant="other"), TasksExtension()) as client:
        for task_id in (created.task_id, "01k9qgz1t2v3w4x5y6z7a8b9c0", "../x"):
            with pytest.raises(MCPError, match="unknown_conversation"):
                await client.session.send_request(GetTask(params=TaskParams(task_id=task_id)), TaskState)
    async with mcp(server, await server.token(scopes=["read"]), TasksExtension()) as client:
        with pytest.raises(MCPError, match="scope"):
            await client.session.send_request(CancelTask(params=TaskParams(task_id=created.task_id)), EmptyResult)


async def test_mcp_question_of_a_task_is_bound_to_its_event(server: Served, tmp_path: Path) -> None:
    turns = [{"text": "Which one?"}, run_command("echo blue"), run_command("echo red"), finish("done")]
    async with mcp(server, await server.token(), TasksExtension()) as client:
        created = await client.session.send_request(call_as_task("x", script(tmp_path / "m.json", *turns)), ANSWER)
        assert isinstance(created, CreatedTask)
        task_id = created.task_id

        async def load() -> dict[str, Any]:
            state = await client.session.send_request(GetTask(params=TaskParams(task_id=task_id)), TaskState)
            return dict(state.input_requests or {})

        async def answer(name: str, **content: Any) -> None:
            responses = {name: {"action": "accept", "content": content}}
            params = UpdateParams(task_id=task_id, input_responses=responses)
            await client.session.send_request(UpdateTask(params=params), EmptyResult)

        async def until_asked(text: str) -> str:
            async def is_asked() -> bool:
                return text in str(await load())

            await until(is_asked, limit=LIMIT_SECONDS, what=text, every=0.5)
            (name,) = await load()
            return name

        asked = await until_asked("Which one?")
        policy = ConfirmationPolicy(mode="always", analyzer="none")
        await server.client.change(task_id, Change(confirmation=policy))  # a later event; the question stays
        assert list(await load()) == [asked]
        await answer(asked, answer="blue")
        first = await until_asked("echo blue")
        await answer(first, confirm=True)
        second = await until_asked("echo red")
        await answer(first, confirm=True)  # a late answer to the first question confirms nothing else
        assert list(await load()) == [second]
        await answer(second, confirm=True)
        assert await ended(server, task_id) == "done"


async def test_mcp_tools_have_the_keys_rights_and_explain_errors(server: Served) -> None:
    theirs = {"conversation_id": await server.client.submit("do it")}
    async with mcp(server, await server.token(scopes=["read"])) as client:
        for name, arguments, code in (
            ("start_task", {"task": "x"}, "forbidden"),
            ("send_message", theirs | {"content": "x"}, "forbidden"),
            ("cancel", theirs | {"reason": "x"}, "forbidden"),
            ("wait", theirs, "unknown_conversation"),
            ("wait", theirs | {"timeout_seconds": 1e9}, "timeout_seconds"),
            ("start_task", {"task": "x" * 100_001}, "task"),
        ):
            refused = await client.call_tool(name, arguments)
            assert refused.is_error, name
            assert code in refused.content[0].text, name
    async with server.as_() as nobody:
        assert (await nobody.post("/mcp", json={})).status_code == 401
        assert (await nobody.get("/mcp")).status_code == 401


class Editor:
    """An editor: it remembers its output, and agrees to the entries of its list."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.asked: list[Any] = []
        self.answers: list[str] = []

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.shown.append(update)

    async def request_permission(self, session_id: str, tool_call: Any, options: Any, **_: Any) -> Any:
        self.asked.append(tool_call)
        assert [option.option_id for option in options] == ["allow", "reject"]
        answer = self.answers.pop(0)
        outcome = AllowedOutcome(option_id=answer, outcome="selected") if answer else DeniedOutcome(outcome="cancelled")
        return acp.RequestPermissionResponse(outcome=outcome)

    def on_connect(self, _conn: Any) -> None:
        pass

    def texts(self, kind: str) -> list[str]:
        return [each.content.text for each in self.shown if each.session_update == kind]

    def calls(self) -> list[tuple[str, str]]:
        return [(each.title or "", each.status) for each in self.shown if each.session_update.startswith("tool_call")]


@asynccontextmanager
async def editing(server: Served, editor: Editor, *options: str, home: Path) -> AsyncIterator[Any]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "DECKHANDS_HOME": str(home)}
    command = (sys.executable, "-m", "deckhands", "acp", "--cluster", server.log.operator, *options)
    async with acp.spawn_agent_process(editor, *command, env=environment) as (agent, _process):
        started = await agent.initialize(protocol_version=acp.PROTOCOL_VERSION)
        assert started.agent_capabilities.load_session
        yield agent


async def test_acp_an_editor_prompts_sees_is_asked_cancels_and_loads(server: Served, tmp_path: Path) -> None:
    write = {"command": "create", "path": str(tmp_path / "work" / "a.txt"), "file_text": "one\n"}
    edit = call("str_replace_editor", **write)
    model = script(tmp_path / "m.json", edit, run_command("echo no"), finish("done"), run_command("sleep 600"))
    (tmp_path / "work").mkdir()
    editor = Editor()
    async with editing(server, editor, "--model", model, "--confirm", "always", home=tmp_path) as agent:
        session = (await agent.new_session(cwd=str(tmp_path / "work"), mcp_servers=[])).session_id
        editor.answers = ["allow", "reject"]
        answer = await agent.prompt(session_id=session, prompt=[acp.text_block("do it")])
        assert answer.stop_reason == "end_turn"
        assert (tmp_path / "work" / "a.txt").read_text() == "one\n"
        assert [each.kind for each in editor.asked] == ["edit", "execute"]
        (diff,) = editor.asked[0].content
        assert (diff.path, diff.new_text) == (write["path"], "one\n")
        assert editor.texts("agent_message_chunk") == ["done"]
        statuses = [status for _, status in editor.calls()]
        assert statuses == ["pending", "in_progress", "completed", "pending", "failed"]
        assert len({each.tool_call_id for each in editor.shown if each.session_update == "tool_call"}) == 2

        editor.answers = ["allow"]
        prompting = asyncio.create_task(agent.prompt(session_id=session, prompt=[acp.text_block("more")]))
        await until(
            lambda: ("Running command: sleep 600", "in_progress") in editor.calls(), limit=LIMIT_SECONDS, what="sleep"
        )
        await agent.cancel(session_id=session)
        assert (await prompting).stop_reason == "cancelled"
        with pytest.raises(acp.RequestError):
            await agent.prompt(session_id="nothing", prompt=[acp.text_block("x")])
    again = Editor()
    async with editing(server, again, home=tmp_path) as agent:
        await agent.load_session(cwd=str(tmp_path / "work"), session_id=session, mcp_servers=[])
        assert again.texts("user_message_chunk") == ["do it", "more"]
        assert again.texts("agent_message_chunk") == ["done"]
        with pytest.raises(acp.RequestError):
            await agent.load_session(cwd="/", session_id="01k9qgz1t2v3w4x5y6z7a8b9c0", mcp_servers=[])
    await server.client.cancel(session, wait_seconds=LIMIT_SECONDS)
    await server.client.close(session)


PRIVATE = "127.0.0.1"


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
