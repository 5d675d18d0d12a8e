"""A log that is written as a trajectory and read again shows a model the same, whatever was condensed in between."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from broker.contract.actions import CondensationAction
from broker.contract.events import ConversationCreated, Event
from broker.log.append_call import Appended
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from broker.store.store import Store
from controller_worker.loop.replay import replay
from deckhands.client.reading.metrics import compute_metrics
from deckhands.interop.openhands.results import NO_RESULT
from tests.exploring import examples
from tests.replay.mixed_history import MixedHistory
from tests.replay.test_replay import GOLDEN, recorded
from tests.unit.deckhands.interop.openhands.same_conversation import again, fold_of, linked, messages, shown

SEEDS = examples(40)


def mixed(seed: int) -> list[Event]:
    """A random history of everything, with random condensations in between."""
    history, random = MixedHistory(seed), Random(seed)
    history.run()
    for _ in range(random.choice((20, 60))):
        history.happen()
        if random.random() < 0.1:
            history.put(condensation(history.events, random))
    history.come_to_rest()
    return history.events


def condensation(events: list[Event], random: Random) -> CondensationAction:
    """Forget some of the visible events, as a list or as a range, with a summary or without."""
    view = [event.id for event in fold_of(events).view().events if event.id]
    place = {"summary": f"s{len(events)}", "summary_offset": random.randint(0, 4)} if random.random() < 0.7 else {}
    if random.random() < 0.5 and len(view) > 3:
        # Not only of visible events: a range covers replies and changes of state, too.
        start, end = sorted(random.choices(range(2, len(events) + 1), k=2))
        return CondensationAction(forgotten_events_start_id=start, forgotten_events_end_id=end, **place)
    return CondensationAction(forgotten_event_ids=tuple(random.sample(view, random.randint(0, len(view)))), **place)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_history_shows_a_model_the_same(seed: int, tmp_path: Path) -> None:
    events = mixed(seed)
    found, findings = again(events, tmp_path)
    assert findings.faults == []
    if any(event["content"] == NO_RESULT for event in shown(found) if "content" in event):
        # Something still ran at the end; only that gets a result that it did not have.
        assert [event for event in shown(found) if event.get("content") != NO_RESULT] == shown(events)
    else:
        assert (shown(found), linked(found), messages(found)) == (shown(events), linked(events), messages(events))
    assert find_violations(found, conversation_id="again", is_over=False) == []
    assert replay(found).divergence is None


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_real_conversation_keeps_its_prompt_and_costs(path: Path, tmp_path: Path) -> None:
    events = recorded(path)
    found, findings = again(events, tmp_path)
    assert list(findings.lines()) == []
    assert (shown(found), linked(found), messages(found)) == (shown(events), linked(events), messages(events))
    before, after = compute_metrics(events), compute_metrics(found)
    assert after.accumulated_cost == pytest.approx(before.accumulated_cost)
    for name in ("prompt_tokens", "completion_tokens", "cache_read_tokens", "cache_write_tokens"):
        assert getattr(after.accumulated_token_usage, name) == getattr(before.accumulated_token_usage, name)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
async def test_a_store_takes_what_was_imported(path: Path, tmp_path: Path, memory_store: Store) -> None:
    found, _ = again(recorded(path), tmp_path)
    log = EventLog(memory_store)
    created = found[0].model_copy(update={"id": 0})
    assert isinstance(created, ConversationCreated)
    assert await log.create_from(created, found[1:], key="import") == Appended(1, len(found))
    assert (await log.read("again"))[1:] == found[1:]
