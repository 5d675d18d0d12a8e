"""A real controller worker on a real store; the test plays everything around it: users, tools, faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.contract import codec
from broker.contract.events import AgentSpec, Event, LLMSpec
from broker.contract.observations import AgentStateChangedObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery, ActionQueue
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from tests.controller_parts import answer
from tests.faults.harness import FaultCluster, Worker
from tests.model_server.running_server import RunningModelServer
from tests.polling import until
from tests.turns import bash, finish

pytest_plugins = ("tests.model_server.fixtures",)

BASH = bash("ls")
THINK = {"text": "hmm", "tool_calls": [{"name": "think", "arguments": {"thought": "deep"}}]}
FINISH = finish("done!")
MANY = 1_000


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Let something run as long as the block lasts."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Bench(FaultCluster):
    """A store, controller workers, and conversations that follow scripts."""

    def agent(self, *turns: dict[str, Any], latency: float = 0.0, **fields: Any) -> AgentSpec:
        return AgentSpec(llm=LLMSpec(model=self.script(*turns, latency=latency)), **fields)

    async def begin(self, *turns: dict[str, Any], latency: float = 0.0) -> str:
        return await self.client.submit("task", agent=self.agent(*turns, latency=latency))

    async def states(self, cid: str) -> list[str]:
        events = await self.client.events(cid)
        return [event.agent_state.value for event in events if isinstance(event, AgentStateChangedObservation)]

    async def until_state(self, cid: str, state: str) -> None:
        async def reached() -> bool:
            return (await self.states(cid))[-1:] == [state]

        await until(reached, limit=20.0, what=f"state {state} of {cid}")

    async def until_released(self, cid: str) -> None:
        async def has_no_owner() -> bool:
            return (await self.client.row(cid)).owner == ""

        await until(has_no_owner, what=f"release of {cid}")

    async def check_log(self, cid: str) -> list[Event]:
        events = await self.client.events(cid)
        row = await self.client.row(cid)
        assert find_violations(events, conversation_id=cid, is_strict=True, last_event_id=row.last_event_id) == []
        return events

    async def celery(self, worker: Worker, *arguments: str) -> Any:
        """Run Celery's own command line beside a worker until it answers, and return the answer."""
        node = f"controller-{worker.pid}@{socket.gethostname()}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("DECKHANDS_")}
        env |= {"DECKHANDS_URL": self.store.url, "DECKHANDS_CELERY_URL": self.store.celery_url}
        program = (sys.executable, "-m", "celery", "-A", "controller_worker.app", *arguments)
        found: list[Any] = []

        async def has_answered() -> bool:
            done = await asyncio.create_subprocess_exec(
                *program, "--json", "-t", "10", "-d", node, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            output, _ = await done.communicate()
            if done.returncode == 0:
                found.append(json.loads(output))
            return bool(found)

        await until(has_answered, limit=60.0, what=f"answer to {arguments}")
        # `control` answers with a list, `inspect` does not.
        return (found[0][0] if isinstance(found[0], list) else found[0])[node]

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[None]:
        """Play another worker, which buries those that have fallen silent."""
        watcher = Membership(self.client.store, "controller-watching", "controller", ttl_seconds=3600.0)
        await watcher.register()

        async def watch() -> bool:
            await watcher.beat(0)
            return False

        async with beside(until(watch, limit=3600.0)):
            yield

    @asynccontextmanager
    async def tools(self) -> AsyncIterator[list[tuple[str, int]]]:
        """Play a tool worker: claim what is handed out, answer at once; yields what was claimed, in order."""
        store, log, worker = self.client.store, EventLog(self.client.store), "tool-played"
        queue = ActionQueue(store, store.all_shards[0], worker_id=worker, node="node1", pools=["bash"])
        await Membership(store, worker, "tool", streams=[queue.streams], ttl_seconds=3600.0).register()
        claimed: list[tuple[str, int]] = []

        async def work() -> None:
            while True:
                for delivery in await queue.read(limit=100):
                    assert isinstance(delivery, ActionDelivery)
                    outcome = await queue.claim(delivery)
                    assert outcome == ActionClaimed(1)
                    claimed.append((delivery.conversation_id, delivery.action_id))
                    action = codec.decode(delivery.entry, delivery.action_id)
                    await log.append_observation(
                        delivery.conversation_id, answer(action), worker_id=worker, place=delivery.location
                    )

        async with contextlib.aclosing(queue), beside(work()):
            yield claimed


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    async with made.running():
        yield made


# Stages of a conversation


# Model errors


@pytest.mark.parametrize(
    ("model", "path"), [pytest.param("openai/large", "/v1", marks=pytest.mark.soak), ("claude-large", "")]
)
async def test_first_provider_call_costs_no_heartbeat(
    bench: Bench, model: str, path: str, shared_model_server: Callable[..., RunningModelServer]
) -> None:
    """A provider's library takes seconds to import; a worker that fell silent for two would be buried."""
    server = shared_model_server("--builtin", "bash:1")
    bench.start_controller(LLM_MODEL=model, LLM_API_KEY="k", LLM_BASE_URL=server.url + path)
    pilot = await bench.begin(FINISH)
    await bench.settle([pilot])
    store = bench.client.store
    (worker,) = await store.connection.call("ZRANGE", store.all_shards[0].workers, 0, -1)
    async with bench.sweeping(), bench.tools():
        cid = await bench.client.submit("task")
        await bench.settle([cid], limit=100.0)
    assert (await bench.client.row(cid)).state == "finished"
    assert worker in await store.connection.call("ZRANGE", store.all_shards[0].workers, 0, -1)
    assert await Conversations(store).list_takeovers() == []
    await bench.check_log(cid)


# Damage


async def test_conversation_that_kills_workers_is_parked_and_neighbours_continue(bench: Bench) -> None:
    poison = await bench.begin(FINISH)
    neighbours: list[str] = []
    for number in range(3):
        bench.start_controller(f"victim-{number}", DECKHANDS_FAILPOINTS="controller.after_claim:kill@1")
        assert await bench.until_ended(f"victim-{number}") == -signal.SIGKILL
    neighbours += [await bench.begin(THINK, FINISH) for _ in range(5)]
    bench.start_controller("survivor")
    await bench.settle([*neighbours, poison])
    assert await Conversations(bench.client.store).list_dead_letters() == [poison]
    await bench.until_released(poison)
    row = await bench.client.row(poison)
    assert row.state == "error"
    assert row.fields["last_error"] == "DeckhandsError: The conversation crashed its worker 3 times in a row."
    for cid in neighbours:
        assert (await bench.client.row(cid)).state == "finished"
    # A user who resumes it gives it another chance.
    await Conversations(bench.client.store).requeue(poison)
    await bench.client.resume(poison)
    await bench.until_state(poison, "finished")


@pytest.mark.soak
async def test_worker_claims_no_more_conversations_than_it_can_start(bench: Bench) -> None:
    ids = [await bench.begin(FINISH) for _ in range(100)]
    bench.start_controller("victim", DECKHANDS_FAILPOINTS="controller.after_claim:kill@1")
    await bench.until_ended("victim")
    owned = [cid for cid in ids if (await bench.client.row(cid)).owner]
    assert 1 <= len(owned) <= 32
    bench.start_controller("survivor")
    await bench.settle(ids)


# The worker as a whole


@pytest.mark.soak
async def test_remote_control(bench: Bench) -> None:
    thinking = await bench.begin(THINK, latency=600.0)
    marker = bench.root / "thinking"
    pausing = {"DECKHANDS_FAILPOINTS": f"controller.model_thinking:pause:{marker}"}
    worker = bench.start_controller(DECKHANDS_IDLE_SECONDS="600", **pausing)
    await until(marker.exists, what="model call")
    marker.unlink()
    waiting = await bench.begin(BASH, FINISH)
    await bench.until_kind(waiting, "action.run")
    assert await bench.celery(worker, "inspect", "ping") == {"ok": "pong"}
    assert await bench.celery(worker, "inspect", "conversations") == sorted([waiting, thinking])
    stats = (await bench.celery(worker, "inspect", "stats"))["deckhands"]
    assert stats["worker_id"].startswith("controller-")
    assert (stats["role"], stats["conversations"], stats["is_draining"]) == ("controller", 2, False)
    # What waits is given back, what thinks is not; nothing new is begun, also not what comes back.
    assert await bench.celery(worker, "control", "drain") == {"left": 1}
    assert (await bench.client.row(waiting)).owner == ""
    await bench.client.cancel(thinking, wait_seconds=60)
    await bench.until_released(thinking)
    late = await bench.begin(FINISH)
    assert await bench.celery(worker, "inspect", "conversations") == []
    bench.start_controller("second")
    await bench.settle([late])
    async with bench.tools():
        await bench.settle([waiting])


async def test_worker_told_to_end_hands_back_at_once(bench: Bench) -> None:
    lasting = {"DECKHANDS_IDLE_SECONDS": "600", "DECKHANDS_HEARTBEAT_TTL_SECONDS": "600"}
    bench.start_controller("first", **lasting)
    cids = [await bench.begin(BASH, FINISH) for _ in range(20)]
    for cid in cids:
        await bench.until_kind(cid, "action.run")
    first = (await bench.client.row(cids[0])).owner
    bench.start_controller("second", **lasting)
    shard = bench.client.store.all_shards[0]

    async def has_two() -> bool:
        return int(await bench.client.store.connection.call("ZCARD", shard.workers)) == 2

    await until(has_two, what="second worker")
    bench.signal("first", signal.SIGTERM)

    async def others() -> bool:
        owners = [(await bench.client.row(cid)).owner for cid in cids]
        return first not in owners and "" not in owners

    await until(others, what="takeover of all")
    assert await bench.until_ended("first") == 0
    async with bench.tools():
        await bench.settle(cids)
    for cid in cids:
        await bench.check_log(cid)


def is_stopped(pid: int) -> bool:
    """Return whether every thread of a process is stopped: the signal takes its time."""
    return all(
        psutil.Process(int(task.name)).status() == psutil.STATUS_STOPPED for task in Path(f"/proc/{pid}/task").iterdir()
    )


async def test_claim_with_a_lost_reply_is_found_by_next_ring(bench: Bench) -> None:
    bench.start_controller()
    pilot = await bench.begin(FINISH)
    await bench.settle([pilot])
    store = bench.client.store
    shard = store.all_shards[0]
    (worker,) = await store.connection.call("ZRANGE", shard.workers, 0, -1)
    bench.signal("c1", signal.SIGSTOP)
    await until(lambda: is_stopped(bench.workers["c1"].pid), what="standstill")
    cid = await bench.begin(FINISH)
    # As if the worker had claimed it, and neither the reply nor the entry had reached it.
    assert isinstance(await Owners(store).claim(cid, worker.decode()), ClaimedConversation)
    await store.connection.call("XTRIM", shard.ready, "MAXLEN", 0)
    await bench.client.send_message(cid, "are you there?")
    bench.signal("c1", signal.SIGCONT)
    await bench.settle([cid])
    assert await bench.states(cid) == ["running", "finished"]


@pytest.mark.soak
async def test_drained_worker_stays_drained_after_a_sweep(bench: Bench) -> None:
    worker = bench.start_controller()
    store = bench.client.store
    shard = store.all_shards[0]
    assert await bench.celery(worker, "control", "drain") == {"left": 0}
    (before,) = await store.connection.call("ZRANGE", shard.workers, 0, -1)
    await store.connection.call("ZREM", shard.workers, before)  # buried by another

    async def is_back() -> bool:
        return (await store.connection.call("ZRANGE", shard.workers, 0, -1)) not in ([], [before])

    await until(is_back, what="new incarnation")
    stats = (await bench.celery(worker, "inspect", "stats"))["deckhands"]
    assert stats["worker_id"] != before.decode()
    assert stats["is_draining"] is True


async def test_full_worker_releases_waiting_conversations(bench: Bench) -> None:
    bench.start_controller(DECKHANDS_MAX_CONVERSATIONS="3", DECKHANDS_IDLE_SECONDS="600")
    waiting = [await bench.begin(BASH, FINISH) for _ in range(3)]
    for cid in waiting:
        await bench.until_kind(cid, "action.run")
    late = await bench.begin(FINISH)
    await bench.settle([late])
    async with bench.tools():
        await bench.settle(waiting)


@pytest.mark.soak
async def test_a_thousand_conversations_that_wait_for_tools(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    worker = bench.start_controller(DECKHANDS_IDLE_SECONDS="600")
    store, agent = bench.client.store, bench.agent(BASH, FINISH)
    pilot = await bench.client.submit("task", agent=bench.agent(FINISH))
    await bench.settle([pilot])
    before = psutil.Process(worker.pid).memory_info().rss
    cids = [await bench.client.submit("task", agent=agent) for _ in range(MANY)]

    names = store.all_shards[0]

    async def all_wait() -> bool:  # some in the stream, the others in the line for it
        line = await store.connection.call("KEYS", f"{names.root}:turns:act:pool:bash:[0-9]")
        waiting = [int(await store.connection.call("ZCARD", key)) for key in line]
        return int(await store.connection.call("XLEN", names.actions("pool:bash"))) + sum(waiting) == MANY

    await until(all_wait, limit=60.0, what="actions of all")
    grown = psutil.Process(worker.pid).memory_info().rss - before
    owners = {(await bench.client.row(cid)).owner for cid in (cids[0], cids[MANY // 2], cids[-1])}
    assert len(owners) == 1
    assert "" not in owners
    owned = await store.connection.call("SCARD", f"{store.all_shards[0].root}:worker:{owners.pop()}:owned")
    assert owned == MANY
    with capsys.disabled():
        sys.stdout.write(f"\n{grown / MANY / 1024:.1f} KiB a conversation that waits for a tool\n")
    assert grown / MANY < 64 * 1024
    await _all_answer(bench, cids[::100])


async def _all_answer(bench: Bench, cids: Sequence[str]) -> None:
    log = EventLog(bench.client.store)
    for cid in cids:
        action = (await bench.client.events(cid))[-1]
        await log.append_observation(cid, answer(action), worker_id="tool-played")
        await bench.until_state(cid, "finished")
