"""The work and the memory of a translation, counted and not measured in time."""

from __future__ import annotations

import asyncio
import cProfile
import json
import pstats
from datetime import UTC, datetime

import pytest

from broker.contract import (
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    ConversationCreated,
    Event,
    EventSource,
    MessageAction,
    ModelReply,
    SystemMessageAction,
)
from deckhands.client.starting import HELD_REASON
from deckhands.server.openhands.translated_logs import EVENTS_PER_TURN, TranslatedLog

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def history(replies: int) -> list[Event]:
    events: list[Event] = [ConversationCreated(conversation_id="c-1"), SystemMessageAction(content="You help.")]
    for number in range(replies):
        events += [ModelReply(model="m", cost_usd=0.5, response_id=f"r{number}"), MessageAction(content="Hello.")]
    return [event.model_copy(update={"id": n, "timestamp": NOW}) for n, event in enumerate(events, 1)]


def count_calls(events: list[Event]) -> int:
    log = TranslatedLog("c-1", has_events=True)
    profile = cProfile.Profile()
    profile.enable()
    for event in events:
        log.add(event)
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_work_of_a_translation_grows_with_the_log_only() -> None:
    assert count_calls(history(400)) < 4.2 * count_calls(history(100))


def test_update_of_the_stats_has_sums_and_no_single_calls() -> None:
    log = TranslatedLog("c-1", has_events=True)
    for event in history(3):
        log.add(event)
    last = [fields for fields in log.events if fields.get("key") == "stats"][-1]["value"]
    whole = log.fields()["stats"]["usage_to_metrics"]["agent"]
    assert last["usage_to_metrics"]["agent"]["accumulated_cost"] == whole["accumulated_cost"] == 1.5
    lists = {"costs", "response_latencies", "token_usages"}
    assert last["usage_to_metrics"]["agent"].keys() == whole.keys() - lists


@pytest.mark.parametrize("pause_at", [4, 5], ids=["before the hold is announced", "after it"])
def test_pause_of_a_held_conversation_is_shown_once(pause_at: int) -> None:
    pause = ChangeAgentStateAction(agent_state=AgentState.PAUSED, source=EventSource.USER)
    events: list[Event] = [
        ConversationCreated(conversation_id="c-1"),
        SystemMessageAction(content="You help."),
        MessageAction(content="Hello.", source=EventSource.USER),
        pause.model_copy(update={"reason": HELD_REASON}),
        AgentStateChangedObservation(agent_state=AgentState.PAUSED),
    ]
    events.insert(pause_at, pause)
    log = TranslatedLog("c-1", has_events=True)
    for number, event in enumerate(events, 1):
        log.add(event.model_copy(update={"id": number, "timestamp": NOW}))
    assert [fields["kind"] for fields in log.events].count("PauseEvent") == 1
    assert log.run.execution_status == "paused"


async def test_other_requests_have_turns_during_a_translation() -> None:
    turns = 0
    log = TranslatedLog("c-1")

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    events = history(4 * EVENTS_PER_TURN)
    counting = asyncio.create_task(count_turns())
    await log.add_all(events)
    counting.cancel()
    assert turns >= len(events) // EVENTS_PER_TURN


def test_log_for_its_state_keeps_no_events() -> None:
    whole, state = TranslatedLog("c-1", has_events=True), TranslatedLog("c-1")
    for event in history(20):
        assert whole.add(event) == state.add(event)
    assert whole.size_bytes == sum(len(json.dumps(fields)) for fields in whole.events)
    for log in (state, whole.without_events()):
        assert (log.events, log.places, log.sources, log.size_bytes) == ([], {}, [], 0)
        assert log.info() == whole.info()
