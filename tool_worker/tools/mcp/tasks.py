"""Tasks of MCP servers: a server answers a call with a task, and the worker asks for the task's result later.

The extension `io.modelcontextprotocol/tasks` (SEP-2663) of revision 2026-07-28.

Holds: the id of a task is recorded before it is polled for the first time, so that a call whose worker died continues
with the same task. If the server is unavailable, the poll is repeated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from mcp.client import ClientExtension
from mcp.client.extension import ClaimContext, ResultClaim
from mcp.types import (
    CallToolResult,
    ElicitRequest,
    ElicitRequestURLParams,
    ElicitResult,
    InputRequiredResult,
    Request,
    RequestParams,
    Result,
)
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from broker.contract import ServerQuestion

EXTENSION = "io.modelcontextprotocol/tasks"
SHORTEST_POLL_SECONDS = 0.1
DEFAULT_POLL_SECONDS = 1.0
LONGEST_POLL_SECONDS = 60.0
UNREACHABLE_SECONDS = 900.0
"""How long a server with a task may be away."""
MAX_ID_CHARS = 1024
MAX_QUESTIONS = 10
"""Of one answer of a server."""
MAX_QUESTION_CHARS = 8_000
MAX_ROUNDS = 10
"""How often a server may ask during one call."""
_PLAIN_ADDRESS = re.compile(r"https://[A-Za-z0-9.:\[\]-]+(?:[/?#][!-\[\]-~]*)?")
"""An address of visible ASCII characters, without a user's name, and without backslashes, which browsers rewrite."""

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
        error: The protocol's error with which it failed.
        input_requests: The server's questions to the client, by its own names.
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


class UpdateParams(TaskParams):
    """The parameters of a request that answers questions of a task."""

    input_responses: dict[str, Any]


class GetTask(Request[TaskParams, Literal["tasks/get"]]):
    """Asks for the state of a task."""

    method: Literal["tasks/get"] = "tasks/get"
    name_param = "taskId"


class UpdateTask(Request[UpdateParams, Literal["tasks/update"]]):
    """Answers the questions of a task."""

    method: Literal["tasks/update"] = "tasks/update"
    name_param = "taskId"


class CancelTask(Request[TaskParams, Literal["tasks/cancel"]]):
    """Asks the server to end a task."""

    method: Literal["tasks/cancel"] = "tasks/cancel"
    name_param = "taskId"


class CallRecord(BaseModel):
    """The record of a call, for the worker that takes it over, and for the action that continues it.

    Attributes:
        owner: The idempotency key of the action that wrote it.
        key: The idempotency key of the call: that of its first action.
        task_id: The task that the server made of it, or empty.
        answered: Names of the questions of the task that have been answered.
        questions: The server's present questions to the user.
        state: The value that must be returned to the server with the answers, unchanged.
        rounds: How often the server has asked.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    server: str
    owner: str
    key: str
    task_id: str = ""
    poll_seconds: float = DEFAULT_POLL_SECONDS
    answered: tuple[str, ...] = ()
    questions: tuple[ServerQuestion, ...] = ()
    state: str | None = None
    rounds: int = 0

    @classmethod
    def parse(cls, text: str | None, *, server: str, owner: str | None) -> CallRecord | None:
        """Return a record; None if it is missing or belongs to another server or action.

        Args:
            owner: None for any.
        """
        try:
            record = cls.model_validate_json(text or "")
        except ValidationError:
            return None
        return record if record.server == server and owner in (None, record.owner) else None


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


def parse_questions(requests: Mapping[str, Any], most: int = MAX_QUESTIONS) -> tuple[ServerQuestion, ...]:
    """Return the questions of a server to the user, up to a limit.

    Raises:
        ValueError: A question is of another kind, or there are too many; the text names the problem.
    """
    if not 0 < len(requests) <= most:
        raise ValueError(f"it asks {len(requests)} questions at once, and at most {most} can be asked now")
    found = []
    for key, request in requests.items():
        try:
            asked = ElicitRequest.model_validate(request, by_name=False).params
        except ValidationError as error:
            raise ValueError(
                "it asks for something that only a user's program has, such as a model or files"
            ) from error
        if isinstance(asked, ElicitRequestURLParams):
            _check_address(asked.url)
            question = ServerQuestion(key=key, message=asked.message, url=asked.url)
        else:
            question = ServerQuestion(key=key, message=asked.message, fields=asked.requested_schema)
        if len(key) > MAX_ID_CHARS or len(question.model_dump_json()) > MAX_QUESTION_CHARS:
            raise ValueError(f"a question has more than {MAX_QUESTION_CHARS} characters")
        found.append(question)
    names = [name for question in found for name in _find_properties(question)]
    if len(names) != len(set(names)):
        raise ValueError("two of its forms have a field of the same name")
    return tuple(found)


def _check_address(url: str) -> None:
    """Check that a user can see the target of an address.

    Raises:
        ValueError: The target is disguised; the text says how.
    """
    if not url.startswith("https://"):
        raise ValueError("it asks the person to visit an address that is not https")
    if not _PLAIN_ADDRESS.fullmatch(url) or not urlsplit(url).hostname:
        raise ValueError("it asks the person to visit an address with a user's name, or with unusual characters")


def _find_properties(question: ServerQuestion) -> Mapping[str, Any]:
    properties = (question.fields or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def make_responses(questions: Sequence[ServerQuestion], answers: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the responses to a server's questions.

    Args:
        answers: The values of all forms together, by the names of their fields; None: a bare confirmation.

    Raises:
        ValueError: There are no answers, a required field is missing, or a value does not fit its form.
    """
    if answers is None:
        raise ValueError("The confirmation has no `answers`; to agree without any values, give {}.")
    responses = {}
    for question in questions:
        if question.fields is None:
            responses[question.key] = {"action": "accept"}
            continue
        names = _find_properties(question)
        required = question.fields.get("required")
        missing = [name for name in required if name not in answers] if isinstance(required, list) else []
        if missing:
            raise ValueError(f"The answer lacks {', '.join(map(str, missing))}.")
        content = {name: answers[name] for name in names if name in answers}
        try:
            given = ElicitResult(action="accept", content=content)
        except ValidationError as error:
            raise ValueError("A value is neither a text, a number, a truth value nor a list of texts.") from error
        responses[question.key] = given.model_dump(mode="json", by_alias=True, exclude_none=True)
    return responses


async def poll_task(
    load_state: Callable[[], Awaitable[TaskState | None]], poll_seconds: float, answered: Sequence[str] = ()
) -> TaskState | None:
    """Poll a task until it has ended or asks for something.

    Args:
        load_state: Returns the state, or None while the server cannot be reached.
        answered: Names of the questions that have been answered.

    Returns:
        The state; None if the server was unavailable for too long.
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
            is_answered = state.status == "input_required" and set(state.input_requests or ()) <= set(answered)
            if state.status != "working" and not is_answered:
                return state
            poll_seconds = to_poll_seconds(state.poll_interval_ms) if state.poll_interval_ms else poll_seconds
        await asyncio.sleep(min(poll_seconds * 2 ** min(failures, 10), LONGEST_POLL_SECONDS))
