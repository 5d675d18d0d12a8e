"""A shared budget where the provider counts more tokens than were estimated: real counts correct the estimates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from broker.contract.events import ModelReply
from broker.limits.ledger import Ledger
from tests.integration.crowds import Crowd, script
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)

BUDGET_USD = 0.60
PRICES = {"LLM_INPUT_COST_PER_TOKEN": "0.000002", "LLM_OUTPUT_COST_PER_TOKEN": "0.00001"}
CALL_USD = 0.024 + 0.001
"""About five times what is estimated for a prompt of CodeAct."""


@pytest.fixture
async def crowd(tmp_path: Path, model_server: Callable[..., RunningModelServer]) -> AsyncIterator[Crowd]:
    provider = model_server("--script", script(tmp_path, 30, prompt_tokens=12_000), "--latency", "0.1")
    made = Crowd(tmp_path, provider)
    async with made.running():
        yield made


async def test_fifty_conversations_exceed_a_budget_by_one_call_at_most(crowd: Crowd) -> None:
    ledger = Ledger(crowd.client.store)
    await ledger.set_limit("tenant:acme", BUDGET_USD)
    ids = await crowd.begin(50, tenant="acme")
    crowd.start("c1", **PRICES, LLM_MAX_OUTPUT_TOKENS="100")

    async def all_wait() -> bool:
        tenant = await ledger.load_account("tenant:acme")
        if tenant.reserved_usd > 0.0 or tenant.spent_usd < BUDGET_USD - CALL_USD:
            return False
        return all([(await crowd.client.row(cid)).wait_reason == "waiting_for_budget" for cid in ids])

    await crowd.until(all_wait, what="the end of the budget", limit=90.0)
    costs = [event.cost_usd for log in await crowd.logs(ids) for event in log if isinstance(event, ModelReply)]
    assert costs == pytest.approx([CALL_USD] * len(costs))
    spent = sum(cost or 0.0 for cost in costs)
    assert spent <= BUDGET_USD + CALL_USD, f"{len(costs)} calls for {spent:.3f} USD"
