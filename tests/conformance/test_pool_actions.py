"""An action that wants its own pool: it goes there wherever the workspace is, and moves nothing."""

from __future__ import annotations

from broker.contract.actions import ToolCallAction
from broker.contract.observations import ToolCallObservation
from broker.coordination.action_streams import ActionClaimed, ActionReclaimed
from broker.coordination.ownership import DispatchOutcome, Owners
from broker.log.append_call import Appended
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.broker_parts import CID, act, begin, claim, enter, lapse, output, queue, take

GPU = ToolCallAction(name="render", tool="render", pool="gpu")


async def test_it_is_run_in_its_pool_and_binds_no_workspace(store: Store) -> None:
    log = await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    await enter(store, "g1", node="n2", pools=("gpu",))
    ownership = await claim(store, "w1")
    assert await log.append_as_owner(ownership, [GPU], expected_last_id=1, dispatch=[0]) == Appended(2, 2)
    reader = queue(store, "g1", node="n2", pools=("gpu",))
    delivery = await take(reader)
    assert delivery.is_anywhere
    assert delivery.location.startswith("deck:{0}:act:pool:gpu|")
    assert await reader.claim(delivery) == ActionClaimed(1)
    names = store.keys(CID)
    assert await store.connection.call("HGET", names.meta, "node") is None
    answer = ToolCallObservation(content="done", name="render", cause=2)
    assert await log.append_observation(CID, answer, worker_id="g1", place=delivery.location) == Appended(3, 3)
    await reader.aclose()


async def test_workspace_bound_elsewhere_does_not_attract_a_pool_action(store: Store) -> None:
    log = await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    await enter(store, "g1", node="n2", pools=("gpu",))
    ownership, action_id = await act(store, "w1")
    bash = queue(store, "t1", node="n1")
    delivery = await take(bash)
    await bash.claim(delivery)
    await log.append_observation(CID, output(action_id), worker_id="t1", place=delivery.location)
    await log.append_as_owner(ownership, [GPU], expected_last_id=3)
    entry = await log.load_entry(CID, 4)
    owners = Owners(store)
    assert await owners.dispatch(ownership, 4, entry, pool="gpu") is DispatchOutcome.ENQUEUED
    assert await owners.dispatch(ownership, 4, entry, pool="gpu") is DispatchOutcome.QUEUED
    gpu = queue(store, "g1", node="n2", pools=("gpu",))
    assert await gpu.claim(await take(gpu)) == ActionClaimed(1)
    assert await store.connection.call("HGET", store.keys(CID).meta, "node") == b"n1"
    await bash.aclose()
    await gpu.aclose()


async def test_dead_pool_workers_entries_go_to_the_same_pool(store: Store) -> None:
    log = await begin(store)
    await enter(store, "w1")
    await enter(store, "g1", node="n1", pools=("gpu",))
    other = await enter(store, "g2", node="n2", pools=("gpu",))
    ownership = await claim(store, "w1")
    await log.append_as_owner(ownership, [GPU], expected_last_id=1, dispatch=[0])
    first = queue(store, "g1", node="n1", pools=("gpu",))
    await first.claim(await take(first))
    await lapse(store, "g1")
    await other.beat(1)
    second = queue(store, "g2", node="n2", pools=("gpu",))
    delivery = await take(second)
    assert delivery.is_anywhere
    assert await second.claim(delivery) == ActionReclaimed(2, "g1")
    assert await EventLog(store).load_last_id(CID) == 2
    await first.aclose()
    await second.aclose()
