"""Conversations that workers have died with: what counts against them, and when they are given up."""

from __future__ import annotations

from typing import Any

import pytest

from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation
from broker.limits.governor import CallGranted
from broker.limits.quotas import QuotaTable
from broker.log.conversations import Conversations
from controller_worker.loop.services import Services
from tests.broker_parts import lapse
from tests.conversation_hands import BASH, CID, THINK, WORKER, Hands
from tests.polling import until


async def crash(hands: Hands, times: int) -> None:
    """Let workers die, one after another, while they step the conversation."""
    for number in range(times):
        worker = f"victim-{number}"
        await Membership(hands.store, worker, "controller", ttl_seconds=3600.0).register()
        claimed = await hands.owners.claim(CID, worker)
        assert isinstance(claimed, ClaimedConversation)
        await hands.owners.mark(claimed.ownership, is_stepping=True)
        await lapse(hands.store, worker)
        await Membership(hands.store, WORKER, "controller", ttl_seconds=3600.0).beat(1)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (3, ["observation.error", "observation.agent_state_changed"]),  # what waits for a tool is settled
        (4, ["observation.agent_state_changed"]),  # to read it is what kills: nothing is read any more
    ],
)
async def test_a_conversation_that_crashes_its_workers_rests_in_error(
    hands: Hands, times: int, expected: list[str]
) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    await loop.release_idle()
    last_id = len(await hands.events())
    await crash(hands, times)
    assert await Conversations(hands.store).list_dead_letters() == [CID]
    await hands.go()
    row = await Conversations(hands.store).load_row(CID)
    assert (row.state, row.owner) == ("error", "")
    assert row.fields["last_error"] == f"DeckhandsError: The conversation crashed its worker {times} times in a row."
    assert await hands.kinds(after=last_id) == expected


async def mark_of(hands: Hands) -> Any:
    """Return what would count a death of the worker against the conversation; None if nothing does."""
    return await hands.store.connection.call("HGET", hands.store.keys(CID).meta, "mark")


async def begin_and_crash(hands: Hands) -> None:
    """Let a worker die with the conversation while its model thinks."""
    await hands.begin(THINK, latency=30.0)
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: loop.state.version == 6 and not loop.is_idle, what="thinking")
    loop.drop()
    hands.gone.clear()
    await lapse(hands.store, WORKER)
    await Membership(hands.store, "controller-2", "controller", ttl_seconds=3600.0).beat(1)


async def test_irrelevant_events_during_a_model_call_leave_no_mark(hands: Hands) -> None:
    await begin_and_crash(hands)
    loop = await hands.claim(worker="controller-2")
    loop.wake(has_new_events=False)
    await until(lambda: hands.wire.counts["deck_mark"] == 2, what="thinking")
    await hands.ask("running")
    loop.wake()
    await until(lambda: loop.state.version == 7, what="the news")
    await until(lambda: hands.wire.counts["deck_mark"] == 4, what="a mark that is taken away")
    assert await mark_of(hands) is None


async def test_a_wait_for_a_seat_leaves_no_mark(hands: Hands) -> None:
    await begin_and_crash(hands)
    quotas = QuotaTable.parse('[[quota]]\nmodel = "scripted/*"\nconcurrency = 1')
    old = hands.services
    hands.services = Services(old.store, old.log, old.owners, old.models, quotas)
    governor = hands.services.permits.governor
    other = await governor.reserve(quotas.pools[0], "other", "controller-2", input_tokens=1, output_tokens=1)
    assert isinstance(other, CallGranted)
    marks: list[Any] = []

    async def look() -> None:
        marks.append(await mark_of(hands))

    hands.wire.before["deck_quota_reserve"] = look
    loop = await hands.claim(worker="controller-2")
    loop.wake(has_new_events=False)
    await hands.at_rest(loop)
    assert (hands.gone, marks, await mark_of(hands)) == ([], [None], None)
