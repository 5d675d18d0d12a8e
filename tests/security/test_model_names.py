"""Which names of models a task may give: each way to name one, and names of many kinds, also at a real worker."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from pydantic import ValidationError

from broker.contract.actions import MessageAction
from broker.contract.condenser_specs import CondenserPipelineSpec, LLMSummarizingCondenserSpec
from broker.contract.events import AgentSpec, EventSource, LLMSpec, ModelSwitched
from broker.contract.offered_models import OFFERED_MODELS, ModelNotOffered, named_models
from broker.contract.policies import LoopPolicy
from broker.contract.specs import CriticSpec, GoalSpec, PlanSpec, Tenancy
from broker.coordination.membership import Membership
from broker.runtime.clock import SystemClock
from broker.runtime.errors import DeckhandsError
from broker.store.store import Store
from controller_worker.agents.registry import known_agents
from controller_worker.model.models import Models
from controller_worker.providers.errors import LLMConfigError
from deckhands.client.changing import Change
from deckhands.client.tasks.spec import TaskSpec
from deckhands.operations.schedules.book import ScheduleBook
from deckhands.operations.schedules.schedule import Schedule
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serving
from tests.faults.harness import FaultCluster
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
    assert set(named_models(spec)) == set("abcdef")


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
        client, _ = await offered.of(offered.choose(LLMSpec(model=f"scripted/{name}"), "acme"))
        await client.aclose()
    refused = ("link.json", "device", "pipe", "../outside.json", f"{scripts}/../outside.json", "/dev/ptmx", ".", "\0")
    for name in refused:
        for prefix in ("scripted/", "replay/"):
            with pytest.raises(LLMConfigError):
                await offered.of(offered.choose(LLMSpec(model=prefix + name), "acme"))


LOCAL_PORTS = (1234, 4000, 5000, 8000, 8080, 9997, 11434)
"""Where litellm looks for servers of this machine if no address is named."""
FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
THINK = {"tool_calls": [{"name": "think", "arguments": {"thought": "again"}}]}
ASK = {"tool_calls": [{"name": "delegate", "arguments": {"agent": "helper", "task": "look"}}]}
ACME = Tenancy(tenant="acme")
REFUSED = frozenset({"model_not_offered", "llm_config"})
"""How a conversation ends whose model is not offered, and one whose script is not a file of the operator's."""
IN_OPEN = 0x20
"""Of inotify."""


@dataclass
class World:
    """A store, an operator's table, and what nothing may reach: servers of this machine, and files elsewhere."""

    cluster: FaultCluster
    good: str
    names: list[str]
    files: list[str]
    reached: list[str]
    watch: int
    variables: dict[str, str]

    def agents(self, name: str) -> dict[str, AgentSpec]:
        """Agents that name a model, by where they do."""
        llm, good = LLMSpec(model=name), LLMSpec(model=self.good)
        looping = LLMSpec(model=self.good.replace("good", "looping"))
        asking = LLMSpec(model=self.good.replace("good", "asking"))
        condenser = LLMSummarizingCondenserSpec(llm=llm, keep_first=0, max_size=2)
        policy = LoopPolicy(responses=("switch_model",), fallback_model=name, action_observation=2)
        return {
            "model": AgentSpec(llm=llm),
            "condenser": AgentSpec(llm=good, condenser=condenser),
            "critic": AgentSpec(llm=good, goal=GoalSpec(critic=CriticSpec(llm=llm))),
            "loop policy": AgentSpec(llm=looping, loop_policy=policy),
            "delegate": AgentSpec(llm=asking, enable_delegation=True, delegates={"helper": AgentSpec(llm=llm)}),
            "condenser of a pipeline": AgentSpec(llm=good, condenser=CondenserPipelineSpec(condensers=(condenser,))),
        }

    def opened(self) -> bytes:
        """What was opened, as inotify says it."""
        try:
            return os.read(self.watch, 4096)
        except BlockingIOError:
            return b""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    scripts, outside = tmp_path / "scripts", tmp_path / "outside"
    for folder in (scripts, outside):
        folder.mkdir()
    for name, turns in {"good": [FINISH], "looping": [THINK] * 8, "asking": [ASK, FINISH]}.items():
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
        yield World(cluster, good, whole + names, files + scripted, reached, watch, variables)


async def test_no_way_to_name_a_model_leads_beyond_the_table(world: World) -> None:
    """The tasks are there before the worker is, so no entrance knows what is offered: the worker alone decides."""
    client, limit = world.cluster.client, asyncio.Semaphore(16)
    begun: dict[str, tuple[str, str]] = {}

    async def begin(way: str, name: str) -> None:
        async with limit:
            if way in ("switch", "fork"):
                conversation_id = await client.submit("canary task", model=world.good, tenancy=ACME)
                if way == "fork":
                    conversation_id = await client.fork(conversation_id, model=name)
                else:
                    message = MessageAction(content="continue", source=EventSource.USER)
                    switch = ModelSwitched(model=name, source=EventSource.USER)
                    await client.log.append(conversation_id, [switch, message])
            else:
                agent = world.agents(name)[way]
                conversation_id = await client.submit("canary task", agent=agent, tenancy=ACME)
            begun[conversation_id] = way, name

    (world.cluster.root / "work").mkdir()
    good = [await client.submit("canary task", model=world.good, tenancy=ACME) for _ in range(3)]
    ways = ("model", "switch", "fork", "condenser", "critic", "loop policy", "delegate", "condenser of a pipeline")
    names = [*world.names, *world.files]
    wanted = [(ways[0], name) for name in names]
    # Each of the other ways gets each third name, all of them together each name.
    wanted += [(way, name) for number, way in enumerate(ways[1:]) for name in names[number % 3 :: 3]]
    outcomes = await asyncio.gather(*(begin(*each) for each in wanted), return_exceptions=True)
    for (way, name), outcome in zip(wanted, outcomes, strict=True):
        assert outcome is None or isinstance(outcome, DeckhandsError | ValidationError), (way, name, outcome)
    assert len(begun) > 0.9 * len(wanted)
    world.cluster.start_controller(**world.variables)
    await world.cluster.settle([*good, *begun], limit=180.0)
    for conversation_id in good:
        assert (await client.row(conversation_id)).state == "finished"
    for conversation_id, (way, name) in begun.items():
        summary = await client.summary(conversation_id)
        if way == "delegate":
            assert summary.state == "finished", (way, name, summary)
        else:
            assert summary.error_code in REFUSED, (way, name, summary)
    assert world.reached == []
    assert world.opened() == b""
    assert "canary" not in world.cluster.log_of("c1").replace("canary.json", "")


@pytest.fixture
async def gateway(valkey_store: Store, tmp_path: Path) -> Gateway:
    """A server beside a controller worker that says what it offers."""
    offered = models(tmp_path, LLM_SCRIPTS_DIR=str(tmp_path))
    about = {OFFERED_MODELS: offered.table.model_dump_json(), "models": "\n".join(offered.offered)}
    about["agents"] = ",".join(known_agents())
    await Membership(valkey_store, "c1", "controller", about=about, ttl_seconds=3600.0).register()
    return Gateway(valkey_store, "", options=ServerOptions(port=0))


@asynccontextmanager
async def caller(gateway: Gateway, tenant: str) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {await add_key(gateway.store, tenant)}"}
    async with (
        serving(gateway) as port,
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
        "schedule": lambda: ScheduleBook(client.store, client.secrets).add(
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
