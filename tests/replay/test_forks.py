"""A conversation can be forked at any of its events, and goes on from there."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from broker.event_log import Appended, Duplicate, EventLog
from broker.events import Observation
from broker.export import events_from_lines
from broker.store import Store
from controller_worker.controller import AwaitTools, CallModel, fold, next_effect
from controller_worker.replay import replay
from controller_worker.state import State
from deckhands.forking import fork_of, taken_over
from tests.controller_parts import messages_of
from tests.replay.test_replay import GOLDEN, recorded

NOW = datetime(2027, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
async def test_a_golden_log_forked_at_each_of_its_events(path: Path, memory_store: Store) -> None:
    events, log = recorded(path), EventLog(memory_store)
    for at in range(1, len(events) + 1):
        created = fork_of(events[:at], f"fork-{at}", model="acme/large")
        assert await log.adopt(created, taken_over(events[:at], model="acme/large"), key="fork") == Appended(1, at)
        assert await log.adopt(created, events[1:at], key="fork") == Duplicate(1, at)
        fork = await log.read(f"fork-{at}")
        assert [event.export() for event in fork[1:]] == [event.export() for event in events[1:at]]
        assert replay(fork).divergence is None
        state = fold(State(), fork)
        assert state.agent.llm.model == "acme/large"
        effect = next_effect(state, NOW)
        if isinstance(effect, AwaitTools):
            answered = {event.cause for event in fork if isinstance(event, Observation)}
            assert not set(effect.action_ids) & answered
        if isinstance(effect, CallModel):
            check_prompt(fork)


def check_prompt(events: list) -> None:
    """Every call that is shown has a result."""
    open_calls: list[str] = []
    for message in messages_of(events):
        if message.role == "tool":
            open_calls.remove(message.tool_call_id)
        else:
            assert open_calls == []
            open_calls = [call.id for call in message.tool_calls]
    assert open_calls == []


async def test_what_has_run_in_the_origin_is_settled_in_the_fork(memory_store: Store) -> None:
    path = next(path for path in GOLDEN if path.stem == "rate_limit_and_pause")
    events = events_from_lines(path.read_text().splitlines(), source=path.name)
    await EventLog(memory_store).adopt(fork_of(events[:10], "fork-1"), events[1:10], key="fork")
    once = await memory_store.connection.call("HGETALL", memory_store.keys("fork-1").once)
    assert sorted(name.decode() for name in once[::2]) == ["create:fork", "o:8"]
