"""A run that is revoked while an ingress begins it is stopped all the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.observations import AgentStateChangedObservation
from broker.store.store import Store
from deckhands.ingress.callers import CELERY, Caller
from deckhands.ingress.context import IngressContext, derive_task_conversation_id
from deckhands.ingress.runs import RunMessage, Runs
from tests.integration.test_repeated_orders import Stalled

MESSAGE = RunMessage("t1", ("look",), {}, {})


STOPPED = AgentStateChangedObservation(agent_state=AgentState.STOPPED)


async def orders_to(desk: IngressContext) -> list[AgentState]:
    """Return what the conversation was ordered to be."""
    events = await desk.client.events(derive_task_conversation_id("t1"))
    return [event.agent_state for event in events if isinstance(event, ChangeAgentStateAction)]


class Completions:
    """A result backend that records how tasks have ended."""

    def __init__(self) -> None:
        self.failures: list[Any] = []

    def settle(self, *_: Any, failure: Any = None, **__: Any) -> None:
        self.failures.append(failure)

    def send_event(self, *_: Any, **__: Any) -> None:
        return

    def restore_result(self, *_: Any, **__: Any) -> None:
        return


@pytest.mark.parametrize("before", ["deck_append", "deck_admit"])
async def test_run_revoked_while_it_starts_is_stopped(valkey_store: Store, before: str) -> None:
    results = Completions()
    other = Runs(IngressContext(valkey_store, results))  # type: ignore[arg-type]
    connection = Stalled(valkey_store, before, lambda: other.revoke("t1"))
    desk = IngressContext(replace(valkey_store, connection=connection), results)  # type: ignore[arg-type]
    await Runs(desk).take(MESSAGE)
    assert await orders_to(desk) == [AgentState.STOPPED]
    await other.take(MESSAGE)
    assert [type(failure) for failure in results.failures] == [TaskRevokedError]


async def test_run_revoked_before_its_ingress_dies_is_stopped(valkey_store: Store) -> None:
    desk = IngressContext(valkey_store, Completions())  # type: ignore[arg-type]
    runs, conversation_id = Runs(desk), derive_task_conversation_id("t1")
    caller = Caller(conversation_id, CELERY, "t1", kept={})
    await desk.callers.add(caller)
    await runs.revoke("t1")
    await desk.callers.mark_answered(conversation_id)
    await desk.start_conversation(MESSAGE.request()[0], conversation_id, "t1", awaited=CELERY)
    for _ in range(2):  # the broker delivers its message again
        await runs.take(MESSAGE)
        await desk.client.log.append(conversation_id, [STOPPED], fields={"state": "stopped"})
    assert await orders_to(desk) == [AgentState.STOPPED]


async def test_revoked_run_continued_by_a_person_is_not_stopped_again(valkey_store: Store) -> None:
    desk = IngressContext(valkey_store, Completions())  # type: ignore[arg-type]
    runs, conversation_id = Runs(desk), derive_task_conversation_id("t1")
    await runs.take(MESSAGE)
    await runs.revoke("t1")
    await desk.client.log.append(conversation_id, [STOPPED], fields={"state": "stopped"})
    await desk.callers.mark_answered(conversation_id)
    await desk.client.resume(conversation_id)
    running = AgentStateChangedObservation(agent_state=AgentState.RUNNING)
    await desk.client.log.append(conversation_id, [running], fields={"state": "running"})
    await runs.take(MESSAGE)  # the broker delivers its message again
    assert await orders_to(desk) == [AgentState.STOPPED, AgentState.RUNNING]
