"""Model calls of a real worker through real clients: after an empty reply, one that did not fit, and a stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.contract.events import AgentSpec, LLMSpec, ModelCallFailed
from tests.faults.harness import FaultCluster
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)

THINK = {"tool_calls": [{"name": "think", "arguments": {"thought": "hm"}}]}
OPENAI, LITELLM = ("openai/mine", "openai"), ("openai/mine", "litellm")
BACKENDS = [
    ("claude-sonnet-4-5", "auto"),
    *(pytest.param(*other, marks=pytest.mark.soak) for other in (OPENAI, LITELLM)),
]
START_LIMIT_SECONDS = 1_200
"""How long a worker may take to start and to import a client, on however busy a machine."""


def start_controller(faults: FaultCluster, server: RunningModelServer, model: str, **settings: str) -> None:
    """Start a controller that asks the server, at the address where the client of the model looks."""
    url = server.url if model.startswith("claude") else f"{server.url}/v1"
    faults.start_controller(LLM_BASE_URL=url, LLM_API_KEY="k", LLM_NATIVE_TOOL_CALLING="true", **settings)


@pytest.mark.parametrize(
    ("model", "configured", "sent"),
    [
        ("claude-sonnet-4-5", None, [0.0, 1.0, 1.0, 0.0, 0.0]),
        pytest.param("openai/mine", None, [None] * 5, marks=pytest.mark.soak),
        ("openai/mine", "0.3", [0.3] * 5),
    ],
)
async def test_after_an_empty_reply_the_temperature_is_one(
    cluster: FaultCluster,
    model_server: Callable[..., RunningModelServer],
    tmp_path: Path,
    model: str,
    configured: str | None,
    sent: list[float | None],
) -> None:
    script = tmp_path / "turns.json"
    script.write_text(json.dumps({"turns": [THINK, {"text": "Done."}]}))
    server = model_server("--script", str(script))
    chosen = {} if configured is None else {"LLM_TEMPERATURE": configured}
    start_controller(cluster, server, model, LLM_RETRY_MULTIPLIER="0.1", LLM_RETRY_MIN_WAIT="0.1", **chosen)
    server.plan({"kind": "empty_choices", "times": 2}, {"kind": "unavailable", "turn": 1})
    cid = await cluster.client.submit("Begin.", agent=AgentSpec(llm=LLMSpec(model=model)))
    await cluster.settle([cid])
    failures = [event.code for event in await cluster.client.events(cid) if isinstance(event, ModelCallFailed)]
    assert failures == ["no_response", "no_response", "service_unavailable"]
    assert [request["body"].get("temperature") for request in server.requests()] == sent


@pytest.mark.timeout(START_LIMIT_SECONDS)
@pytest.mark.parametrize("kind", [pytest.param("hang", marks=pytest.mark.soak), "hang_body"])
@pytest.mark.parametrize(("model", "backend"), BACKENDS)
async def test_a_stop_closes_the_connection(
    cluster: FaultCluster, model_server: Callable[..., RunningModelServer], model: str, backend: str, kind: str
) -> None:
    server = model_server("--builtin", "bash:3")
    start_controller(cluster, server, model, LLM_BACKEND=backend)
    server.plan({"kind": kind})
    cid = await cluster.client.submit("Begin.", agent=AgentSpec(llm=LLMSpec(model=model)))
    await asyncio.to_thread(server.wait, in_flight=1)
    summary = await cluster.client.cancel(cid, wait_seconds=100.0)
    await asyncio.to_thread(server.wait, disconnected=1)  # by itself the server would never stop
    assert summary.state == "stopped"
    assert server.counts()["received"] == 1


@pytest.mark.parametrize(("model", "backend"), BACKENDS)
async def test_a_prompt_that_does_not_fit_is_condensed(
    cluster: FaultCluster, model_server: Callable[..., RunningModelServer], tmp_path: Path, model: str, backend: str
) -> None:
    of_our_own = "The input (61709 tokens) is longer than the model's context length (40960 tokens)."
    script = tmp_path / "turns.json"
    script.write_text(json.dumps({"turns": [THINK] * 5 + [{"text": "Done."}] * 2}))
    server = model_server("--script", str(script))
    start_controller(cluster, server, model, LLM_BACKEND=backend)
    server.plan({"kind": "context_overflow", "turn": 4, "text": of_our_own if backend == "openai" else None})
    agent = AgentSpec(llm=LLMSpec(model=model), enable_stuck_detection=False)
    cid = await cluster.client.submit("Begin.", agent=agent)
    await cluster.settle([cid])
    kinds = [event.kind for event in await cluster.client.events(cid)]
    failed = kinds.index("model.failed")
    assert kinds[failed + 1 : failed + 4] == ["action.condensation_request", "action.condensation", "model.reply"]
    lengths = [len(request["body"]["messages"]) for request in server.requests()]
    assert lengths[5] < lengths[4]
    assert kinds.count("model.failed") == 1
