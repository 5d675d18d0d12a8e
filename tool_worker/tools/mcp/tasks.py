"""Tasks of MCP servers: calls that a server answers with a task, whose result is asked for later.

The extension `io.modelcontextprotocol/tasks` (SEP-2663) of revision 2026-07-28.

Holds: the id of a task is recorded before it is polled for the first time, so that a call whose worker died continues
with the same task. A server that is away meanwhile is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from mcp.client import ClientExtension
from mcp.client.extension import ClaimContext, ResultClaim
from mcp.types import CallToolResult, InputRequiredResult, Request, RequestParams, Result
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

EXTENSION = "io.modelcontextprotocol/tasks"
SHORTEST_POLL_SECONDS = 0.1
DEFAULT_POLL_SECONDS = 1.0
LONGEST_POLL_SECONDS = 60.0
UNREACHABLE_SECONDS = 900.0
"""How long a server with a task may be away."""
MAX_ID_CHARS = 1024

TaskId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class CreatedTask(Result):
    """The answer to a call that became a task."""

    result_type: Literal["task"]
    task_id: TaskId
    poll_interval_ms: float | None = None


class TaskState(Result):
    """A task, as the server reports it.

    Attributes:
        result: The result of the call, once it is completed.
        error: The error of the protocol in which it failed.
        input_requests: What the server asks the client, by names of its own.
    """

    status: Literal["working", "input_required", "completed", "cancelled", "failed"]
    status_message: str | None = None
    poll_interval_ms: float | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    input_requests: dict[str, Any] | None = None


class TaskParams(RequestParams):
    """The parameters of a request about a task."""

    task_id: TaskId


class GetTask(Request[TaskParams, Literal["tasks/get"]]):
    """Asks for the state of a task."""

    method: Literal["tasks/get"] = "tasks/get"
    name_param = "taskId"


class CancelTask(Request[TaskParams, Literal["tasks/cancel"]]):
    """Asks the server to end a task."""

    method: Literal["tasks/cancel"] = "tasks/cancel"
    name_param = "taskId"


class TaskRecord(BaseModel):
    """What is recorded of a task, for the worker that takes its call over.

    Attributes:
        key: The idempotency key of the call.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    server: str
    key: str
    task_id: TaskId
    poll_seconds: float = DEFAULT_POLL_SECONDS

    @classmethod
    def parse(cls, text: str | bytes | None, *, server: str, key: str) -> TaskRecord | None:
        """Return the record of a call's task; None if there is none, or it is another call's."""
        try:
            record = cls.model_validate_json(text or b"")
        except ValidationError:
            return None
        return record if (record.server, record.key) == (server, key) else None


class TasksExtension(ClientExtension):
    """Declares that we can wait for tasks."""

    identifier = EXTENSION

    def claims(self) -> Sequence[ResultClaim[Any]]:
        """See `ClientExtension`."""
        return (ResultClaim(result_type="task", model=CreatedTask, resolve=_refuse),)


async def _refuse(created: CreatedTask, context: ClaimContext) -> CallToolResult:
    raise AssertionError(f"the SDK was to finish the task {created.task_id} of {context.tool_name}")


def _find_kind(answer: Any) -> str:
    kind = answer.get("resultType") if isinstance(answer, Mapping) else getattr(answer, "result_type", None)
    return "task" if kind == "task" else "input" if kind == "input_required" else "complete"


ANSWER: TypeAdapter[CallToolResult | InputRequiredResult | CreatedTask] = TypeAdapter(
    Annotated[
        Annotated[CallToolResult, Tag("complete")]
        | Annotated[InputRequiredResult, Tag("input")]
        | Annotated[CreatedTask, Tag("task")],
        Discriminator(_find_kind),
    ]
)
"""The answers to a call."""


def to_poll_seconds(interval_ms: float | None) -> float:
    """Return the time between two polls that a server suggests, within our bounds."""
    if interval_ms is None or not interval_ms > 0:
        return DEFAULT_POLL_SECONDS
    return min(max(interval_ms / 1000, SHORTEST_POLL_SECONDS), LONGEST_POLL_SECONDS)


async def poll_task(
    load_state: Callable[[], Awaitable[TaskState | None]], poll_seconds: float
) -> TaskState | None:
    """Poll a task until it has ended or asks for something.

    Args:
        load_state: Returns the state, or None while the server cannot be reached.

    Returns:
        The state; None if the server was away for too long.
    """
    loop = asyncio.get_running_loop()
    reached, failures = loop.time(), 0
    while True:
        state = await load_state()
        if state is None:
            failures += 1
            if loop.time() - reached > UNREACHABLE_SECONDS:
                return None
        else:
            reached, failures = loop.time(), 0
            if state.status != "working":
                return state
            poll_seconds = to_poll_seconds(state.poll_interval_ms) if state.poll_interval_ms else poll_seconds
        await asyncio.sleep(min(poll_seconds * 2 ** min(failures, 10), LONGEST_POLL_SECONDS))
