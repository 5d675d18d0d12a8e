"""Quotas and budgets for the whole cluster, against a provider that keeps its quota, while workers are killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.cluster import POLL_SECONDS, BenchCluster, model_server_arguments, running_cluster
from benchmarks.figures import Figure, Result, Spread
from broker.contract.events import AgentSpec, Event, ModelCallFailed, ModelReply, Tenancy
from broker.limits.ledger import Ledger, to_nano
from tests.model_server.running_server import RunningModelServer

REQUESTS_PER_SECOND = 20
LATENCY_SECONDS = 0.2
USD_PER_TOKEN = 0.00005
CALL_USD = 200 * USD_PER_TOKEN
BUDGET_USD = 10.0
LIMIT_SECONDS = 240.0


async def measure(bench: Bench) -> Result:
    """Measure the quota, the overtaking, the kill and the budget, each on a new cluster."""
    processes = bench.choose(smoke=2, short=4, full=16)
    conversations = bench.choose(smoke=30, short=100, full=500)
    parked = bench.choose(smoke=30, short=200, full=2_000)
    payers = bench.choose(smoke=10, short=60, full=200)
    seconds = bench.choose(smoke=5, short=20, full=60)
    refused, unused = await _quota(bench.directory / "quota", processes, conversations, seconds)
    waits = await _overtaking(bench.directory / "overtaking", min(processes, 4), parked)
    leak = await _kill(bench.directory / "kill")
    overshoot, difference, lost = await _budget(bench.directory / "budget", min(processes, 4), payers)
    note = (
        f"Quota: {processes} controller processes, {conversations} conversations that want to call all the time, "
        f"{REQUESTS_PER_SECOND} requests a second allowed, {seconds} s. Overtaking: {parked} batch conversations "
        f"parked, {len(waits)} interactive ones, one after another; waits are what each took less the model's latency. "
        "Kill: the time from SIGKILL of a worker with twenty calls under way until none of its places is held. Budget: "
        f"{payers} conversations on ${BUDGET_USD:g}, calls of ${CALL_USD:g}, workers killed every two seconds; "
        f"{lost} calls were lost by that."
    )
    return Result(
        "Quotas and budgets",
        [
            Figure("calls that the provider refused", "%", Spread.of([refused], scale=100), 1.0),
            Figure("quota that was left unused", "%", Spread.of([unused], scale=100), 5.0),
            Figure("wait of an interactive conversation, p95", "s", Spread.of([_p95(waits)]), 1.0),
            Figure("places held by a killed worker", "s", Spread.of([leak]), 5.0),
            Figure("budget passed by, in calls", "", Spread.of([overshoot / CALL_USD]), 1.0),
            Figure("ledger less the sum over events", "10⁻⁹ $", Spread.of([difference]), 0.0),
        ],
        note,
    )


async def _quota(directory: Path, processes: int, conversations: int, seconds: int) -> tuple[float, float]:
    """Return the share of calls refused, and of the quota unused, over so many seconds under full demand."""
    per_minute = 60 * REQUESTS_PER_SECOND
    async with running_cluster(directory) as cluster:
        script = _script(directory / "script.json", turns=10_000)
        provider = _provider(script, "--requests-per-minute", str(per_minute))
        try:
            await _start(cluster, processes, provider, f"requests_per_minute = {per_minute}")
            await _submit(cluster, conversations)
            async with asyncio.timeout(LIMIT_SECONDS):
                while provider.counts()["answered"] < conversations // 2 + 4 * processes:
                    await asyncio.sleep(POLL_SECONDS)
            before, began = provider.counts(), time.monotonic()
            await asyncio.sleep(seconds)
            after, passed = provider.counts(), time.monotonic() - began
        finally:
            provider.stop()
    answered = after["answered"] - before["answered"]
    refused = after["refused"] - before["refused"]
    return refused / (answered + refused), max(0.0, 1 - answered / (REQUESTS_PER_SECOND * passed))


async def _overtaking(directory: Path, processes: int, parked: int) -> list[float]:
    """Return how long each interactive conversation waited behind the parked ones."""
    per_minute = 60 * REQUESTS_PER_SECOND
    waits = []
    async with running_cluster(directory) as cluster:
        provider = _provider(_script(directory / "script.json", turns=0), "--requests-per-minute", str(per_minute))
        try:
            await _start(cluster, processes, provider, f"requests_per_minute = {per_minute}")
            await _submit(cluster, parked + 40 * REQUESTS_PER_SECOND)
            async with asyncio.timeout(LIMIT_SECONDS):
                before = 0
                while (waiting := await _waiting(cluster)) < parked:
                    if waiting <= before:  # a slow machine parks them no faster than they are served
                        await _submit(cluster, 10 * REQUESTS_PER_SECOND)
                    before = waiting
                    await asyncio.sleep(1.0)
            for _ in range(20):
                (cid,) = await _submit(cluster, 1, priority="interactive")
                await cluster.client.wait_until_settled(cid, timeout_seconds=LIMIT_SECONDS)
                waits.append(_waited(await cluster.client.events(cid)))
        finally:
            provider.stop()
    return waits


async def _kill(directory: Path) -> float:
    """Return for how long the places of a killed worker served nobody."""
    async with running_cluster(directory) as cluster:
        provider = _provider(_script(directory / "script.json", turns=0), "--latency", "1000")
        try:
            (first,) = await _start(cluster, 1, provider, "concurrency = 20")
            await _submit(cluster, 60)
            await _until_in_flight(provider, 20)
            await _start(cluster, 1, provider, "concurrency = 20")
            os.kill(first, signal.SIGKILL)
            killed = time.monotonic()
            while await _held_by(cluster, first):
                await asyncio.sleep(POLL_SECONDS)
            return time.monotonic() - killed
        finally:
            provider.stop()


async def _budget(directory: Path, processes: int, payers: int) -> tuple[float, float, int]:
    """Return by how much the budget was passed, how far the ledger is from the events, and how many calls were lost."""
    async with running_cluster(directory) as cluster:
        ledger = Ledger(cluster.client.store)
        await ledger.set_limit("tenant:payer", BUDGET_USD)
        provider = _provider(_script(directory / "script.json", turns=10_000))
        prices = {name: str(USD_PER_TOKEN) for name in ("LLM_INPUT_COST_PER_TOKEN", "LLM_OUTPUT_COST_PER_TOKEN")}
        prices["LLM_MAX_OUTPUT_TOKENS"] = "100"
        try:
            workers = list(await _start(cluster, processes, provider, "", **prices))
            ids = await _submit(cluster, payers, tenant="payer")
            for round_number in itertools.count():
                tenant = await ledger.load_account("tenant:payer")
                is_used_up = tenant.reserved_usd == 0.0 and tenant.spent_usd + tenant.lost_usd >= BUDGET_USD
                if is_used_up and await _all_wait(cluster, ids):
                    break
                assert round_number < 60, "the budget is not used up"
                if round_number % 2 == 1 and round_number < 10:
                    os.kill(workers.pop(0), signal.SIGKILL)
                    workers += await _start(cluster, 1, provider, "", **prices)
                await asyncio.sleep(2.0)
            logs = [await cluster.client.events(cid) for cid in ids]
        finally:
            provider.stop()
    replies = [[event for event in log if isinstance(event, ModelReply)] for log in logs]
    spent = sum(to_nano(sum(reply.cost_usd or 0.0 for reply in log)) for log in replies)
    return max(0.0, tenant.spent_usd - BUDGET_USD), float(abs(to_nano(tenant.spent_usd) - spent)), tenant.lost_calls


def _script(path: Path, *, turns: int) -> Path:
    usage = {"prompt_tokens": 100, "completion_tokens": 100}
    finish = {"tool_calls": [{"name": "finish", "arguments": {"message": "Done."}}], "usage": usage}
    thoughts = [
        {"tool_calls": [{"name": "think", "arguments": {"thought": f"Step {number}."}}], "usage": usage}
        for number in range(turns)
    ]
    path.write_text(json.dumps({"description": "Thoughts.", "turns": [*thoughts, finish]}))
    return path


def _provider(script: Path, *arguments: str) -> RunningModelServer:
    return RunningModelServer([*model_server_arguments(script, latency_seconds=LATENCY_SECONDS), *arguments])


async def _start(
    cluster: BenchCluster, count: int, provider: RunningModelServer, quota: str, **environment: str
) -> Sequence[int]:
    settings: Mapping[str, str] = {
        "LLM_MODEL": "openai/scripted",
        "LLM_BASE_URL": f"{provider.url}/v1",
        "LLM_API_KEY": "none",
        "LLM_BACKEND": "openai",
        "DECKHANDS_QUOTAS": f'[[quota]]\nmodel = "openai/scripted"\n{quota}' if quota else "",
    }
    return await asyncio.gather(*(cluster.start_controller(**settings, **environment) for _ in range(count)))


async def _submit(cluster: BenchCluster, count: int, **tenancy: str) -> list[str]:
    agent = AgentSpec(enable_stuck_detection=False)
    told = Tenancy.model_validate(tenancy) if tenancy else None
    return [await cluster.client.submit("Do it.", agent=agent, tenancy=told) for _ in range(count)]


async def _waiting(cluster: BenchCluster) -> int:
    queue = f"{cluster.client.store.all_shards[0].quota('openai_scripted')}:waiting:1"
    return int(await cluster.client.store.connection.call("ZCARD", queue))


async def _held_by(cluster: BenchCluster, pid: int) -> int:
    key = f"{cluster.client.store.all_shards[0].quota('openai_scripted')}:held"
    held = await cluster.client.store.connection.call("HGETALL", key)
    return sum(f"-{pid}-".encode() in text for text in held[1::2])


async def _until_in_flight(provider: RunningModelServer, count: int) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while provider.counts()["in_flight"] < count:
            await asyncio.sleep(POLL_SECONDS)


async def _all_wait(cluster: BenchCluster, ids: Sequence[str]) -> bool:
    rows = [await cluster.client.row(cid) for cid in ids]
    return all(row.wait_reason == "waiting_for_budget" for row in rows)


def _waited(events: Sequence[Event]) -> float:
    """Return the time from the first event to the reply, less what the model itself took."""
    (reply,) = (event for event in events if isinstance(event, ModelReply))
    assert not any(isinstance(event, ModelCallFailed) for event in events)
    assert events[0].timestamp is not None
    assert reply.timestamp is not None
    return (reply.timestamp - events[0].timestamp).total_seconds() - reply.latency_seconds


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]
