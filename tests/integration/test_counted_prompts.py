"""Prompts that the provider counts before the call: when, how often, and with which result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, Limits, LLMSpec, ModelCallFailed, ModelReply, Tenancy
from broker.limits.governor import CallGranted, CallOutcome
from broker.limits.ledger import Ledger
from broker.limits.quotas import QuotaTable
from broker.runtime.clock import SystemClock
from controller_worker.loop.services import Services
from controller_worker.model.models import Models
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import count_prompt_tokens
from tests.conversation_hands import Hands
from tests.integration.llm_requests import REQUEST
from tests.model_server.running_server import RunningModelServer
from tests.polling import until

pytest_plugins = ("tests.model_server.fixtures",)

COUNT_PATH = "/v1/messages/count_tokens"
CHEAP = {"LLM_INPUT_COST_PER_TOKEN": "0.000001", "LLM_OUTPUT_COST_PER_TOKEN": "0", "LLM_MAX_OUTPUT_TOKENS": "100"}
THINK = {"tool_calls": [{"name": "think", "arguments": {"thought": "hm"}}]}
FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}


@pytest.fixture
def serve(tmp_path: Path, model_server: Callable[..., RunningModelServer]) -> Callable[..., RunningModelServer]:
    def start(*counts: int) -> RunningModelServer:
        """Start a provider that counts so many tokens in the prompts of a conversation, one after another."""
        turns: list[dict[str, Any]] = [THINK] * (len(counts) - 1) + [FINISH]
        script = tmp_path / "provider.json"
        usages = [{"prompt_tokens": count, "completion_tokens": 10} for count in counts]
        script.write_text(json.dumps({"turns": [t | {"usage": u} for t, u in zip(turns, usages, strict=True)]}))
        return model_server("--script", str(script))

    return start


def ask(hands: Hands, server: RunningModelServer, *, quotas: str = "", **settings: str) -> AgentSpec:
    """Let the worker ask Claude at a server, with prompts counted."""
    env = {"LLM_BASE_URL": server.url, "LLM_API_KEY": "k", "LLM_COUNT_TOKENS": "true"} | CHEAP | settings
    models = Models(env, SystemClock(), is_open=True)
    hands.services = Services(hands.store, hands.log, hands.owners, models, QuotaTable.parse(quotas))
    return AgentSpec(llm=LLMSpec(model="anthropic/claude-test"), enable_stuck_detection=False)


async def run(hands: Hands, agent: AgentSpec, **fields: Any) -> AgentState:
    await hands.begin(agent=agent, **fields)
    loop = await hands.go()
    await until(lambda: loop.is_idle or bool(hands.gone), what="rest")
    return loop.state.lifecycle.agent_state


def asked(server: RunningModelServer) -> Sequence[str]:
    return ["count" if request["path"] == COUNT_PATH else "call" for request in server.requests()]


@pytest.mark.parametrize(
    ("settings", "limits"),
    [({}, Limits()), ({"LLM_COUNT_TOKENS": "false"}, Limits(max_budget_usd=0.004))],
    ids=["nothing depends on it", "not asked for"],
)
async def test_prompts_are_not_counted_for_nothing(hands, serve, settings, limits) -> None:
    server = serve(3_000)
    assert await run(hands, ask(hands, server, **settings), limits=limits) is AgentState.FINISHED
    assert asked(server) == ["call"]


async def test_a_count_keeps_a_call_within_the_budget(hands, serve) -> None:
    server = serve(9_000)  # 0.009 USD; about 0.0025 were estimated
    assert await run(hands, ask(hands, server), limits=Limits(max_budget_usd=0.004)) is AgentState.ERROR
    assert asked(server) == ["count"]
    failed = (await hands.events())[-2]
    assert isinstance(failed, ModelCallFailed)
    assert (failed.code, "$0.0090" in failed.content) == ("max_budget", True)


async def test_each_step_is_counted_once_at_most(hands, serve) -> None:
    server = serve(3_000, 3_100, 3_200, 3_300)
    await run(hands, ask(hands, server), limits=Limits(max_budget_usd=0.0096))
    assert asked(server) == ["call", "call", "count", "call"]  # then 0.0003 are left, with which no count would help
    replies = [event for event in await hands.events() if isinstance(event, ModelReply)]
    assert sum(reply.cost_usd or 0.0 for reply in replies) == pytest.approx(0.0093)


@pytest.mark.parametrize("kind", ["server_error", "rate_limit", "unknown_model"])
async def test_a_count_that_fails_leaves_the_estimate(hands, serve, kind) -> None:
    server = serve(3_000)
    server.plan({"kind": kind, "turn": -2, "times": None})
    assert await run(hands, ask(hands, server), limits=Limits(max_budget_usd=0.004)) is AgentState.FINISHED
    assert asked(server) == ["count", "call"]


@pytest.mark.parametrize("count", [0, 10**12])
async def test_an_absurd_count_is_none(hands, serve, count) -> None:
    server = serve(count)
    assert await run(hands, ask(hands, server), limits=Limits(max_budget_usd=0.004)) is AgentState.FINISHED


async def test_a_conversation_can_be_stopped_while_its_prompt_is_counted(hands, serve) -> None:
    server = serve(3_000)
    server.plan({"kind": "hang", "turn": -2, "times": None})
    await hands.begin(agent=ask(hands, server), limits=Limits(max_budget_usd=0.004))
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: asked(server) == ["count"], what="the count")
    await hands.ask("stopped")
    loop.wake()
    await until(lambda: loop.state.lifecycle.agent_state is AgentState.STOPPED and loop.is_idle, what="the stop")


async def test_a_prompt_beyond_the_window_is_not_sent(hands, serve) -> None:
    server = serve(4_100)
    agent = ask(hands, server, LLM_MAX_INPUT_TOKENS="2700").model_copy(update={"enable_history_truncation": False})
    assert await run(hands, agent) is AgentState.ERROR
    assert asked(server) == ["count"]
    failed = next(event for event in await hands.events() if isinstance(event, ModelCallFailed))
    assert failed.code == "context_window"
    assert "4,100 tokens; the limit of anthropic/claude-test is 2,700" in failed.content


async def test_a_fallback_for_long_prompts_is_asked_as_ever(hands, serve) -> None:
    server = serve(4_100)
    server.plan({"kind": "context_overflow", "turn": 0})
    fallbacks = json.dumps([{"use": "anthropic/claude-long", "on": ["context_window"]}])
    agent = ask(hands, server, LLM_MAX_INPUT_TOKENS="2700", LLM_FALLBACKS=fallbacks)
    assert await run(hands, agent) is AgentState.FINISHED
    assert asked(server) == ["count", "call", "call"]


async def test_first_call_on_a_shared_budget_reserves_counted_tokens(hands, serve) -> None:
    server = serve(3_000)
    ledger = Ledger(hands.store)
    await ledger.set_limit("tenant:acme", 1.0)
    assert await run(hands, ask(hands, server), tenancy=Tenancy(tenant="acme")) is AgentState.FINISHED
    assert asked(server) == ["count", "call"]


async def test_a_count_obeys_the_quota(hands, serve) -> None:
    server = serve(3_000)
    table = '[[quota]]\nmodel = "anthropic/*"\nconcurrency = 1'
    agent = ask(hands, server, quotas=table)
    governor = hands.services.permits.governor
    pool = governor.find_pool("anthropic/claude-test", "")
    assert pool is not None
    await governor.publish()
    other = await governor.reserve(pool, "other", "controller-2", input_tokens=1, output_tokens=1)
    assert isinstance(other, CallGranted)
    await hands.begin(agent=agent, limits=Limits(max_budget_usd=0.004))
    loop = await hands.go()
    assert asked(server) == []  # neither counted nor called while the only place is taken
    await governor.settle(pool, "other", "controller-2", CallOutcome.OK, took_seconds=0.1)
    loop.wake()
    await until(lambda: loop.state.lifecycle.agent_state is AgentState.FINISHED, what="the end")
    assert asked(server) == ["call"]  # the step had its turn to be counted


async def test_a_count_gives_its_place_back(hands, serve) -> None:
    server = serve(3_000)
    agent = ask(hands, server, quotas='[[quota]]\nmodel = "anthropic/*"\nconcurrency = 1')
    assert await run(hands, agent, limits=Limits(max_budget_usd=0.004)) is AgentState.FINISHED
    assert asked(server) == ["count", "call"]


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("anthropic/claude-test", COUNT_PATH),
        ("openai/responses/my-own", "/v1/responses/input_tokens"),
    ],
)
async def test_what_is_counted(serve, model: str, path: str) -> None:
    server = serve(1, 4_321)
    base_url = server.url + "/v1" if model.startswith("openai") else server.url
    config = LLMConfig.create(model=model, base_url=base_url, api_key="k", native_tool_calling=True)
    llm = create_llm(config, SystemClock())
    try:
        assert await count_prompt_tokens(llm, REQUEST) == 4_321
    finally:
        await llm.aclose()
    (request,) = server.requests()
    assert request["path"] == path
    assert "a.txt" in str(request["body"])
    assert "execute_bash" in str(request["body"])
    assert not {"max_tokens", "temperature", "stream", "stop_sequences"} & set(request["body"])


async def test_a_server_without_such_an_endpoint_is_not_asked(serve) -> None:
    server = serve(1, 4_321)
    llm = create_llm(LLMConfig.create(model="my-own", base_url=server.url + "/v1", api_key="k"), SystemClock())
    try:
        assert await count_prompt_tokens(llm, REQUEST) is None
    finally:
        await llm.aclose()
    assert server.requests() == []
