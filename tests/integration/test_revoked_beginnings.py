"""A run that is revoked while a door begins it is stopped all the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.observations import AgentStateChangedObservation
from broker.specs.agent_state import AgentState
from broker.store.store import Store
from deckhands.door.callers import CELERY, Caller
from deckhands.door.desk import REVOKED, Desk, conversation_of_task
from deckhands.door.runs import RunMessage, Runs
from tests.integration.test_repeated_orders import Stalled

MESSAGE = RunMessage("t1", ("look",), {}, {})


STOPPED = AgentStateChangedObservation(agent_state=AgentState.STOPPED)


async def orders_to(desk: Desk) -> list[AgentState]:
    """Return what the conversation was ordered to be."""
    events = await desk.client.events(conversation_of_task("t1"))
    return [event.agent_state for event in events if isinstance(event, ChangeAgentStateAction)]


class Sent:
    """A result backend that takes second halves."""

    def __init__(self) -> None:
        self.task_ids: list[str] = []

    def send_second_half(self, task_id: str, kept: Mapping[str, Any]) -> None:
        self.task_ids.append(task_id)


@pytest.mark.parametrize("before", ["deck_append", "deck_admit"])
async def test_a_run_that_is_revoked_while_it_is_begun_is_stopped(valkey_store: Store, before: str) -> None:
    results = Sent()
    other = Runs(Desk(valkey_store, results))  # type: ignore[arg-type]
    connection = Stalled(valkey_store, before, lambda: other.revoke("t1"))
    desk = Desk(replace(valkey_store, connection=connection), results)  # type: ignore[arg-type]
    outcome = await Runs(desk).take(MESSAGE)
    assert await orders_to(desk) == [AgentState.STOPPED]
    outcome = outcome or await other.take(MESSAGE)
    assert outcome is not None
    assert outcome.found == REVOKED


async def test_a_run_that_is_revoked_and_whose_door_dies_behind_its_beginning_is_stopped(valkey_store: Store) -> None:
    desk = Desk(valkey_store, Sent())  # type: ignore[arg-type]
    runs, conversation_id = Runs(desk), conversation_of_task("t1")
    caller = Caller(conversation_id, CELERY, "t1", kept={})
    await desk.callers.keep(caller)
    await runs.revoke("t1")
    await desk.callers.answered(conversation_id)
    await desk.begin(MESSAGE.request(), conversation_id, "t1", awaited=CELERY)
    for _ in range(2):  # the broker delivers its message again
        assert await runs.take(MESSAGE) is None
        await desk.client.log.append(conversation_id, [STOPPED], fields={"state": "stopped"})
    assert await orders_to(desk) == [AgentState.STOPPED]
