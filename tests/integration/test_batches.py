"""Calls by the providers' batch APIs, with real workers: gathered, bought once under kills, delivered once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import AgentSpec, Event, LLMSpec, ModelCallDeferred, ModelCallFailed, ModelReply, Tenancy
from broker.limits.ledger import Ledger, to_nano
from controller_worker.loop.replay import replay
from tests.faults.harness import FaultCluster
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)

USAGE = {"usage": {"prompt_tokens": 2_000, "completion_tokens": 50}}
TURNS = [
    {"tool_calls": [{"name": "think", "arguments": {"thought": "hm"}}], **USAGE},
    {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}], **USAGE},
]
both = pytest.mark.parametrize(
    "evaluation", ["anthropic", pytest.param("openai", marks=pytest.mark.soak)], indirect=True
)
anthropic = pytest.mark.parametrize("evaluation", ["anthropic"], indirect=True)
openai = pytest.mark.parametrize("evaluation", ["openai"], indirect=True)
CALL_USD = (2_000 * 0.000005 + 50 * 0.0001) / 2


class Evaluation(FaultCluster):
    """Conversations without waiting users, and a provider with a batch API."""

    def __init__(self, root: Path, provider: RunningModelServer, protocol: str) -> None:
        super().__init__(root)
        self.provider = provider
        self.protocol = protocol

    def start(self, name: str, batch: dict[str, Any] | None = None, **environment: str) -> None:
        spec = {"gather_seconds": 0.5, "poll_seconds": 0.2, "lost_after_seconds": 1.0} | (batch or {})
        self.start_controller(
            name,
            LLM_BASE_URL=self.provider.url + ("/v1" if self.protocol == "openai" else ""),
            LLM_API_KEY="secret-key",
            LLM_BACKEND=self.protocol,
            LLM_BATCH=json.dumps(spec),
            LLM_INPUT_COST_PER_TOKEN="0.000005",
            LLM_OUTPUT_COST_PER_TOKEN="0.0001",
            LLM_MAX_OUTPUT_TOKENS="100",
            LLM_RETRY_MIN_WAIT="0.1",
            LLM_RETRY_MULTIPLIER="0.1",
            **environment,
        )

    async def begin(self, count: int, *, headless: bool = True, tenancy: Tenancy | None = None) -> list[str]:
        agent = AgentSpec(llm=LLMSpec(model="large"))
        submit = self.client.submit
        return [await submit("task", agent=agent, headless=headless, tenancy=tenancy) for _ in range(count)]

    async def logs(self, ids: Sequence[str]) -> list[list[Event]]:
        return [await self.client.events(cid) for cid in ids]

    def bought(self) -> Counter[str]:
        """How often each prompt was bought."""
        return Counter(
            json.dumps(item["body"]["messages"]) for batch in self.provider.batches() for item in batch["items"]
        )

    async def everything_closed(self) -> None:
        """Wait until nothing of any batch is left in the store, but the lanes and the ids of the last days."""
        connection = self.client.store.connection

        async def is_closed() -> bool:
            keys = {key.decode() for key in await connection.call("KEYS", "deck:{0}:batch:*")}
            return keys <= {"deck:{0}:batch:lanes", "deck:{0}:batch:known"}

        await self.until(is_closed, what="the end of all batches")


@pytest.fixture
async def evaluation(
    tmp_path: Path, model_server: Callable[..., RunningModelServer], request: pytest.FixtureRequest
) -> AsyncIterator[Evaluation]:
    script = tmp_path / "provider.json"
    script.write_text(json.dumps({"turns": TURNS}))
    made = Evaluation(tmp_path, model_server("--script", str(script)), request.param)
    async with made.running():
        yield made


@pytest.mark.soak
@both
async def test_calls_of_many_conversations_go_in_few_batches(evaluation: Evaluation) -> None:
    ledger = Ledger(evaluation.client.store)
    for name in ("c1", "c2"):
        evaluation.start(name)
    ids = await evaluation.begin(12, tenancy=Tenancy(tenant="acme"))
    await evaluation.settle(ids)
    batches = evaluation.provider.batches()
    assert sum(len(batch["items"]) for batch in batches) == 24
    assert len(batches) <= 8
    for log in await evaluation.logs(ids):
        deferred = [event for event in log if isinstance(event, ModelCallDeferred)]
        replies = [event for event in log if isinstance(event, ModelReply)]
        assert [event.code for event in deferred] == ["batch", "batch"]
        assert [reply.cost_usd for reply in replies] == [pytest.approx(CALL_USD)] * 2
        assert replies[0].seen_id < deferred[0].id < replies[0].id
        assert replay(log).divergence is None
    await evaluation.everything_closed()
    account = await ledger.load_account("tenant:acme")
    assert (account.reserved_usd, account.lost_usd, to_nano(account.spent_usd)) == (0.0, 0.0, to_nano(24 * CALL_USD))
    assert evaluation.provider.counts()["received"] == 0  # no separate call was made
    await evaluation.settle(await evaluation.begin(1, headless=False))  # an interactive call is answered at once
    assert evaluation.provider.counts()["answered"] == 2
    assert len(evaluation.provider.batches()) == len(batches)


@pytest.mark.parametrize(
    ("evaluation", "place"),
    [
        ("anthropic", "batch_after_send"),
        pytest.param("openai", "batch_before_send", marks=pytest.mark.soak),
        pytest.param("openai", "batch_deliver", marks=pytest.mark.soak),
        pytest.param("anthropic", "batch_before_send", marks=pytest.mark.soak),
        pytest.param("openai", "batch_after_send", marks=pytest.mark.soak),
        pytest.param("anthropic", "batch_before_close", marks=pytest.mark.soak),
    ],
    indirect=["evaluation"],
)
async def test_a_worker_that_dies_with_a_batch_in_hand(evaluation: Evaluation, place: str) -> None:
    armed = f"controller.{place}:kill@1:{evaluation.root}/once"
    evaluation.start("c1", DECKHANDS_FAILPOINTS=armed)
    evaluation.start("c2", DECKHANDS_FAILPOINTS=armed)
    ids = await evaluation.begin(6)
    await evaluation.settle(ids)
    dead = [name for name, worker in evaluation.workers.items() if worker.poll() is not None]
    assert len(dead) == 1
    assert sum(evaluation.bought().values()) == 12  # each call once
    for log in await evaluation.logs(ids):
        assert sum(isinstance(event, ModelReply) for event in log) == 2
        assert not any(isinstance(event, ModelCallFailed) for event in log)
    await evaluation.everything_closed()


@anthropic
async def test_rate_limited_batch_is_sent_later_refused_batch_fails(evaluation: Evaluation) -> None:
    evaluation.provider.plan(
        {"kind": "rate_limit", "turn": -1, "retry_after": "1"}, {"kind": "unauthorized", "turn": -1, "times": None}
    )
    evaluation.start("c1")
    ids = await evaluation.begin(2)
    await evaluation.settle(ids)
    for log in await evaluation.logs(ids):
        failed = [event for event in log if isinstance(event, ModelCallFailed)]
        assert [event.code for event in failed] == ["authentication"]
    assert [(await evaluation.client.row(cid)).state for cid in ids] == ["error", "error"]
    await evaluation.everything_closed()


@openai
async def test_items_that_fail(evaluation: Evaluation) -> None:
    evaluation.provider.plan(*({"kind": kind, "turn": 1} for kind in ("expired", "missing", "canceled")))
    evaluation.start("c1")
    ids = await evaluation.begin(4)
    await evaluation.settle(ids)
    logs = await evaluation.logs(ids)
    failed = [event.code for log in logs for event in log if isinstance(event, ModelCallFailed)]
    assert sorted(failed) == ["bad_request", "no_response", "service_unavailable"]
    states = sorted([(await evaluation.client.row(cid)).state for cid in ids])
    assert states == ["error", "finished", "finished", "finished"]
    assert sum(evaluation.bought().values()) == 10
    await evaluation.everything_closed()


@anthropic
async def test_a_stopped_conversation_gives_its_call_up(evaluation: Evaluation) -> None:
    ledger = Ledger(evaluation.client.store)
    evaluation.start("c1", {"gather_seconds": 3600.0})
    (cid,) = await evaluation.begin(1, tenancy=Tenancy(tenant="acme"))
    await evaluation.until_kind(cid, "model.deferred")

    async def waits() -> bool:
        row = await evaluation.client.row(cid)
        return row.wait_reason == "batch" and row.owner == ""

    await evaluation.until(waits, what="the wait for a batch")
    assert (await ledger.load_account("tenant:acme")).reserved_usd > 0.0
    await evaluation.client.cancel(cid)
    await evaluation.settle([cid])
    await evaluation.everything_closed()

    async def is_given_back() -> bool:  # right behind the event that says so
        return (await ledger.load_account("tenant:acme")).reserved_usd == 0.0

    await evaluation.until(is_given_back, what="the reservation given back")
    account = await ledger.load_account("tenant:acme")
    assert (account.spent_usd, account.lost_usd) == (0.0, 0.0)
    assert evaluation.provider.batches() == []


@openai
@pytest.mark.soak
async def test_pause_keeps_the_call_and_message_buys_no_other(evaluation: Evaluation) -> None:
    evaluation.start("c1", {"gather_seconds": 2.0})
    (cid,) = await evaluation.begin(1)
    await evaluation.until_kind(cid, "model.deferred")
    await evaluation.client.pause(cid)
    await evaluation.until(evaluation.provider.batches, what="the batch")
    await asyncio.gather(evaluation.client.send_message(cid, "and quickly"), evaluation.client.resume(cid))
    await evaluation.settle([cid])
    assert max(evaluation.bought().values()) == 1
    replies = [event for event in await evaluation.client.events(cid) if isinstance(event, ModelReply)]
    firsts = [item for item in evaluation.bought() if "and quickly" not in item]
    assert len(firsts) == 1
    assert len(replies) == sum(evaluation.bought().values())
