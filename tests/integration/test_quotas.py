"""Quotas and budgets with real controller workers, a provider that keeps its quota, and workers that die."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from broker.contract.events import Event, ModelCallDeferred, ModelCallFailed, ModelReply
from broker.contract.observations import AgentStateChangedObservation
from broker.limits.ledger import Ledger, to_nano
from tests.integration.crowds import Crowd, script
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)

PER_SECOND = 20


@pytest.fixture
async def crowd(
    tmp_path: Path, model_server: Callable[..., RunningModelServer], request: pytest.FixtureRequest
) -> AsyncIterator[Crowd]:
    """A store and a provider with the limits that the test's parameter names."""
    turns, *limits = request.param
    provider = model_server("--script", script(tmp_path, turns), *limits)
    made = Crowd(tmp_path, provider)
    async with made.running():
        yield made


LIMITED = (50, "--latency", "0.05", "--requests-per-minute", str(60 * PER_SECOND))


@pytest.mark.parametrize("crowd", [LIMITED], indirect=True)
async def test_a_provider_quota_is_used_up_and_not_passed(crowd: Crowd) -> None:
    for name in ("c1", "c2"):
        crowd.start(name, f"requests_per_minute = {60 * PER_SECOND}")
    ids = await crowd.begin(40)
    await crowd.until_replies(ids, 40)
    before, began = crowd.provider.counts(), time.monotonic()
    await crowd.until_replies(ids, 40 + 5 * PER_SECOND)
    after, seconds = crowd.provider.counts(), time.monotonic() - began
    # Limits that a loaded machine keeps; benchmarks/governor.py has the sharp ones.
    assert after["refused"] <= 0.05 * after["received"]
    used = (after["answered"] - before["answered"]) / (PER_SECOND * seconds)
    assert used >= 0.7, f"{used:.0%} of the quota"


@pytest.mark.parametrize("crowd", [(0, "--latency", "1.0", "--concurrency", "1")], indirect=True)
async def test_long_wait_is_shown_parked_and_ended_by_a_wake(crowd: Crowd) -> None:
    crowd.start("c1", "concurrency = 1")
    ids = await crowd.begin(8)
    await crowd.settle(ids)
    logs = await crowd.logs(ids)
    deferred = [event for log in logs for event in log if isinstance(event, ModelCallDeferred)]
    assert len(deferred) >= 1
    assert {event.code for event in deferred} == {"rate_limit"}
    for log in logs:
        states = [event.agent_state.value for event in log if isinstance(event, AgentStateChangedObservation)]
        waited = any(isinstance(event, ModelCallDeferred) for event in log)
        assert states == (["running", "rate_limited", "running", "finished"] if waited else ["running", "finished"])
        assert not any(isinstance(event, ModelCallFailed) for event in log)
    assert crowd.provider.counts()["refused"] == 0


@pytest.mark.parametrize("crowd", [(1, "--latency", "0")], indirect=True)
async def test_a_refused_key_does_not_keep_a_conversation_from_another(crowd: Crowd) -> None:
    other = '[[quota]]\nmodel = "openai/*"\nkey_env = "KEY_2"\nconcurrency = 4'
    crowd.start("c1", f'key_env = "KEY_1"\nconcurrency = 4\n{other}', KEY_1="sk-the-first", KEY_2="sk-the-second")
    crowd.provider.plan({"kind": "rate_limit", "retry_after": "600"})
    (cid,) = await crowd.begin(1)
    await crowd.settle([cid])
    used = [request["headers"]["Authorization"] for request in crowd.provider.requests()]
    assert (used[0] != used[1], used[1:]) == (True, [used[1]] * 2)
    assert not any(isinstance(event, ModelCallFailed) for event in await crowd.client.events(cid))


BUDGET = (30, "--latency", "0.05")
PRICES = {"LLM_INPUT_COST_PER_TOKEN": "0.00001", "LLM_OUTPUT_COST_PER_TOKEN": "0.0001", "LLM_MAX_OUTPUT_TOKENS": "100"}
CALL_USD = 0.02


async def until_used_up(crowd: Crowd, ledger: Ledger, ids: Sequence[str]) -> None:
    async def all_wait() -> bool:
        tenant = await ledger.load_account("tenant:acme")
        if tenant.reserved_usd > 0.0 or tenant.spent_usd + tenant.lost_usd < 2.0:
            return False  # one that was woken is about to call
        rows = [await crowd.client.row(cid) for cid in ids]
        return all(row.wait_reason == "waiting_for_budget" and row.owner == "" for row in rows)

    await crowd.until(all_wait, what="the end of the budget", limit=60.0)


@pytest.mark.soak
@pytest.mark.parametrize("crowd", [BUDGET], indirect=True)
async def test_a_budget_holds_under_kills_and_a_top_up_resumes(crowd: Crowd) -> None:
    ledger = Ledger(crowd.client.store)
    await ledger.set_limit("tenant:acme", 2.0)
    for name in ("c1", "c2"):
        crowd.start(name, **PRICES)
    ids = await crowd.begin(20, tenant="acme", experiment="swe")
    await crowd.until_replies(ids, 20)
    crowd.kill("c1")
    crowd.start("c3", **PRICES)

    await until_used_up(crowd, ledger, ids)
    tenant = await ledger.load_account("tenant:acme")
    spent = sum(reply_costs(await crowd.logs(ids)))
    assert to_nano(tenant.spent_usd) == spent
    assert tenant.reserved_usd == 0.0
    assert tenant.spent_usd + tenant.lost_usd > 1.0
    assert tenant.spent_usd <= 2.0 + CALL_USD
    await ledger.top_up("tenant:acme", 50.0)
    await crowd.settle(ids)

    async def is_charged() -> bool:  # the last reply of a conversation is in its log before it is in the ledger
        return (await ledger.load_account("tenant:acme")).reserved_usd == 0.0

    await crowd.until(is_charged, what="the last charge")
    assert to_nano((await ledger.load_account("tenant:acme")).spent_usd) == sum(reply_costs(await crowd.logs(ids)))
    assert to_nano((await ledger.load_account("experiment:acme/swe")).spent_usd) == to_nano(20 * 31 * CALL_USD)


def reply_costs(logs: Sequence[Sequence[Event]]) -> list[int]:
    """Return the costs of each conversation's replies, in billionths."""
    return [to_nano(sum(event.cost_usd or 0.0 for event in log if isinstance(event, ModelReply))) for log in logs]
