"""Each way in as a function that submits one task with some fields, on one cluster of real workers.

Holds: the fields are those of a `TaskSpec`, as JSON; a driver gives them as its way in takes them, and raises `Refused`
with the text of the error if the way in takes one of them not.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import acp
import httpx2
import openai
import pytest
from acp.schema import DeniedOutcome
from anyio.from_thread import BlockingPortal
from mcp import Client as McpClient
from mcp.client.streamable_http import streamable_http_client
from pydantic import BaseModel

from broker.contract.events import AgentSpec, ConversationCreated, Event
from broker.contract.specs import Limits
from broker.secrets.references import SecretReference
from broker.store.store import open_store
from deckhands import AsyncConversation
from deckhands.client.reading.summary import Summary, summarize
from deckhands.client.runs.records import RunFolder
from deckhands.cluster.home import Home
from deckhands.operations.jobs.scheduler import derive_tick_conversation_id, start_due
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests import inbox_parts
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, all_present
from tests.integration.command_line import COMMAND, Done, deckhands, environment
from tests.model_server.running_server import RunningModelServer
from tests.polling import until
from tests.server_parts import add_key
from tests.source_code import ROOT
from tests.task_mcp_server import TaskServer, task_server

LIMIT_SECONDS = 90.0
PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(64))).decode()
SECRET = "s3cr3t-0f-the-ways"
MOUNTED = "found-by-the-tool-worker"
SCHEMA = {"type": "object", "properties": {"files": {"type": "integer"}}, "required": ["files"]}
MAKE = "echo made by the set-up > ~/made"
FORBIDDEN = "echo forbidden"
LOOK = 'cat here.txt ~/made; echo "length ${#TOKEN} ${#MOUNTED}"'


Fields = Mapping[str, Any]


class Refused(Exception):
    """A way in does not take a field; the text is its error."""


class Files(BaseModel):
    """The structured output, as Python asks for it."""

    files: int


@dataclass
class Ended:
    """A conversation that has settled, and the model's requests in it."""

    conversation_id: str
    events: list[Event]
    requests: list[dict[str, Any]] = field(default_factory=list)
    submitted: datetime = field(default_factory=lambda: datetime.now(UTC))
    fields: Fields = field(default_factory=dict)

    @property
    def created(self) -> ConversationCreated:
        """Its first event."""
        first = self.events[0]
        assert isinstance(first, ConversationCreated)
        return first

    @property
    def summary(self) -> Summary:
        """Its summary."""
        return summarize(self.events)

    @property
    def prompts(self) -> str:
        """All that the model was sent."""
        return json.dumps([request["body"] for request in self.requests], ensure_ascii=False)

    @property
    def log(self) -> str:
        """All events."""
        return "\n".join(event.model_dump_json() for event in self.events)


class World:
    """One cluster with every kind of worker, a server, and a server of models."""

    def __init__(self, root: Path, models: RunningModelServer, portal: BlockingPortal) -> None:
        self.root, self.models, self.portal = root, models, portal
        self.cluster = FaultCluster(root)
        self.key = self.url = ""
        self.secret_key = base64.b64encode(os.urandom(32)).decode()
        self.producer: Producer
        self.remote: TaskServer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """Start the workers and the server."""
        async with AsyncExitStack() as stack:
            stack.enter_context(pytest.MonkeyPatch.context()).setenv("DECKHANDS_SECRET_KEY", self.secret_key)
            self.remote = await stack.enter_async_context(task_server())
            allow = {"tasks": [self.remote.url.split("/")[2]]}
            (self.root / "mcp.json").write_text(json.dumps({"mcpServers": {}, "allow": allow}))
            await stack.enter_async_context(self.cluster.running())
            for start in (self.cluster.start_controller, self.cluster.start_tool, self.cluster.start_ingress):
                start(**self.settings)
            await all_present(self.cluster)
            gateway = Gateway(
                await open_store(self.cluster.store.url, patience_seconds=5), "", options=ServerOptions(port=0)
            )
            stack.push_async_callback(gateway.aclose)
            port = await stack.enter_async_context(serve_in_loop(gateway))
            self.url = f"http://127.0.0.1:{port}"
            self.key = await add_key(self.cluster.client.store)
            self.producer = Producer(self.cluster)
            stack.callback(self.producer.close)
            yield self

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the workers."""
        return {
            "LLM_MODEL": "openai/gpt-4o-mini",
            "LLM_BASE_URL": f"{self.models.url}/v1",
            "LLM_API_KEY": "k",
            "DECKHANDS_SECRET_KEY": self.secret_key,
            "DECKHANDS_SANDBOX": "bwrap",
            "DECKHANDS_HOOKS": str(self.root / "hooks.toml"),
            "DECKHANDS_SECRET_SOURCES": str(self.root / "sources.toml"),
            "DECKHANDS_TOOLS": "tests.example_tools:add",
            "DECKHANDS_MCP": str(self.root / "mcp.json"),
            "DECKHANDS_SKILL_SOURCES": str(self.root / "lore"),
            "EXAMPLE_TOOLS_TRACE": str(self.root / "trace"),
            "PYTHONPATH": str(ROOT),
        }

    @property
    def place(self) -> dict[str, str]:
        """Where a command finds the cluster."""
        return {"DECKHANDS_URL": self.cluster.store.url, "DECKHANDS_SECRET_KEY": self.secret_key}

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a command."""
        return environment(self.root / "home", **variables)

    def command(self, *arguments: str | Path, is_private: bool = False) -> Done:
        """Call the command line, on the cluster or with a private one.

        Raises:
            Refused: it ends with the code of a wrong call.
        """
        done = deckhands(*arguments, env=self.environment(**(self.settings if is_private else self.place)))
        if done.code == 2:
            raise Refused(done.err)
        return done

    def ask(self, work: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Run a coroutine on the loop of the cluster."""
        return self.portal.call(work, *arguments)

    def settled(self, conversation_id: str) -> list[Event]:
        """Wait until a conversation of the cluster has settled, and return its log."""

        async def settle() -> list[Event]:
            client = self.cluster.client
            await client.wait_until_settled(conversation_id, timeout_seconds=LIMIT_SECONDS)
            return await client.events(conversation_id, is_whole=True)

        found: list[Event] = self.ask(settle)
        return found


Driver = Callable[[World, str, Fields], "Ended | str"]
"""Submits a task; returns the id of its conversation on the cluster, or the private conversation, settled."""


def options_of(world: World, fields: Fields, *, pictures: bool = True) -> list[str]:
    """Return fields as options of the command line."""
    found: list[str] = []
    agent, limits = fields.get("agent", {}), fields.get("limits", {})
    for option, value in (
        ("--agent", agent.get("name")),
        ("--confirm", agent.get("confirmation", {}).get("mode")),
        ("--check", agent.get("goal", {}).get("check")),
        *(("--delegate", name) for name in agent.get("delegates", {})),
        ("-i", limits.get("max_iterations")),
        ("--max-budget", limits.get("max_budget_usd")),
        *(("--label", f"{name}={text}") for name, text in fields.get("labels", {}).items()),
        *(
            (
                "--secret",
                f"{name}={secret}" if isinstance(secret, str) else f"{name}@{secret['source']}:{secret['path']}",
            )
            for name, secret in fields.get("secrets", {}).items()
        ),
        *(("--tool", key) for key in fields.get("tools", ())),
        *(("--skills", source) for source in fields.get("skills", ())),
        *(("--mcp-servers", f"{name}={server['url']}") for name, server in fields.get("mcp_servers", {}).items()),
        ("-w", fields.get("workspace")),
        *((f"--{name.replace('_', '-')}", fields.get(name)) for name in PLAIN),
    ):
        if value is not None:
            found += [option, str(value)]
    if "headless" in fields:
        found.append("--headless" if fields["headless"] else "--no-headless")
    if fields.get("rollout"):
        found.append("--rollout")
    if "output" in fields:
        file = world.root / "schema.json"
        file.write_text(json.dumps(fields["output"]))
        found += ["--output-schema", str(file)]
    for image in fields.get("images", ()) if pictures else ():
        file = world.root / "picture.png"
        file.write_bytes(base64.b64decode(image.partition(",")[2]))
        found += ["--picture", str(file)]
    return found


PLAIN = (
    *("model", "title", "tenant", "experiment", "priority", "delay", "expires", "idempotency_key", "double_texting"),
    "acks",
    "pinned_version",
)
"""Fields whose options take their value as it is."""


def by_run(world: World, task: str, fields: Fields) -> Ended:
    """`deckhands run`, with a private store and workers."""
    options = options_of(world, {"workspace": str(world.root / "work" / "empty"), **fields})
    done = world.command("run", "-t", task, *options, "--json", is_private=True)
    conversation_id = done.json[0]["conversation_id"]
    return Ended(conversation_id, RunFolder(Home(world.root / "home").run_folder(conversation_id)).events())


def by_submit(world: World, task: str, fields: Fields) -> str:
    """`deckhands submit`."""
    done = world.command("submit", "-t", task, *options_of(world, fields))
    assert done.code == 0, done
    return done.out.strip()


def by_file(world: World, task: str, fields: Fields) -> str:
    """`deckhands submit --from`."""
    line = {"id": fields.get("idempotency_key", task), "task": task, **fields}
    line.pop("idempotency_key", None)
    file = world.root / "tasks.jsonl"
    file.write_text(json.dumps(line) + "\n")
    done = world.command("submit", "--from", file, "--batch", "ways", "--json")
    assert done.code == 0, done
    conversation_id: str = done.json[0]["conversation_id"]
    return conversation_id


def keywords_of(fields: Fields, output: Any) -> dict[str, Any]:
    """Return fields as keywords of Python."""
    found = dict(fields)
    if "agent" in fields:
        found["agent"] = AgentSpec.model_validate({"enable_workspace_skills": True} | fields["agent"])
    if "limits" in fields:
        found["limits"] = Limits(**fields["limits"])
    if "secrets" in fields:
        found["secrets"] = {
            name: secret if isinstance(secret, str) else SecretReference(**secret)
            for name, secret in fields["secrets"].items()
        }
    return found | ({"output": output} if "output" in fields else {})


def by_conversation(world: World, task: str, fields: Fields, **place: Any) -> Ended:
    """`AsyncConversation`."""

    async def talk() -> Ended:
        from broker.runtime.errors import UsageError

        try:
            async with AsyncConversation(**place, **keywords_of(fields, Files)) as conversation:
                await conversation.send_message(task)
                await conversation.wait(timeout_seconds=LIMIT_SECONDS)
                return Ended(conversation.id, await conversation.events())
        except UsageError as error:
            raise Refused(str(error)) from error

    found: Ended = world.ask(talk)
    return found


def by_embedded(world: World, task: str, fields: Fields) -> Ended:
    """Python with its own workers."""
    own = {**world.settings, "DECKHANDS_HOME": str(world.root / "home")}
    fields = {"workspace": str(world.root / "work" / "empty"), **fields}
    return by_conversation(world, task, fields, environment=own)


def by_remote(world: World, task: str, fields: Fields) -> Ended:
    """Python through the server."""
    return by_conversation(world, task, fields, cluster=world.url, api_key=world.key)


def by_store(world: World, task: str, fields: Fields) -> str:
    """Python on the cluster's store."""

    async def submit() -> str:
        return await world.cluster.client.submit(task, **keywords_of(fields, Files))

    found: str = world.ask(submit)
    return found


async def answered(asking: Awaitable[httpx2.Response]) -> httpx2.Response:
    """Return the answer to a request.

    Raises:
        Refused: the request is refused.
    """
    answer = await asking
    if answer.status_code in (400, 409, 422):
        raise Refused(answer.text)
    answer.raise_for_status()
    return answer


def caller(world: World) -> httpx2.AsyncClient:
    """Return a client of the server."""
    headers = {"Authorization": f"Bearer {world.key}"}
    return httpx2.AsyncClient(base_url=world.url, headers=headers, timeout=LIMIT_SECONDS)


def by_http(world: World, task: str, fields: Fields) -> str:
    """`POST /conversations`."""

    async def post() -> str:
        body = {"task": task, **fields}
        headers = {"Idempotency-Key": body.pop("idempotency_key")} if "idempotency_key" in body else {}
        async with caller(world) as http:
            answer = await answered(http.post("/conversations", json=body, headers=headers))
        return str(answer.json()["conversation_id"])

    found: str = world.ask(post)
    return found


def by_celery(world: World, task: str, fields: Fields) -> str:
    """`deckhands.submit`."""
    options = dict(fields)
    named = {"task_id": options.pop("idempotency_key")} if "idempotency_key" in options else {}
    result = world.producer.send("submit", task, kwargs=options, **named)
    found: str = result.get(timeout=LIMIT_SECONDS, interval=0.02)
    return found


def by_inbox(world: World, task: str, fields: Fields) -> str:
    """An entry of `deck:inbox`."""

    async def put() -> str:
        store = world.cluster.client.store
        request = {"task": task, **fields}
        if "idempotency_key" in request:
            request["id"] = request.pop("idempotency_key")
        before = await inbox_parts.answers(store)
        entry = await inbox_parts.put(store, request)
        named = request.get("id", entry)

        async def answer() -> Any:
            new = (await inbox_parts.replies(store))[before:]
            return next((one for one in new if one.request_id == named and one.event != "settled"), None)

        await until(answer, limit=LIMIT_SECONDS, what="an answer")
        found = await answer()
        if found.event == "rejected":
            raise Refused(found.content["message"])
        return str(found.conversation_id)

    found: str = world.ask(put)
    return found


def by_schedule(world: World, task: str, fields: Fields) -> str:
    """`PUT /schedules/NAME`, and its first tick."""

    async def tick() -> str:
        name = task.replace(" ", "-")
        body = {"cron": "* * * * *", "request": {"task": task, **fields}, "reason": "asked for by a test"}
        async with caller(world) as http:
            await answered(http.put(f"/schedules/{name}", json=body))
        client = world.cluster.client
        repository = ScheduleRepository(client.store, client.secrets)
        due = (await repository.entry(name)).due
        assert due is not None
        await start_due(client, repository, due)
        await repository.remove(name)
        return derive_tick_conversation_id(name, due)

    found: str = world.ask(tick)
    return found


def by_evaluation(world: World, task: str, fields: Fields, *, setup: str | None = MAKE) -> str:
    """`deckhands eval run`, with one instance."""
    out = world.root / "evaluations" / str(fields.get("idempotency_key", task)).replace(" ", "-")
    row = {"id": "one", "task": task, "answer": "done", "images": list(fields.get("images", ()))}
    own = {
        name: value for name, value in fields.items() if name not in ("images", "workspace", "model", "idempotency_key")
    }
    if "workspace" in fields:
        row |= {"workspace": fields["workspace"], "setup": setup}
    out.parent.mkdir(exist_ok=True)
    rows = out.with_suffix(".jsonl")
    rows.write_text(json.dumps(row) + "\n")
    model = fields.get("model", "openai/gpt-4o-mini")
    options = options_of(world, own)
    world.command("eval", "run", rows, "--model", model, "--out", out, "--retries", "0", *options)
    (line,) = (out / "results.jsonl").read_text().splitlines()
    return str(json.loads(line)["conversation_id"])


def by_a2a(world: World, task: str, fields: Fields) -> str:
    """`SendMessage` of A2A."""

    async def send() -> str:
        metadata = dict(fields)
        message = {"messageId": metadata.pop("idempotency_key", task), "role": "ROLE_USER", "parts": [{"text": task}]}
        params = {"message": message, "metadata": metadata, "configuration": {"returnImmediately": True}}
        async with caller(world) as http:
            body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
            answer = (await answered(http.post("/a2a", json=body))).json()
        if "error" in answer:
            raise Refused(answer["error"]["message"])
        return str(answer["result"]["task"]["id"])

    found: str = world.ask(send)
    return found


def by_mcp(world: World, task: str, fields: Fields) -> str:
    """The tool `start_task` of MCP."""

    async def call() -> str:
        rest = dict(fields)
        arguments = {"task": task}
        for name in ("model", "idempotency_key"):
            if name in rest:
                arguments[name] = rest.pop(name)
        headers = {"Authorization": f"Bearer {world.key}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=LIMIT_SECONDS) as http,
            McpClient(streamable_http_client(f"{world.url}/mcp", http_client=http)) as client,
        ):
            done = await client.call_tool("start_task", {**arguments, "options": rest})
        if done.is_error:
            raise Refused(done.content[0].text)
        return str(done.structured_content["conversation_id"])

    found: str = world.ask(call)
    return found


def by_openai(world: World, task: str, fields: Fields) -> str:
    """A chat completion."""

    async def complete() -> str:
        rest = dict(fields)
        parts: list[Any] = [{"type": "text", "text": task}]
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in rest.pop("images", ())]
        asked: dict[str, Any] = {
            "model": f"CodeActAgent/{rest.pop('model')}" if "model" in rest else "CodeActAgent",
            "messages": [{"role": "user", "content": parts}],
        }
        if "labels" in rest:
            asked["metadata"] = rest.pop("labels")
        if "output" in rest:
            form = {"name": "files", "schema": rest.pop("output")}
            asked["response_format"] = {"type": "json_schema", "json_schema": form}
        if "idempotency_key" in rest:
            asked["extra_headers"] = {"Idempotency-Key": rest.pop("idempotency_key")}
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=world.key, max_retries=0) as client:
            try:
                answer = await client.chat.completions.with_raw_response.create(**asked, extra_body={"deckhands": rest})
            except openai.APIStatusError as error:
                if error.status_code != 502:  # an agent that failed
                    raise Refused(str(error)) from error
                answer = error.response
        return str(answer.headers["location"].removeprefix("/conversations/"))

    found: str = world.ask(complete)
    return found


def by_ag_ui(world: World, task: str, fields: Fields) -> str:
    """A run of AG-UI."""

    async def start() -> str:
        rest = dict(fields)
        parts: list[Any] = [{"type": "text", "text": task}]
        parts += [{"type": "image", "source": {"type": "url", "value": url}} for url in rest.pop("images", ())]
        params = {"model": rest.pop("model")} if "model" in rest else {}
        body = {"threadId": f"thread-{uuid.uuid4()}", "runId": "run-1", "forwardedProps": {"deckhands": rest}}
        body |= {"messages": [{"id": "m1", "role": "user", "content": parts}]}
        async with caller(world) as http, http.stream("POST", "/ag-ui", params=params, json=body) as answer:
            if answer.status_code in (400, 409, 422):
                raise Refused((await answer.aread()).decode())
            answer.raise_for_status()
            return str(answer.headers["location"].removeprefix("/conversations/"))

    found: str = world.ask(start)
    return found


class Editor:
    """An editor whose user answers no question."""

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        """Show nothing."""

    async def request_permission(self, session_id: str, tool_call: Any, options: Any, **_: Any) -> Any:
        """Leave the question open."""
        return acp.RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))

    def on_connect(self, _conn: Any) -> None:
        """Need nothing of the connection."""


def by_editor(world: World, task: str, fields: Fields) -> str:
    """`deckhands acp`, which an editor starts."""
    own = {name: value for name, value in fields.items() if name not in ("workspace", "images")}
    options = options_of(world, own)
    env = world.environment(PYTHONPATH=str(ROOT), DECKHANDS_SECRET_KEY=world.secret_key)
    command = (*COMMAND, "acp", "--cluster", world.cluster.store.url, *options)

    async def prompt() -> str:
        blocks = [acp.text_block(task)]
        blocks += [acp.image_block(url.partition(",")[2], "image/png") for url in fields.get("images", ())]
        with (world.root / "editor.log").open("w") as log:
            async with acp.spawn_agent_process(
                Editor(), *command, env=env, transport_kwargs={"stderr": log.fileno()}
            ) as (agent, process):
                try:
                    await agent.initialize(protocol_version=acp.PROTOCOL_VERSION)
                    folder = str(fields.get("workspace", world.root / "work" / "empty"))
                    session = (await agent.new_session(cwd=folder, mcp_servers=[])).session_id
                    with suppress(acp.RequestError):  # the answer to a conversation that ends in an error
                        await agent.prompt(session_id=session, prompt=blocks)
                except Exception:
                    if await process.wait() != 2:
                        raise
                    raise Refused((world.root / "editor.log").read_text()) from None
        return session

    found: str = world.ask(prompt)
    return found


DRIVERS: Mapping[str, Driver] = {
    "run": by_run,
    "submit": by_submit,
    "files": by_file,
    "embedded": by_embedded,
    "store": by_store,
    "remote": by_remote,
    "http": by_http,
    "celery": by_celery,
    "inbox": by_inbox,
    "schedule": by_schedule,
    "eval": by_evaluation,
    "a2a": by_a2a,
    "mcp": by_mcp,
    "openai": by_openai,
    "ag-ui": by_ag_ui,
    "acp": by_editor,
}
ATTENDED = frozenset({"embedded", "remote", "acp"})
"""Ways in that take a person to be there by default."""
