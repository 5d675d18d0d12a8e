"""Agents as tasks of our MCP server: the extension `io.modelcontextprotocol/tasks` (SEP-2663) of revision 2026-07-28.

A client that declares the extension gets a task instead of a wait: `start_task` with `wait_seconds` returns at once,
and the id of the task is the conversation's.

Holds: no state besides the conversation, so any server of a cluster can answer, also after a restart. A question of the
agent, or its wait for a confirmation, is a question of the task, and its name is never used again. Each method needs
the scope of the equivalent route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from mcp import MCPError
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.types import INVALID_PARAMS, CallToolRequestParams, CallToolResult, RequestParams, TextContent
from pydantic import Field

from broker.contract import AgentState, AgentStateChangedObservation, MCPAction, RiskyAction
from broker.runtime import DeckhandsError
from deckhands.client import MAX_TASK_CHARS
from deckhands.server.auth.api_keys import Scope
from deckhands.server.gateway import Gateway, Principal

if TYPE_CHECKING:
    from deckhands.server.protocols.agent_tools import TaskState

EXTENSION = "io.modelcontextprotocol/tasks"
VERSIONS = frozenset({"2026-07-28"})
POLL_MS = 1000
MAX_SHOWN_CHARS = 8_000
NOT_ANSWERED = "The question was not answered."
COMPLETE = {"resultType": "complete"}
STATUSES = {
    AgentState.FINISHED: "completed",
    AgentState.REJECTED: "completed",
    AgentState.ERROR: "completed",
    AgentState.STOPPED: "cancelled",
    AgentState.AWAITING_USER_INPUT: "input_required",
    AgentState.AWAITING_USER_CONFIRMATION: "input_required",
}
"""The status of a task by the state of its conversation; `working` for any other."""

Context = ServerRequestContext[Any, Any]


class TaskParams(RequestParams):
    """The parameters of a request about a task."""

    task_id: Annotated[str, Field(max_length=100)]


class UpdateParams(TaskParams):
    """The answers to questions of a task, by their names."""

    input_responses: dict[str, Any]


class AgentTasks(Extension):
    """The extension of one server.

    Args:
        load_state: Returns where a conversation is, and the id of its last event.
    """

    identifier = EXTENSION

    def __init__(self, gateway: Gateway, load_state: Callable[[str], Awaitable[tuple[TaskState, int]]]) -> None:
        self._gateway = gateway
        self._load_state = load_state

    def methods(self) -> Sequence[MethodBinding]:
        """See `Extension`."""
        return (
            MethodBinding("tasks/get", TaskParams, self._get, VERSIONS),
            MethodBinding("tasks/update", UpdateParams, self._update, VERSIONS),
            MethodBinding("tasks/cancel", TaskParams, self._cancel, VERSIONS),
        )

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: Context, call_next: CallNext
    ) -> HandlerResult:
        """Return a task in place of a wait, to a client that declares tasks."""
        capabilities = ctx.session.client_capabilities
        declared = (capabilities.extensions if capabilities else None) or {}
        arguments = params.arguments or {}
        is_waiting = params.name == "start_task" and bool(arguments.get("wait_seconds"))
        if not is_waiting or EXTENSION not in declared or ctx.protocol_version not in VERSIONS:
            return await call_next(ctx)
        arguments["wait_seconds"] = 0
        result = await call_next(ctx)
        if not isinstance(result, CallToolResult) or result.is_error or not result.structured_content:
            return result
        conversation_id = result.structured_content["conversation_id"]
        return {**await self._describe(conversation_id), "resultType": "task"}

    async def _get(self, ctx: Context, params: TaskParams) -> HandlerResult:
        await self._require(ctx, params.task_id, Scope.READ)
        state, _ = await self._load_state(params.task_id)
        about = {**await self._describe(params.task_id, state), **COMPLETE}
        if about["status"] == "completed":
            is_error = state.state != AgentState.FINISHED
            content = [TextContent(type="text", text=state.message or state.error)]
            data = state.model_dump(mode="json")
            result = CallToolResult(content=content, structured_content=data, is_error=is_error)
            about["result"] = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        elif about["status"] == "input_required":
            question = await self._load_question(params.task_id)
            about["inputRequests"] = {question.key: _make_question(state, question)}
        return about

    async def _update(self, ctx: Context, params: UpdateParams) -> HandlerResult:
        principal = await self._require(ctx, params.task_id, Scope.WRITE)
        state, last_id = await self._load_state(params.task_id)
        question = await self._load_question(params.task_id)
        key = question.key
        response = params.input_responses.get(key)
        if STATUSES.get(AgentState(state.state)) != "input_required" or not isinstance(response, dict):
            return COMPLETE  # answered before, or never asked
        given = response.get("content")
        content = given if isinstance(given, dict) else {}
        is_accepted = response.get("action") == "accept"
        once = f"mcp-task:{params.task_id}:{key}"
        client = self._gateway.client_for(principal, "answer", "", key=once)
        if state.state == AgentState.AWAITING_USER_INPUT:
            answer = content.get("answer") if is_accepted else NOT_ANSWERED
            if not isinstance(answer, str) or not 0 < len(answer) <= MAX_TASK_CHARS:
                raise MCPError(INVALID_PARAMS, f"`answer` must be a text of 1 to {MAX_TASK_CHARS} characters.")
            await client.send_message(params.task_id, answer, seen_id=last_id)
        elif is_accepted and (question.fields or content.get("confirm") is True):
            edited = {"answers": content if question.fields else {}} if question.is_servers else {}
            await client.confirm(params.task_id, action_id=question.action_id, edited=edited)
        else:
            await client.reject(params.task_id, action_id=question.action_id)
        return COMPLETE

    async def _cancel(self, ctx: Context, params: TaskParams) -> HandlerResult:
        principal = await self._require(ctx, params.task_id, Scope.OPERATE)
        await self._gateway.client_for(principal, "cancel", "tasks/cancel").cancel(params.task_id)
        return COMPLETE

    async def _load_question(self, conversation_id: str) -> _Question:
        """Return the question that the conversation waits for, from its last change of state."""
        events = await self._gateway.client.events(conversation_id, is_whole=True, is_lenient=True)
        change = next((event for event in reversed(events) if isinstance(event, AgentStateChangedObservation)), None)
        action_id = change.action_id if change is not None else None
        action = next((event for event in events if action_id is not None and event.id == action_id), None)
        return _Question(change.id if change is not None else 0, action if isinstance(action, RiskyAction) else None)

    async def _require(self, ctx: Context, conversation_id: str, scope: Scope) -> Principal:
        """Return the principal of a request, if its key has the scope and may see the conversation.

        Raises:
            MCPError: it may not, or there is no such task; the error does not distinguish the two.
        """
        assert ctx.request is not None, "a method is called by a request"
        principal: Principal = ctx.request.state.principal
        try:
            principal.require(scope)
            await self._gateway.require_visible(principal, conversation_id)
        except DeckhandsError as error:
            raise MCPError(INVALID_PARAMS, f"{error.code}: {error.message} {error.remedy}".strip()) from error
        return principal

    async def _describe(self, conversation_id: str, state: TaskState | None = None) -> dict[str, Any]:
        row = await self._gateway.client.row(conversation_id)
        created = row.created.isoformat()
        status = "working" if state is None else STATUSES.get(AgentState(state.state), "working")
        about: dict[str, Any] = {
            "taskId": conversation_id,
            "status": status,
            "createdAt": created,
            "lastUpdatedAt": created,
        }
        about |= {"ttlMs": None, "pollIntervalMs": POLL_MS}
        return about | ({"statusMessage": state.state} if state is not None else {})


@dataclass(frozen=True, slots=True)
class _Question:
    """The question that a conversation waits for.

    Attributes:
        asked_id: the event that asked.
        action: the action that awaits confirmation; None if the agent waits for a message.
    """

    asked_id: int
    action: RiskyAction | None

    @property
    def key(self) -> str:
        """Its name, which later events do not change."""
        return f"event-{self.asked_id}"

    @property
    def action_id(self) -> int | None:
        return self.action.id if self.action is not None else None

    @property
    def is_servers(self) -> bool:
        """Whether an MCP server asks."""
        return isinstance(self.action, MCPAction) and self.action.asks is not None

    @property
    def forms(self) -> list[dict[str, Any]]:
        """The forms of an MCP server."""
        asked = self.action.questions if isinstance(self.action, MCPAction) else ()
        return [question.fields for question in asked if question.fields is not None]

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of all forms, by their names."""
        return {name: field for form in self.forms for name, field in (form.get("properties") or {}).items()}


def _make_question(state: TaskState, question: _Question) -> dict[str, Any]:
    message, form = state.message, {"properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    if question.action is not None:
        shown = "\n".join(paragraph.text for paragraph in question.action.confirmation_paragraphs)
        if len(shown) > MAX_SHOWN_CHARS:
            shown = f"{shown[:MAX_SHOWN_CHARS]}\n… {len(shown)} characters in all; the log of the task has them."
        message = f"May the agent run this action?\n{shown}"
        form = {"properties": {"confirm": {"type": "boolean"}}, "required": ["confirm"]}
    if question.fields:
        required = [name for one in question.forms for name in one.get("required") or ()]
        form = {"properties": question.fields, "required": required}
    form = {"type": "object", **form}
    return {
        "method": "elicitation/create",
        "params": {"mode": "form", "message": message or "The agent waits for you.", "requestedSchema": form},
    }
