"""The executor, with a real store: whatever is wrong with an action, it gets an observation."""

from __future__ import annotations

from pathlib import Path

from broker.action_queue import ActionClaimed, ActionDelivery
from broker.event_log import EventLog
from broker.events import ConversationCreated, WorkspaceSpec
from broker.observations import ErrorObservation
from broker.store import Store
from tool_worker.executor import Executor
from tool_worker.workspaces import Workspaces


async def test_an_action_that_cannot_be_read_is_answered(memory_store: Store, tmp_path: Path) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="damaged"))
    executor = Executor(log, Workspaces(tmp_path, sandbox="none"), worker_id="tool-1")
    delivery = ActionDelivery("damaged", 7, b"\x01\x00half an entry", WorkspaceSpec(), "")
    await executor.execute(delivery, ActionClaimed(1))
    answer = (await log.read("damaged"))[-1]
    assert isinstance(answer, ErrorObservation)
    assert (answer.cause, answer.error_id) == (7, "corrupt_entry")
