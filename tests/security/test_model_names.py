"""Which names of models a task may give: each way to name one, and names of many kinds, also at a real worker."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from celery.result import AsyncResult
from pydantic import ValidationError

from broker.contract.actions import MessageAction
from broker.contract.condenser_specs import CondenserPipelineSpec, LLMSummarizingCondenserSpec
from broker.contract.events import AgentSpec, EventSource, LLMSpec, ModelSwitched
from broker.contract.llm_spec import OFFERED_MODELS, ModelNotOffered, find_model_names
from broker.contract.policies import LoopPolicy
from broker.contract.specs import CriticSpec, GoalSpec, PlanSpec, Tenancy
from broker.coordination.membership import Membership
from broker.runtime.clock import SystemClock
from broker.runtime.errors import DeckhandsError
from broker.store.store import Store
from controller_worker.agents.registry import list_agents
from controller_worker.model.models import Models
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.llm import ModelRequest
from controller_worker.providers.messages.messages import TextPart
from deckhands.client.changing import Change
from deckhands.client.conversation.async_conversation import AsyncConversation
from deckhands.client.tasks.inputs import to_agent_spec
from deckhands.client.tasks.spec import TaskSpec
from deckhands.ingress.context import derive_task_conversation_id
from deckhands.operations.jobs.scheduler import derive_tick_conversation_id, start_due
from deckhands.operations.schedules.repository import ScheduleRepository
from deckhands.operations.schedules.schedule import Schedule
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.faults.harness import FaultCluster
from tests.inbox_parts import put, replies
from tests.ingress_parts import Producer
from tests.polling import until
from tests.server_parts import add_key

TABLE = """
[llm]
model = "anthropic/claude-sonnet-4-5"
api_key = "canary"
[llm.theirs]
tenants = ["other"]
[llm.many]
model = "gemini/*"
api_key = "canary-2"
"""
NAMES = [
    *("llamafile/x", "oobabooga/http://127.0.0.1:9310/y", "custom/http://127.0.0.1/x", "ollama/llama3", "lm_studio/x"),
    *("xinference/x", "hosted_vllm/x", "vllm/x", "openai/gpt-5", "openhands/claude", "bedrock/x", "petals/x"),
    *("huggingface/https://10.0.0.1", "http://127.0.0.1:8080", "file:///etc/passwd", "unix:///run/x", "claude-opus-4"),
    *("anthropic/claude-sonnet-4-5 ", "ANTHROPIC/claude-sonnet-4-5", "anthropic/*", "*", "many", "theirs", "silent"),
    *("theirs#routed", "#routed", "#openai/gpt-5", "many#openai/x", "many#gemini/x", "#scripted//etc/shadow"),
    *("scripted//dev/ptmx", "scripted//dev/./ptmx", "replay//dev/zero", "scripted//etc/shadow", "replay/../../x"),
    *("gemini/", "gemini/../x", "gemini/x?key=1", "gemini/x#y", "gemini/\u0445", "gemini//x", "gemini/x\n"),
    *("gemini/" + "x" * 400, "x" * 100_000, "\ud800", "\u202eevil", "\0", " ", "a\nb"),
]


def models(folder: Path, **env: str) -> Models:
    path = folder / "models.toml"
    path.write_text(TABLE)
    return Models({"LLM_CONFIG": str(path), **env}, SystemClock())


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:40])
def test_an_unknown_name_is_refused_with_the_list(tmp_path: Path, name: str) -> None:
    offered = models(tmp_path)
    with pytest.raises(ModelNotOffered, match=r"Offered models: anthropic/claude-sonnet-4-5, gemini/\*\.") as caught:
        offered.choose(LLMSpec(model=name), "acme")
    assert "theirs" not in caught.value.remedy
    assert len(str(caught.value)) < 1_000
    assert not offered.table.offers(name, "acme")


def test_every_way_to_name_a_model_is_found() -> None:
    spec = AgentSpec(
        llm=LLMSpec(model="a"),
        condenser=CondenserPipelineSpec(condensers=(LLMSummarizingCondenserSpec(llm=LLMSpec(model="b")),)),
        goal=GoalSpec(critic=CriticSpec(llm=LLMSpec(model="c"))),
        plan=PlanSpec(llm=LLMSpec(model="d")),
        loop_policy=LoopPolicy(fallback_model="e"),
        delegates={"x": AgentSpec(llm=LLMSpec(model="f"))},
    )
    assert set(find_model_names(spec)) == set("abcdef")


async def test_scripts_lie_below_the_directory(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (tmp_path / "outside.json").write_text("{}")
    (scripts / "in.json").write_text("{}")
    (scripts / "link.json").symlink_to(tmp_path / "outside.json")
    (scripts / "device").symlink_to("/dev/zero")
    os.mkfifo(scripts / "pipe")
    offered = models(tmp_path, LLM_SCRIPTS_DIR=str(scripts))
    for name in ("in.json", f"{scripts}/in.json"):
        client, _ = await offered.get_client(offered.choose(LLMSpec(model=f"scripted/{name}"), "acme"))
        await client.aclose()
    refused = ("link.json", "device", "pipe", "../outside.json", f"{scripts}/../outside.json", "/dev/ptmx", ".", "\0")
    for name in refused:
        for prefix in ("scripted/", "replay/"):
            with pytest.raises(LLMConfigError):
                await offered.get_client(offered.choose(LLMSpec(model=prefix + name), "acme"))


LOCAL_PORTS = (1234, 4000, 5000, 8000, 8080, 9997, 11434)
"""Where litellm looks for servers of this machine if no address is named."""
FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
THINK = {"tool_calls": [{"name": "think", "arguments": {"thought": "again"}}]}
ASK = {"tool_calls": [{"name": "delegate", "arguments": {"agent": "helper", "task": "look"}}]}
PLAN = {"tool_calls": [{"name": "propose_plan", "arguments": {"plan": "look"}}]}
ACME = Tenancy(tenant="acme")
REFUSED = frozenset({"model_not_offered", "llm_config"})
"""How a conversation ends whose model is not offered, and one whose script is not a file of the operator's."""
ENTRANCES = ("HTTP", "Celery", "inbox", "schedule", "submit")
NAMES_OF_EACH = 44
IN_OPEN = 0x20
"""Of inotify."""


@dataclass
class World:
    """A store, an operator's table, and forbidden targets: servers of this machine, and files elsewhere."""

    cluster: FaultCluster
    good: str
    names: list[str]
    reached: list[str]
    watch: int
    variables: dict[str, str]

    def agents(self, name: str) -> dict[str, AgentSpec]:
        """Agents that name a model, by where they do."""
        llm, good = LLMSpec(model=name), LLMSpec(model=self.good)
        looping = LLMSpec(model=self.good.replace("good", "looping"))
        asking = LLMSpec(model=self.good.replace("good", "asking"))
        planning = LLMSpec(model=self.good.replace("good", "planning"))
        condenser = LLMSummarizingCondenserSpec(llm=llm, keep_first=0, max_size=2)
        policy = LoopPolicy(responses=("switch_model",), fallback_model=name, action_observation=2)
        return {
            "model": AgentSpec(llm=llm),
            "condenser": AgentSpec(llm=good, condenser=condenser),
            "critic": AgentSpec(llm=good, goal=GoalSpec(critic=CriticSpec(llm=llm))),
            "loop policy": AgentSpec(llm=looping, loop_policy=policy),
            "delegate": AgentSpec(llm=asking, enable_delegation=True, delegates={"helper": AgentSpec(llm=llm)}),
            "condenser of a pipeline": AgentSpec(llm=good, condenser=CondenserPipelineSpec(condensers=(condenser,))),
            "plan": AgentSpec(name="PlanningAgent", llm=planning, plan=PlanSpec(llm=llm, needs_approval=False)),
            "SDK agent": AgentSpec(name="CodeActAgentSDK", llm=llm),
        }

    def names_for(self, number: int, count: int) -> list[str]:
        """Names for one way: all for the first, and for each other one some of them, with another start."""
        start = number * NAMES_OF_EACH % len(self.names)
        return self.names if number == 0 else (self.names * 2)[start : start + count]

    def opened(self) -> bytes:
        """Return the opened files, as inotify reports them."""
        try:
            return os.read(self.watch, 4096)
        except BlockingIOError:
            return b""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    scripts, outside = tmp_path / "scripts", tmp_path / "outside"
    for folder in (scripts, outside):
        folder.mkdir()
    for name, turns in {
        "good": [FINISH],
        "looping": [THINK] * 8,
        "asking": [ASK, FINISH],
        "planning": [PLAN, FINISH],
    }.items():
        (scripts / f"{name}.json").write_text(json.dumps({"turns": turns}))
    for path in (outside / "canary.json", outside / "canary.jsonl"):
        path.write_text('{"turns": []}')
    os.mkfifo(outside / "pipe")
    (scripts / "link.json").symlink_to(outside / "canary.json")
    (scripts / "folder").symlink_to(outside)
    os.mkfifo(scripts / "pipe")
    reached: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(f"{writer.get_extra_info('sockname')}: {(await reader.read(300))!r}")
        writer.close()

    async with AsyncExitStack() as stack:
        mine = await asyncio.start_server(serve, "127.0.0.1", 0)
        await stack.enter_async_context(mine)
        for port in LOCAL_PORTS:
            with suppress(OSError):  # taken
                await stack.enter_async_context(await asyncio.start_server(serve, "127.0.0.1", port))
        at = f"127.0.0.1:{mine.sockets[0].getsockname()[1]}"
        table = tmp_path / "models.toml"
        table.write_text(
            f'{TABLE}[llm.near]\nmodel = "openai/near"\nbase_url = "http://{at}/v1"\ntenants = ["other"]\n'
            f'[llm.routed]\nmodel = "openai/routed"\nbase_url = "http://{at}/v1"\n'
            f'router = {{kind = "class", path = "{__name__}:RouterByText", choices = ["theirs"]}}\n'
        )
        variables = {"LLM_CONFIG": str(table), "LLM_SCRIPTS_DIR": str(scripts), "DECKHANDS_ANY_MODEL": ""}
        addressed = ("openai/{}", "custom/http://{}/v1", "oobabooga/http://{}", "huggingface/http://{}", "http://{}/x")
        names = [name.format(at) for name in addressed] + ["near", "openai/near", "llamafile/http://[::1]:8080"]
        odd = [f"{outside}/canary.json", f"{outside}/pipe", "../outside/canary.json", "link.json", "folder/canary.json"]
        odd += ["pipe", "folder/pipe", "/proc/self/environ", f"/proc/self/root{outside}/canary.json", "/dev/zero", ""]
        files = [prefix + name for name in odd for prefix in ("scripted/", "replay/")]
        libc = ctypes.CDLL(None)
        watch = libc.inotify_init1(os.O_NONBLOCK)
        stack.callback(os.close, watch)
        for path in (*outside.iterdir(), scripts / "pipe"):
            assert libc.inotify_add_watch(watch, os.fsencode(path), IN_OPEN) > 0
        scripted = [name for name in NAMES if name.startswith(("scripted/", "replay/"))]
        whole = [name for name in NAMES if name not in scripted and len(name) <= 1_000]
        cluster = await stack.enter_async_context(FaultCluster(tmp_path / "cluster").running())
        good = f"scripted/{scripts}/good.json"
        yield World(cluster, good, whole + names + files + scripted, reached, watch, variables)


@pytest.mark.parametrize(
    "count", [pytest.param(15, id="some"), pytest.param(NAMES_OF_EACH, id="many", marks=pytest.mark.slow)]
)
async def test_no_way_to_name_a_model_leads_beyond_the_table(world: World, count: int) -> None:
    """Most tasks arrive before the worker starts, so no ingress knows the offers: the worker alone decides."""
    client, cluster, limit = world.cluster.client, world.cluster, asyncio.Semaphore(16)
    begun: dict[str, tuple[str, str]] = {}
    (cluster.root / "work").mkdir()
    cluster.start_ingress()
    good = [await client.submit("canary task", model=world.good, tenancy=ACME) for _ in range(3)]
    agents = ("model", "SDK agent", "condenser", "critic", "loop policy", "delegate", "condenser of a pipeline", "plan")

    async def begin(way: str, name: str) -> str:
        if way == "switch":
            conversation_id = await client.submit("canary task", model=world.good, tenancy=ACME)
            message = MessageAction(content="continue", source=EventSource.USER)
            switch = ModelSwitched(model=name, source=EventSource.USER)
            await client.log.append(conversation_id, [switch, message])
            return conversation_id
        if way == "fork":
            return await client.fork(await client.submit("canary task", model=world.good, tenancy=ACME), model=name)
        if way == "router":
            return await client.submit(f"choose <{name}>", model="routed", tenancy=ACME)
        if way == "Python client":
            async with AsyncConversation(cluster=cluster.store.url, model=name, tenancy=ACME) as conversation:
                await conversation.send_message("canary task")
                return conversation.id
        return await client.submit("canary task", agent=world.agents(name)[way], tenancy=ACME)

    async def begin_one(way: str, name: str) -> None:
        async with limit:
            with suppress(DeckhandsError, ValidationError):
                begun[await begin(way, name)] = way, name

    ways = (*agents, "switch", "fork", "router", "Python client")
    wanted = [(way, name) for number, way in enumerate(ways) for name in world.names_for(number, count)]
    await asyncio.gather(*(begin_one(*each) for each in wanted))
    assert len(begun) > 0.9 * len(wanted) >= 0.9 * 12 * count

    async with _entrances(world, count) as entrances:
        await entrances.post(begun)
        await entrances.queue(begun)
        await entrances.schedule(begun)
        await entrances.submit_file(begun)
        assert {way for way, _ in begun.values()} == {*ways, *ENTRANCES}
        cluster.start_controller(**world.variables)
        await cluster.settle([*good, *begun], limit=240.0)
        await entrances.check_answers()
    for conversation_id in good:
        assert (await client.row(conversation_id)).state == "finished"
    wrong = []
    for conversation_id, (way, name) in begun.items():
        summary = await client.summary(conversation_id)
        is_right = summary.state == "finished" if way == "delegate" else summary.error_code in REFUSED
        wrong += [] if is_right else [(way, name, summary.state, summary.error_code)]
    assert wrong == []
    assert world.reached == []
    assert world.opened() == b""
    for worker in ("c1", "d1"):
        assert "canary" not in cluster.log_of(worker).replace("canary.json", "")


class RouterByText:
    """A router of the operator's that chooses what the task says."""

    def select_llm(self, request: ModelRequest) -> str:
        texts = [part.text for message in request.messages for part in message.content if isinstance(part, TextPart)]
        found = re.search(r"choose <(.*)>", "\n".join(texts), re.DOTALL)
        return found[1]


class _Entrances:
    """The entrances of a cluster, each of which is given every name."""

    def __init__(self, world: World, http: httpx2.AsyncClient, producer: Producer, count: int) -> None:
        self.world = world
        self.http = http
        self.producer = producer
        self.names = world.names_for(len(ENTRANCES) + 12, count)
        self.results: list[AsyncResult] = []
        self.queued = 0

    async def post(self, begun: dict[str, tuple[str, str]]) -> None:
        for name in self.names:
            body = json.dumps({"task": "canary task", "model": name}).encode()
            answer = await self.http.post("/conversations", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code < 500, (name, answer.text)
            if answer.is_success:
                begun[answer.json()["conversation_id"]] = "HTTP", name

    async def queue(self, begun: dict[str, tuple[str, str]]) -> None:
        """Send a Celery task and an entry of the inbox for each name, and wait until the ingress has taken them."""
        store = self.world.cluster.client.store
        for number, name in enumerate(self.names):
            options = {"model": name, "tenant": "acme"}
            self.results.append(self.producer.send("run", "canary task", kwargs=options))
            await put(store, {"id": str(number), "task": "canary task", **options})
        for result, name in zip(self.results, self.names, strict=True):
            conversation_id = derive_task_conversation_id(result.id)
            meta = store.known_keys(conversation_id).meta

            async def is_taken(result: AsyncResult = result, meta: str = meta) -> bool:
                return bool(await store.connection.call("EXISTS", meta)) or result.state == "FAILURE"

            await until(is_taken, limit=60.0, what="a task that the ingress has taken")
            if await store.connection.call("EXISTS", meta):
                begun[conversation_id] = "Celery", name
        await until(self._answered, limit=60.0, what="an answer to each entry")
        for reply in await replies(store):
            if reply.conversation_id:
                begun[reply.conversation_id] = "inbox", self.names[int(reply.request_id)]

    async def _answered(self) -> bool:
        return {reply.request_id for reply in await replies(self.world.cluster.client.store)} >= set(
            map(str, range(len(self.names)))
        )

    async def schedule(self, begun: dict[str, tuple[str, str]]) -> None:
        client = self.world.cluster.client
        book, due = ScheduleRepository(client.store, client.secrets), None
        for number, name in enumerate(self.names):
            with suppress(DeckhandsError, ValidationError):
                request = TaskSpec(task="canary task", tenant="acme", model=name)
                due = await book.add(Schedule(name=f"s{number}", cron="0 6 1 1 *"), request)
        assert due is not None
        await start_due(client, book, due)
        for number, name in enumerate(self.names):
            conversation_id = derive_tick_conversation_id(f"s{number}", due)
            if await client.store.connection.call("EXISTS", client.store.known_keys(conversation_id).meta):
                begun[conversation_id] = "schedule", name

    async def submit_file(self, begun: dict[str, tuple[str, str]]) -> None:
        lines, path = [], self.world.cluster.root / "tasks.jsonl"
        for number, name in enumerate(self.names):
            with suppress(DeckhandsError, ValidationError):
                to_agent_spec(None, TaskSpec(task="canary task", model=name).model)
                lines.append(json.dumps({"id": str(number), "task": "canary task", "model": name}))
        path.write_text("\n".join(lines) + "\n")
        done = await asyncio.to_thread(
            deckhands,
            "submit",
            "--from",
            str(path),
            "--tenant",
            "acme",
            "--json",
            DECKHANDS_URL=self.world.cluster.store.url,
        )
        for line in map(json.loads, done.splitlines()):
            begun[line["conversation_id"]] = "submit", self.names[int(line["id"])]

    async def check_answers(self) -> None:
        """Check that the entrance answers each task with a refusal."""
        for result, name in zip(self.results, self.names, strict=True):
            await self.producer.until_state(result, "FAILURE")
            assert any(word in str(result.result) for word in (*REFUSED, "model")), (name, result.result)


def deckhands(*arguments: str, **environment: str) -> str:
    """Run the program, and return its output."""
    known = {name: text for name, text in os.environ.items() if not name.startswith(("DECKHANDS_", "LLM_"))}
    command = [sys.executable, "-m", "deckhands", *arguments]
    done = subprocess.run(command, env=known | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@asynccontextmanager
async def _entrances(world: World, count: int) -> AsyncIterator[_Entrances]:
    gateway = Gateway(world.cluster.client.store, "", options=ServerOptions(port=0))
    producer = Producer(world.cluster)
    try:
        async with caller(gateway, "acme") as http:
            yield _Entrances(world, http, producer, count)
    finally:
        producer.close()


@pytest.fixture
async def gateway(valkey_store: Store, tmp_path: Path) -> Gateway:
    """A server beside a controller worker that says what it offers."""
    offered = models(tmp_path, LLM_SCRIPTS_DIR=str(tmp_path))
    about = {OFFERED_MODELS: offered.table.model_dump_json(), "models": "\n".join(offered.offered)}
    about["agents"] = ",".join(list_agents())
    await Membership(valkey_store, "c1", "controller", about=about, ttl_seconds=3600.0).register()
    return Gateway(valkey_store, "", options=ServerOptions(port=0))


@asynccontextmanager
async def caller(gateway: Gateway, tenant: str) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {await add_key(gateway.store, tenant)}"}
    async with (
        serve_in_loop(gateway) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30) as client,
    ):
        yield client


async def test_a_tenant_sees_only_its_models(gateway: Gateway) -> None:
    all_others = ["anthropic/claude-sonnet-4-5", "gemini/*", "replay/FILE", "scripted/FILE"]
    for tenant, profiles in {"acme": [], "other": ["theirs"], "*": ["theirs"]}.items():
        async with caller(gateway, tenant) as client:
            found = (await client.get("/models")).json()
            assert found["names"] == sorted([*all_others, *profiles])
            assert (found["profiles"], found["defaults"]) == (profiles, ["anthropic/claude-sonnet-4-5"])
            ids = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
            assert ("CodeActAgent/theirs" in ids) == bool(profiles)
            assert "CodeActAgent" in ids


async def test_each_entrance_refuses_a_model_that_is_not_offered(gateway: Gateway) -> None:
    client, name = gateway.client, "openai/gpt-5"
    begun = await client.submit("do it", tenancy=ACME)
    request = TaskSpec(task="do it", tenant="acme", model=name)
    attempts = {
        "submit": lambda: client.submit("do it", model=name, tenancy=ACME),
        "request": lambda: client.submit(request),
        "fork": lambda: client.fork(begun, model=name),
        "message": lambda: client.send_message(begun, "continue", model=name),
        "resume": lambda: client.resume(begun, model=name),
        "recover": lambda: client.recover(begun, option=1, model=name),
        "change": lambda: client.change(begun, Change(), model=name),
        "change of the agent": lambda: client.change(begun, Change(agent=AgentSpec(llm=LLMSpec(model=name)))),
        "schedule": lambda: ScheduleRepository(client.store, client.secrets).add(
            Schedule(name="nightly", cron="0 6 1 1 *"), request
        ),
    }
    for way, attempt in attempts.items():
        with pytest.raises(ModelNotOffered, match="Offered models: anthropic/") as caught:
            await attempt()
        assert "theirs" not in caught.value.remedy, way
    bodies = {
        "/conversations": {"task": "do it", "model": name},
        "/v1/chat/completions": {"model": f"CodeActAgent/{name}", "messages": [{"role": "user", "content": "hi"}]},
        f"/conversations/{begun}/messages": {"content": "continue", "model": name},
        f"/conversations/{begun}/resume": {"model": name, "reason": "again"},
        f"/conversations/{begun}/fork": {"model": name},
    }
    async with caller(gateway, "acme") as caller_of_acme:
        for path, body in bodies.items():
            answer = await caller_of_acme.post(path, json=body)
            assert 400 <= answer.status_code < 500, (path, answer.text)
            assert "model_not_offered" in answer.text, (path, answer.text)
    async with caller(gateway, "*") as operator:
        wanted = {"cron": "0 6 1 1 *", "request": {"task": "do it", "model": name}, "reason": "each year"}
        answer = await operator.put("/schedules/nightly", json=wanted)
        assert (answer.status_code, answer.json()["code"]) == (422, "model_not_offered")
        assert (await operator.get("/schedules")).json() == []
    assert len(await client.recent()) == 1
