"""Each planted bug is found: the checks detect the violations that they are for."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.coordination.membership import HEARTBEAT_SECONDS, Membership
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.log.event_log import EventLog
from broker.runtime.settings import HEARTBEAT_TTL_SECONDS
from tests.simulation import planted
from tests.simulation.canonical import Outcome, Plan, simulate
from tests.simulation.chat import Chat, broken_chat, simulate_chat
from tests.simulation.checks import LATE, broken
from tests.simulation.faults import Fault
from tests.simulation.simulated_cluster import Cluster
from tests.simulation.simulated_host import JournalWithoutResults, JournalWithoutStarts
from tests.simulation.wire import Bug, StoreBug

CHATS = 20


@dataclass(frozen=True)
class Where:
    """Where a bug shows: after a fault at a command."""

    fault: Fault
    command: str
    controllers: int = 1
    finds: str = "I1"


def plans(where: Where, model: Mapping[str, str]) -> Iterator[Plan]:
    passed = simulate(Plan(controllers=where.controllers), model).cluster.wire.passed
    for at, boundary in enumerate(passed, 1):
        if boundary.endswith(where.command):
            yield Plan(0, {at: where.fault}, controllers=where.controllers)


BUGS: dict[str, tuple[StoreBug, Where]] = {
    "an append under a stale token": (planted.accept_stale_tokens, Where(Fault.STOP, "deck_append", 2, "I6")),
    "a decision on an old log": (planted.accept_stale_decisions, Where(Fault.PAUSE, "deck_append", finds="I4")),
    "an owner's append that forgets its key": (planted.forget_owners_key, Where(Fault.CUT, "deck_append", finds="I9")),
    "a person's append that forgets its key": (
        planted.forget_producers_key(),
        Where(Fault.KILL, "deck_append", finds="I3"),
    ),
    "a second observation": (planted.forget_answers, Where(Fault.CUT, "deck_append", finds="I4")),
    "an append that rings nobody": (planted.ring_nobody, Where(Fault.KILL, "deck_append")),
    "an observation that leaves its entry unacknowledged": (
        planted.keep_entries,
        Where(Fault.KILL, "deck_append", finds="I13"),
    ),
    "an entry acknowledged before the append": (
        planted.acknowledge_before_append,
        Where(Fault.KILL, "after deck_claim_action", finds=LATE),
    ),
    "a release without a look at the news": (planted.release_blindly, Where(Fault.PAUSE, "deck_release")),
    "a burial that rings nobody": (planted.bury_silently, Where(Fault.KILL, "deck_claim")),
    "a wait that nobody ends": (planted.forget_parked, Where(Fault.KILL, "deck_append")),
    "a snapshot that is off by one": (
        planted.leave_last_event_out_of_snapshots,
        Where(Fault.KILL, "deck_claim", finds="I7"),
    ),
}
"""What is planted, and where it shows."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, model: Mapping[str, str]) -> None:
    on_store, where = BUGS[bug]
    for tried, plan in enumerate(plans(where, model)):
        outcome = simulate(replace(plan, bug=Bug(on_store)), model)
        found = broken(outcome)
        if any(line.startswith(f"{where.finds}:") for line in found):
            print(f"{bug}: found by {plan} after {tried} others: {found}")
            return
    raise AssertionError(f"{bug}: not found")


@pytest.mark.parametrize(
    ("bug", "chat"),
    [
        pytest.param(
            Bug(planted.keep_rung_at_release),
            Chat(command_seconds=0.02),
            id="a ring's mark that is kept at the release",
        ),
        pytest.param(
            Bug(on_port=planted.clear_rung_after_reading),
            Chat(command_seconds=0.05, has_bell=False, has_early_bell=True),
            id="a ring's mark that is taken away after reading",
        ),
    ],
)
def test_a_lost_ring_is_found(bug: Bug, chat: Chat, tmp_path: Path) -> None:
    chats = [replace(chat, seed=seed) for seed in range(CHATS)]
    assert broken_chat(simulate_chat(chats[0], tmp_path)) == []
    assert any(broken_chat(simulate_chat(replace(chat, bug=bug), tmp_path)) for chat in chats)


def test_a_burial_of_256_conversations_and_no_more_is_found() -> None:
    assert len(unrung_after_burial(None)) == 0
    assert len(unrung_after_burial(Bug(planted.bury_half))) == OWNED - 256


OWNED = 300


def unrung_after_burial(bug: Bug | None) -> list[str]:
    """Let a worker die that owns many conversations, and return those without a wake-up."""
    cluster = Cluster(0, {}, {}, bug=bug)

    async def world() -> list[str]:
        store = await cluster.open()
        dead, living = Membership(store, "controller-dead", "controller"), Membership(store, "living", "controller")
        await dead.register()
        log, owners = EventLog(store), Owners(store)
        ids = [f"conversation-{number}" for number in range(OWNED)]
        for cid in ids:
            await log.create(ConversationCreated(conversation_id=cid), key=cid)
            assert isinstance(await owners.claim(cid, "controller-dead"), ClaimedConversation)
        await asyncio.sleep(HEARTBEAT_TTL_SECONDS + 1)
        await living.register()
        for _ in range(10):
            assert await living.beat(0) is not None
            await asyncio.sleep(HEARTBEAT_SECONDS)
        entries = {cid: await store.connection.call("HGET", store.known_keys(cid).meta, "ready_id") for cid in ids}
        return [cid for cid, entry in entries.items() if entry is None]

    return cluster.run(world())


def test_host_that_repeats_a_finished_action_is_found(model: Mapping[str, str]) -> None:
    for plan in plans(Where(Fault.KILL, "before deck_append"), model):
        if _runs_twice(simulate(plan, model, journal=JournalWithoutResults)):
            return
    raise AssertionError("an action was run twice and nobody noticed")


def test_host_that_repeats_a_started_action_is_found(model: Mapping[str, str]) -> None:
    deaths = [tenth / 10 for tenth in range(1, 20)]
    plans = [Plan(host_deaths=(at,)) for at in deaths]
    assert all(broken(simulate(plan, model)) == [] for plan in plans)
    assert any(_runs_twice(simulate(plan, model, journal=JournalWithoutStarts)) for plan in plans)


def _runs_twice(outcome: Outcome) -> bool:
    return any(line.startswith("I5:") for line in broken(outcome))
