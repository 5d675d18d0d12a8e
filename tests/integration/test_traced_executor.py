"""A tool worker that makes spans does the same work as one that makes none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from broker.contract import codec
from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.contract.observations import ErrorObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery
from broker.log.event_log import EventLog
from broker.runtime.tracing import RecordedSpan, Tracing
from broker.store.store import Store
from tests.integration.workspace_hosts import opened
from tool_worker.worker.executor import Executor


@contextmanager
def calls_of(function: Any) -> Iterator[list[str]]:
    """Who calls a function meanwhile."""
    found: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is function.__code__ and frame.f_back is not None:
            found.append(frame.f_back.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(before)


async def test_an_action_is_decoded_once_with_traces_and_without(memory_store: Store, tmp_path: Path) -> None:
    spans: list[RecordedSpan] = []
    log = EventLog(memory_store)
    async with opened(tmp_path) as workspaces:
        for number, tracing in enumerate((Tracing(), Tracing(spans.append))):
            name = f"conversation-{number}"
            await log.create(ConversationCreated(conversation_id=name))
            await log.append(name, [CmdRunAction(command="echo hi")])
            delivery = ActionDelivery(name, 2, await log.load_entry(name, 2), WorkspaceSpec(), "")
            executor = Executor(log, workspaces, worker_id="tool-1", spans=tracing)
            with calls_of(codec.decode) as decoded:
                await executor.execute(delivery, ActionClaimed(1))
            assert decoded == ["event"], name
    assert [span.name for span in spans] == ["execute_tool action.run", "action"]


async def test_an_action_that_cannot_be_read_is_answered_and_traced(memory_store: Store, tmp_path: Path) -> None:
    spans: list[RecordedSpan] = []
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="damaged"))
    async with opened(tmp_path) as workspaces:
        tracing = Tracing(spans.append)
        executor = Executor(log, workspaces, worker_id="tool-1", spans=tracing)
        await executor.execute(
            ActionDelivery("damaged", 7, b"\x01\x00half an entry", WorkspaceSpec(), ""), ActionClaimed(1)
        )
    answer = (await log.read("damaged"))[-1]
    assert isinstance(answer, ErrorObservation)
    assert answer.error_id == "corrupt_entry"
    assert [span.name for span in spans] == ["action"]
