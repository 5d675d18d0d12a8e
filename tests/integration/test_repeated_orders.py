"""Tasks of the ingress that are delivered again do nothing twice; runs revoked while they start are stopped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.observations import AgentStateChangedObservation
from broker.contract.specs import WorkspaceSpec
from broker.coordination.membership import Membership
from broker.log.event_log import EventLog
from broker.runtime.errors import DeckhandsError, UsageError
from broker.store.store import Store
from deckhands.client.client import Client
from deckhands.ingress.callers import CELERY, Caller
from deckhands.ingress.commands import ConversationCommands
from deckhands.ingress.context import IngressContext, derive_task_conversation_id
from deckhands.ingress.ingress_results import Ending
from deckhands.ingress.runs import RunMessage, Runs
from tests.archive_parts import begin_ended
from tests.integration.test_inbox_edges import NoResults


@pytest.fixture
def desk(valkey_store: Store) -> IngressContext:
    return IngressContext(valkey_store, NoResults())  # type: ignore[arg-type]


async def test_a_cancellation_that_found_nothing_to_stop_stops_nothing_later(desk: IngressContext) -> None:
    orders = ConversationCommands(desk)
    await begin_ended(desk.client, "shop-1")
    assert (await orders.run("cancel", "t1", ["shop-1"], {}))["state"] == "finished"
    await desk.client.send_message("shop-1", "One more thing.")
    events = await desk.client.events("shop-1")
    await orders.run("cancel", "t1", ["shop-1"], {})
    assert await desk.client.events("shop-1") == events


@pytest.mark.parametrize("what", ["cancel", "pause"])
async def test_a_conversation_that_a_message_continues_is_not_over(desk: IngressContext, what: str) -> None:
    """The message has not been read yet, and the state is still the one of the end before it."""
    await begin_ended(desk.client, "shop-3")
    await desk.client.send_message("shop-3", "One more thing.")
    events = await desk.client.events("shop-3")
    await ConversationCommands(desk).run(what, "t1", ["shop-3"], {})
    assert len(await desk.client.events("shop-3")) == len(events) + 1


async def ask(desk: IngressContext, conversation_id: str, action_id: int) -> None:
    """Let a conversation ask about an action, as its controller does."""
    state = AgentState.AWAITING_USER_CONFIRMATION
    asks = AgentStateChangedObservation(agent_state=state, action_id=action_id)
    await EventLog(desk.store).append(conversation_id, [asks], fields={"state": state.value})


@pytest.mark.parametrize("what", ["confirm", "reject"])
async def test_an_answer_that_is_delivered_again_answers_no_later_question(desk: IngressContext, what: str) -> None:
    """The first ingress failed before it wrote the answer, and a user answered meanwhile."""
    await begin_ended(desk.client, "shop-4")
    await ask(desk, "shop-4", 5)
    call = desk.store.connection.call
    functions = await call("FUNCTION", "DUMP")
    await call("FUNCTION", "FLUSH")
    try:
        with pytest.raises(DeckhandsError):
            await ConversationCommands(desk).run(what, "t1", ["shop-4"], {})
    finally:
        await call("FUNCTION", "RESTORE", functions, "REPLACE")
    await ask(desk, "shop-4", 9)
    events = await desk.client.events("shop-4")
    with pytest.raises(UsageError, match="asks about action 9"):
        await ConversationCommands(desk).run(what, "t1", ["shop-4"], {})
    assert await desk.client.events("shop-4") == events
    await ConversationCommands(desk).run(what, "t2", ["shop-4"], {})
    assert len(await desk.client.events("shop-4")) == len(events) + 1


class Stalled:
    """A connection of an ingress that stalls before a command, while another process acts."""

    def __init__(self, store: Store, before: str, meanwhile: Callable[[], Awaitable[object]]) -> None:
        self._inner = store.connection
        self._before = before
        self._meanwhile: Callable[[], Awaitable[object]] | None = meanwhile

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def call(self, *command: object) -> object:
        if self._meanwhile is not None and self._before in command[:2]:
            meanwhile, self._meanwhile = self._meanwhile, None
            await meanwhile()
        return await self._inner.call(*command)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["confirm", "reject"])
@pytest.mark.parametrize("before", ["HSETNX", "HGET"])
async def test_two_ingresses_with_one_answer_give_it_once(desk: IngressContext, what: str, before: str) -> None:
    """The first ingress stalls; the task is delivered to a second one, whose answer the agent reads before that."""
    await begin_ended(desk.client, "shop-6")
    await ask(desk, "shop-6", 5)

    async def second_ingress() -> None:
        await ConversationCommands(desk).run(what, "t1", ["shop-6"], {})
        running = AgentStateChangedObservation(agent_state=AgentState.RUNNING)
        await EventLog(desk.store).append("shop-6", [running], fields={"state": "running"})

    connection = Stalled(desk.store, before, second_ingress)
    stalled = IngressContext(replace(desk.store, connection=connection), NoResults())  # type: ignore[arg-type]
    found = await ConversationCommands(stalled).run(what, "t1", ["shop-6"], {})
    assert found == {"conversation_id": "shop-6", "state": "running"}
    answers = [event for event in await desk.client.events("shop-6") if isinstance(event, ChangeAgentStateAction)]
    assert [event.action_id for event in answers] == [5]


async def test_an_answer_that_found_no_question_answers_none_later(desk: IngressContext) -> None:
    await begin_ended(desk.client, "shop-5")
    with pytest.raises(UsageError, match="asks nothing"):
        await ConversationCommands(desk).run("confirm", "t1", ["shop-5"], {})
    await ask(desk, "shop-5", 5)
    events = await desk.client.events("shop-5")
    with pytest.raises(UsageError, match="asks about action 5"):
        await ConversationCommands(desk).run("confirm", "t1", ["shop-5"], {})
    assert await desk.client.events("shop-5") == events


async def test_existing_fork_is_returned_although_no_node_serves_it(desk: IngressContext) -> None:
    client, orders = Client(desk.store), ConversationCommands(desk)
    node = {"node": "n1", "pools": "bash", "workspace_roots": "/srv"}
    serving = Membership(desk.store, "t-1", "tool", about=node, ttl_seconds=3_600.0)
    other = Membership(desk.store, "t-2", "tool", about=node | {"workspace_roots": "/home"}, ttl_seconds=3_600.0)
    await serving.register()
    await begin_ended(client, "shop-2", workspace=WorkspaceSpec(path="/srv/shop"))
    fork = await orders.run("fork", "t1", ["shop-2"], {})
    await other.register()
    await serving.leave()
    assert await orders.run("fork", "t1", ["shop-2"], {}) == fork
    with pytest.raises(UsageError, match="/srv/shop"):
        await orders.run("fork", "t2", ["shop-2"], {})


MESSAGE = RunMessage("t1", ("look",), {}, {})
STOPPED = AgentStateChangedObservation(agent_state=AgentState.STOPPED)


async def orders_to(desk: IngressContext) -> list[AgentState]:
    """Return the states that were requested of the conversation."""
    events = await desk.client.events(derive_task_conversation_id("t1"))
    return [event.agent_state for event in events if isinstance(event, ChangeAgentStateAction)]


class Completions:
    """A result backend that records how tasks have ended."""

    def __init__(self) -> None:
        self.failures: list[Any] = []

    def settle(self, ending: Ending) -> None:
        self.failures.append(ending.failure)

    def queue_event(self, *_: Any, **__: Any) -> None:
        return

    def send_queued_events(self) -> None:
        return

    def restore_result(self, *_: Any, **__: Any) -> None:
        return


async def test_run_revoked_while_it_starts_is_stopped(valkey_store: Store) -> None:
    results = Completions()
    other = Runs(IngressContext(valkey_store, results))  # type: ignore[arg-type]
    connection = Stalled(valkey_store, "deck_append", lambda: other.revoke("t1"))
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
    await desk.start_conversation(MESSAGE.request()[0], conversation_id, "t1", caller=caller)
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
