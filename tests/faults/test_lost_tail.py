"""The store comes back with an older append-only file: the logs lose their ends, and a worker or host that remembers more says so."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence

import pytest

from broker.contract.actions import ChangeAgentStateAction, CmdRunAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, Event, LLMSpec
from broker.contract.observations import CmdOutputObservation
from broker.runtime.ids import make_delegate_id
from tests.faults.harness import FaultCluster, steps
from tests.turns import bash, call, finish

COUNT = 6
STEPS = 8


class OldFile:
    """A copy of the store's append-only file, to be put back later."""

    def __init__(self, cluster: FaultCluster) -> None:
        self._cluster = cluster
        self._current = cluster.store.directory / "appendonlydir"
        self._copy = cluster.root / "older"
        self.last_ids: dict[str, int] = {}
        self.taken_ms = 0

    async def take(self, ids: Sequence[str]) -> None:
        """Copy the file; the copy has nearly all current events of each log."""
        shutil.copytree(self._current, self._copy)
        self.taken_ms = await self._now_ms()
        self.last_ids = {cid: await self._cluster.client.log.load_last_id(cid) for cid in ids}

    async def has_aged(self, seconds: float) -> bool:
        return await self._now_ms() - self.taken_ms > seconds * 1000

    async def put_back(self) -> None:
        """End the store as a power failure would, and start it on the copy."""
        await self._cluster.kill_store()
        shutil.rmtree(self._current)
        self._copy.rename(self._current)
        await self._cluster.store.start()

    async def _now_ms(self) -> int:
        seconds, micros = await self._cluster.client.store.connection.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000


async def grown(cluster: FaultCluster, old: OldFile, by: int) -> bool:
    """Return whether every log has grown by so many events since the copy was taken."""
    return all([await cluster.client.log.load_last_id(cid) >= last_id + by for cid, last_id in old.last_ids.items()])


async def check(cluster: FaultCluster, ids: Sequence[str], *, is_told: bool = True) -> None:
    """Check every log, and that no command ran twice unless the log names the gap before the second time."""
    for cid in ids:
        events = await cluster.check_log(cid)
        shown = [f"{event.id} {event.cause} {event.sentence}" for event in events]
        assert (await cluster.client.row(cid)).state == "finished", shown
        gaps = [event.id for event in events if event.kind == "observation.events_lost"]
        assert gaps or not is_told, shown
        doubled = [line for line, count in Counter(cluster.effects(cid)).items() if count > 1]
        for line in doubled:
            last = max(event.id for event in events if isinstance(event, CmdRunAction) and f"{line} " in event.command)
            assert any(gap < last for gap in gaps), (line, shown)
        answers_fit(events)


def answers_fit(events: Sequence[Event]) -> None:
    """Check that no action has the output of another command."""
    for event in events:
        if isinstance(event, CmdOutputObservation):
            action = next(one for one in events if one.id == event.cause)
            assert isinstance(action, CmdRunAction)
            assert event.command == action.command
            assert event.content.split() == [action.command.rpartition("echo ")[2].split()[0], event.content.split()[1]]


@pytest.mark.parametrize("age", [0.0, pytest.param(2.5, marks=pytest.mark.slow)])
async def test_workers_that_live_on_name_the_gap(cluster: FaultCluster, age: float) -> None:
    """Old enough, the file tells of workers whose heartbeats have lapsed: they are swept first."""
    cluster.start()
    ids = await cluster.submit(steps(STEPS, seconds=0.3), count=COUNT)
    await cluster.until(lambda: all("begin-1" in cluster.effects(cid) for cid in ids))
    old = OldFile(cluster)
    await old.take(ids)
    await cluster.until(lambda: grown(cluster, old, by=2))
    await cluster.until(lambda: old.has_aged(age))
    await old.put_back()
    await cluster.settle(ids)
    await check(cluster, ids)


async def test_the_hosts_name_the_gap_when_all_workers_are_new(cluster: FaultCluster) -> None:
    cluster.start_controller("c1")
    cluster.start_tool("t1")
    ids = await cluster.submit(steps(STEPS, seconds=0.3), count=2)
    await cluster.until(lambda: all("begin-1" in cluster.effects(cid) for cid in ids))
    old = OldFile(cluster)
    await old.take(ids)
    await cluster.until(lambda: grown(cluster, old, by=6))
    cluster.kill("c1")
    cluster.kill("t1")
    await old.put_back()
    others(cluster)
    cluster.start_controller("c2")
    cluster.start_tool("t2")
    await cluster.settle(ids)
    await check(cluster, ids)


def others(cluster: FaultCluster) -> None:
    """Let the models say something else from now on, so that the same numbers come to mean other commands."""
    for script in cluster.root.glob("script-*.json"):
        text = script.read_text()
        script.write_text(text.replace("begin-", "other-begin-").replace("echo done", "echo other"))
        assert script.read_text() != text


async def test_delegates_and_their_parents_go_on(cluster: FaultCluster) -> None:
    """At the copy the delegates work; their last steps, their start or their report are lost."""
    helper = AgentSpec(llm=LLMSpec(model=cluster.script(*steps(3, seconds=0.2))))
    cluster.start()
    turns = [call("delegate", agent="helper", task="count"), finish()]
    ids = await cluster.submit(turns, count=3, enable_delegation=True, delegates={"helper": helper}, latency=0.2)
    await cluster.until_kind(ids[0], "action.delegate")
    old = OldFile(cluster)
    await old.take(ids)
    await cluster.until_kind(ids[0], "conversation.delegate_ended")
    await old.put_back()
    await cluster.settle(ids)
    everybody = [row.conversation_id for row in await cluster.client.recent()]
    assert len(everybody) == 2 * len(ids)
    await cluster.settle(everybody)
    gaps = 0
    for cid in everybody:
        events = await cluster.check_log(cid)
        gaps += sum(event.kind == "observation.events_lost" for event in events)
        assert (await cluster.client.row(cid)).state == "finished", [event.sentence for event in events]
    for cid in ids:
        events = await cluster.client.events(cid)
        assert sum(event.kind == "observation.delegate" for event in events) == 1
    assert gaps > 0


async def cut_before(cluster: FaultCluster, conversation_id: str, event_id: int) -> None:
    """End the store as a power failure would, and let its file end right before an event."""
    store = cluster.store
    await cluster.kill_store()
    (path,) = (store.directory / "appendonlydir").glob("*.incr.aof")
    written, entry = path.read_bytes(), f"{event_id}-0"
    key = cluster.client.store.known_keys(conversation_id).events
    at = written.rindex(f"{key}\r\n${len(entry)}\r\n{entry}\r\n".encode())
    path.write_bytes(written[: written.rindex(b"*1\r\n$5\r\nMULTI\r\n", 0, at)])
    await store.start()


@pytest.mark.parametrize(
    ("order", "lives_on"),
    [
        pytest.param("running", True, id="resume-same-worker"),
        *(
            pytest.param(order, lives_on, id=f"{order}-{lives_on}", marks=pytest.mark.soak)
            for order in ("running", "paused", "stopped")
            for lives_on in (True, False)
            if (order, lives_on) != ("running", True)
        ),
    ],
)
async def test_a_delegate_gets_an_order_that_its_log_has_lost(
    cluster: FaultCluster, order: str, lives_on: bool
) -> None:
    """The parent's log still has both requests; the delegate's request is lost.

    The delegate works until it is asked again, because one that has ended is not asked. A lost request to stop may have
    ended a command already.
    """
    waits = bash("until [ -e go ]; do sleep 0.1; done")
    helper = AgentSpec(llm=LLMSpec(model=cluster.script(waits, waits, waits, finish())))
    client, spoken = cluster.client, AgentState(order)
    cluster.start()
    turns = [call("delegate", agent="helper", task="count"), finish()]
    (parent,) = await cluster.submit(turns, enable_delegation=True, delegates={"helper": helper})
    await cluster.until_kind(parent, "action.delegate")
    delegation = next(event for event in await client.events(parent) if event.kind == "action.delegate")
    delegate = make_delegate_id(parent, delegation.id)

    async def is_there() -> bool:
        return delegate in [row.conversation_id for row in await client.recent()]

    async def request() -> int:
        events = await client.events(delegate)
        asked = [event for event in events if isinstance(event, ChangeAgentStateAction)]
        return asked[-1].id if asked and asked[-1].agent_state is spoken else 0

    await cluster.until(is_there, what="a delegate")
    await cluster.until_kind(delegate, "action.run")
    if order != "stopped":
        await client.pause(parent)
        await cluster.until_kind(delegate, "action.change_agent_state")
    if order == "running":
        await client.resume(parent)
    if order == "stopped":
        await client.cancel(parent)
    await cluster.until(request, what=f"a delegate that is asked to be {order}")
    if not lives_on:
        cluster.kill("c1")
    await cut_before(cluster, delegate, await request())
    if not lives_on:
        cluster.start_controller("c2")
    await cluster.until(request, limit=60.0, what=f"a delegate that is asked again to be {order}")
    (cluster.folder_of(parent) / "go").touch()
    if order == "paused":
        await client.resume(parent)
    await cluster.settle([parent, delegate])
    states = {(await client.row(cid)).state for cid in (parent, delegate)}
    assert states == {"stopped" if order == "stopped" else "finished"}
