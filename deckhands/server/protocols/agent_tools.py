"""Agents as tools of an MCP server (streamable HTTP, at `/mcp`).

Holds: no state between requests, so any server of a cluster can answer; each tool needs the same scope as the
equivalent route. If the caller disconnects, the conversation continues; `cancel` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ParamSpec

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from pydantic import BaseModel, Field

from broker.contract import add_remedy
from broker.runtime import DeckhandsError
from deckhands.client import MAX_KEY_CHARS, MAX_TASK_CHARS, TaskSpec
from deckhands.server.auth.api_keys import DEFAULT_BODY_BYTES, Scope
from deckhands.server.conversations import result_of, submit_task
from deckhands.server.dependencies import MAX_REASON, scoped_key
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.models import ID, MAX_MODEL, NewConversation
from deckhands.server.protocols.agent_tasks import AgentTasks
from deckhands.server.protocols.progress import describe
from deckhands.server.streams import EventStream, reserve_stream

LONGEST_WAIT_SECONDS = 3_600.0
INSTRUCTIONS = """Agents that work on tasks by themselves, with a shell and files. `start_task` begins a conversation \
and returns its id; `wait` returns its result, or where it is after the timeout; `send_message` continues it."""

OF_ITS_OWN = frozenset({"task", "agent", "model", "idempotency_key", "traceparent"})
"""Fields of a task that `start_task` has an argument for, or a program that traces."""
FIELDS = "\n".join(
    f"- {name}: {field.description}" for name, field in TaskSpec.model_fields.items() if name not in OF_ITS_OWN
)
P = ParamSpec("P")
Id = Annotated[str, Field(description="the id of a conversation, from start_task", max_length=100, examples=[ID])]
Seconds = Annotated[float, Field(description="how long to wait for the result", ge=0, le=LONGEST_WAIT_SECONDS)]
Options = Annotated[
    dict[str, Any] | None,
    Field(description=f"further fields of the task, and `agent` as a whole specification:\n{FIELDS}"),
]
Key = Annotated[
    str, Field(description="a repeated call with the same key has one effect; empty: none", max_length=MAX_KEY_CHARS)
]


class TaskState(BaseModel):
    """Where a conversation is.

    Attributes:
        is_settled: nothing more happens until the next message or request.
        message: what the agent said last: its result, or what it asks.
        outputs: its structured output.
        error: the error that it ended in, or empty.
    """

    conversation_id: str
    state: str
    is_settled: bool
    message: str
    outputs: dict[str, Any]
    error: str
    cost_usd: float


class AgentTools:
    """The tools of one server."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        tasks = AgentTasks(gateway, self._load_state)
        self._server = MCPServer("deckhands", instructions=INSTRUCTIONS, extensions=[tasks])
        for tool in (self.start_task, self.wait, self.send_message, self.cancel):
            self._server.add_tool(_show_errors(tool))
        low_level = self._server._lowlevel_server  # noqa: SLF001  (its app has routes and a lifespan that are not ours)
        self.manager = StreamableHTTPSessionManager(low_level, stateless=True, max_request_body_size=DEFAULT_BODY_BYTES)

    async def start_task(
        self,
        context: Context[Any, Any],
        task: Annotated[str, Field(description="what the agent should do", min_length=1, max_length=MAX_TASK_CHARS)],
        *,
        agent: Annotated[str, Field(description="the agent", max_length=100)] = "CodeActAgent",
        model: Annotated[str, Field(description="a profile or model; empty: the default", max_length=MAX_MODEL)] = "",
        options: Options = None,
        wait_seconds: Seconds = 0,
        idempotency_key: Key = "",
    ) -> TaskState:
        """Let an agent work on a task, in a new conversation. Returns at once, or waits for the result."""
        principal = _require_principal(context, Scope.WRITE, *([Scope.READ] if wait_seconds else []))
        if wait_seconds:
            reserve_stream(self._gateway, principal)
        asked = NewConversation.of_protocol({"task": task, "agent": agent, "model": model or None}, options)
        own = scoped_key(principal, f"mcp:{idempotency_key}" if idempotency_key else None)
        conversation_id = await submit_task(self._gateway, principal, asked, own)
        return await self._state(context, principal, conversation_id, wait_seconds)

    async def wait(self, context: Context[Any, Any], conversation_id: Id, timeout_seconds: Seconds = 60) -> TaskState:
        """Wait until an agent is done or needs an answer, up to a timeout; with 0 seconds, return the current state.

        Reports progress.
        """
        principal = _require_principal(context, Scope.READ)
        await self._gateway.require_visible(principal, conversation_id)
        return await self._state(context, principal, conversation_id, timeout_seconds)

    async def send_message(
        self,
        context: Context[Any, Any],
        conversation_id: Id,
        content: Annotated[str, Field(description="the message", min_length=1, max_length=MAX_TASK_CHARS)],
        *,
        wait_seconds: Seconds = 0,
        idempotency_key: Key = "",
    ) -> TaskState:
        """Send the agent a message, which continues it whatever its state: an answer, a correction, further work."""
        principal = _require_principal(context, Scope.WRITE, *([Scope.READ] if wait_seconds else []))
        if wait_seconds:
            reserve_stream(self._gateway, principal)
        await self._gateway.require_visible(principal, conversation_id)
        own = scoped_key(principal, f"mcp:{idempotency_key}" if idempotency_key else None)
        await self._gateway.client_for(principal, "message", "", key=own).send_message(conversation_id, content)
        return await self._state(context, principal, conversation_id, wait_seconds)

    async def cancel(
        self,
        context: Context[Any, Any],
        conversation_id: Id,
        reason: Annotated[str, Field(description="why, for the log", min_length=1, max_length=MAX_REASON)],
    ) -> TaskState:
        """Stop an agent and what it runs. One that is over is left alone."""
        principal = _require_principal(context, Scope.OPERATE)
        await self._gateway.require_visible(principal, conversation_id)
        await self._gateway.client_for(principal, "cancel", reason).cancel(conversation_id)
        return await self._state(context, principal, conversation_id, 0)

    async def _state(
        self, context: Context[Any, Any], principal: Principal, conversation_id: str, wait_seconds: float
    ) -> TaskState:
        """Return the state of a conversation once it has settled or the time is up; report progress meanwhile."""
        if wait_seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._follow(context, principal, conversation_id)
        state, _ = await self._load_state(conversation_id)
        return state

    async def _load_state(self, conversation_id: str) -> tuple[TaskState, int]:
        """Return where a conversation is, and the id of its last event."""
        found = await result_of(self._gateway.client, conversation_id)
        summary = found.summary
        state = TaskState(
            conversation_id=conversation_id,
            state=summary["state"],
            is_settled=found.is_settled,
            message=summary["message"],
            outputs=summary["outputs"],
            error=add_remedy(summary["last_error"], summary.get("remedy", "")),
            cost_usd=summary["cost_usd"],
        )
        return state, summary["last_event_id"]

    async def _follow(self, context: Context[Any, Any], principal: Principal, conversation_id: str) -> None:
        """Report the agent's progress until the conversation has settled.

        Raises:
            ToolError: the conversation can no longer be followed: the key was revoked, the server is shutting down, …
        """
        count = 0
        stream = EventStream(self._gateway, principal, conversation_id, until_settled=True)
        async with contextlib.aclosing(stream.batches()) as batches:
            async for batch in batches:
                for item in batch:
                    if item.kind == "problem":
                        raise ToolError(f"{item.content['detail']} {item.content['remedy']}")
                    if said := describe(item.content) if item.kind == "event" else "":
                        count += 1
                        await context.report_progress(count, message=said)


def _require_principal(context: Context[Any, Any], *scopes: Scope) -> Principal:
    """Return the principal of a tool call, if its key has the scopes.

    Raises:
        Refused: the key lacks one.
    """
    request = context.request_context.request
    assert request is not None, "a tool is called by a request"
    principal: Principal = request.state.principal
    for scope in scopes:
        principal.require(scope)
    return principal


def _show_errors(tool: Callable[P, Awaitable[TaskState]]) -> Callable[P, Awaitable[TaskState]]:
    """Wrap a tool so that its expected errors are shown to the caller; unexpected ones stay hidden."""

    @functools.wraps(tool)
    async def call(*args: P.args, **kwargs: P.kwargs) -> TaskState:
        try:
            return await tool(*args, **kwargs)
        except DeckhandsError as error:
            raise ToolError(f"{error.code}: {error.message} {error.remedy}".strip()) from error

    return call
