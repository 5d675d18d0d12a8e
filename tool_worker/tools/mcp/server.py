"""One MCP server, through the official SDK, which is imported when the first server is reached.

Holds: one connection serves all calls of a worker, and the next call replaces a broken one. A call uses the same
connection on which its tool was checked. A server's program runs in a separate sandbox, without a workspace, and ends
with its connection.
Does not: offer sampling or roots to a server. It may ask the user only in an answer to a call, or for a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from broker.runtime import read_last_lines
from broker.tools import McpServerSpec, McpTokens, ToolFailed
from tool_worker.tools.mcp.connection import (
    CONNECT_LIMIT_SECONDS,
    SHOWN_CHARS,
    Announcements,
    McpConnection,
    ProgramLaunch,
)
from tool_worker.tools.mcp.program import ANSWER_TOO_LONG

if TYPE_CHECKING:
    from mcp import MCPError
    from mcp.types import CallToolResult, InputRequiredResult, Request, Tool

    from tool_worker.tools.mcp.tasks import CreatedTask, TaskState

    CallAnswer = CallToolResult | InputRequiredResult | CreatedTask

ResultT = TypeVar("ResultT", bound=BaseModel)
CHECK_FIRST = "The call may have taken effect. Check before you repeat it."
_SESSION_ENDED = "Session terminated"
"""The SDK's error for status 404: the server has not run the call, because the session is unknown to it."""
LAST_LINES = 3
CANCEL_SECONDS = 3.0

_log = logging.getLogger(__name__)


class ShowProgress(Protocol):
    """Shows a report: the progress so far, of a total if it is known, and a message."""

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        """Show it."""


class AnswerLost(ToolFailed):
    """A call was sent, and its answer will not arrive."""

    code = "mcp_answer_lost"


class AnswerTooLong(ToolFailed):
    """The answer to a call exceeds the limit."""

    code = "mcp_answer_too_long"


class McpServer:
    """One server.

    Args:
        launch: Returns how to start its program; called before each start, and only for servers with a program.
        tokens: Logins at servers; None for none.
        connect_limit_seconds: Time limit of the handshake.

    Attributes:
        changed: Set when its tools may have changed.
        waiting: Number of its tasks that are waited for.
    """

    def __init__(
        self,
        spec: McpServerSpec,
        launch: Callable[[McpServerSpec], ProgramLaunch],
        *,
        tokens: McpTokens | None = None,
        connect_limit_seconds: float = CONNECT_LIMIT_SECONDS,
    ) -> None:
        self.spec = spec
        self._tokens = tokens
        self._launch = launch
        self._connect_limit_seconds = connect_limit_seconds
        self.changed = asyncio.Event()
        self.waiting = 0
        self._turn = asyncio.Lock()
        self._connection: McpConnection | None = None
        self._was_reached = False
        self._log: Path | None = None

    async def list_tools(self) -> list[Tool]:
        """Return the server's current tools.

        Raises:
            ToolFailed: The server cannot be reached.
        """
        return (await self._open_current()).tools

    async def call(
        self,
        name: str,
        arguments: dict[str, Any],
        check: Callable[[Sequence[Tool]], None],
        *,
        meta: Mapping[str, str],
        responses: Mapping[str, Any] | None = None,
        state: str | None = None,
        show_progress: ShowProgress | None = None,
    ) -> CallAnswer:
        """Call a tool.

        Args:
            check: Receives the server's current tools; raises if the call is not allowed.
            meta: The `_meta` of the request: the idempotency key and the trace, for the server's use.
            responses, state: The answers to the server's questions, and the state that it wants back with them.
            show_progress: Receives the reports of progress that the server sends before its answer.

        Returns:
            The result, the task that the server made of the call, or its questions.

        Raises:
            ToolFailed: The server cannot be reached; nothing was called.
            AnswerLost, AnswerTooLong: The call was sent and may have taken effect.
            MCPError: The server refused, or did not answer in time.
        """
        from mcp import MCPError
        from mcp.types import INVALID_REQUEST

        given: dict[str, Any] = {"inputResponses": dict(responses)} if responses else {}
        given |= {"requestState": state} if state is not None else {}
        params = {"name": name, "arguments": arguments, "_meta": dict(meta), **given}
        is_repeated = False
        while True:
            connection = await self._open_current()
            check(connection.tools)
            try:
                return await self._send_call(connection, params, show_progress)
            except MCPError as error:
                if is_repeated or (error.code, error.message) != (INVALID_REQUEST, _SESSION_ENDED):
                    raise self._explain(error, name) from error
            is_repeated = True
            async with self._turn:
                if self._connection is connection:
                    self._connection = None
                    await connection.aclose()

    async def needs_polling(self) -> bool:
        """Return whether an HTTP server is not connected now, or cannot announce changes of its tools."""
        if self.spec.command:
            return False
        return self._connection is None or self._connection.needs_polling() or not await self._connection.is_alive()

    def read_last_words(self) -> str:
        """Return the last lines of its program's log, or "" if there are none."""
        try:
            return read_last_lines(self._log, limit=LAST_LINES).strip() if self._log is not None else ""
        except OSError:
            return ""

    async def aclose(self) -> None:
        """End the connection, and the program if there is one. Idempotent."""
        async with self._turn:
            if self._connection is not None:
                await self._connection.aclose()
                self._connection = None

    async def request(self, request: Request[Any, Any], result_type: type[ResultT]) -> ResultT:
        """Send a read-only request.

        Raises:
            ToolFailed: The server cannot be reached, or its answer has another type.
            MCPError: The server refused the request, or did not answer in time.
        """
        from mcp import MCPError

        connection = await self._open()
        try:
            with connection.mark_in_use():
                return await connection.session.send_request(
                    request, result_type, request_read_timeout_seconds=self.spec.timeout
                )
        except MCPError as error:
            raise self._explain(error, request.method) from error
        except ValidationError as error:
            raise ToolFailed(
                f"The MCP server {self.spec.name} did not answer {request.method} with a result."
            ) from error

    async def await_task(
        self,
        name: str,
        task_id: str,
        poll_seconds: float,
        answered: Sequence[str] = (),
        *,
        show_progress: ShowProgress | None = None,
    ) -> CallToolResult | InputRequiredResult:
        """Poll a task until it ends or asks questions, and return the call's result or the questions.

        Args:
            answered: Names of its questions that have been answered.
            show_progress: Receives the messages of the task while it works.

        Raises:
            AnswerLost: The server no longer knows the task, or was unavailable for too long.
            ToolFailed: The task was cancelled.
            MCPError: The task failed.
        """
        from mcp import MCPError
        from mcp.types import CallToolResult, ErrorData, InputRequiredResult

        from tool_worker.tools.mcp.tasks import EXTENSION, poll_task

        server = self.spec.name
        shown, polls = "", 0

        async def load_state() -> TaskState | None:
            nonlocal shown, polls
            found = await self._load_task(name, task_id)
            polls += 1
            if show_progress is not None and found is not None and found.status_message not in (None, "", shown):
                shown = found.status_message or ""
                await show_progress(polls, None, shown)
            return found

        self.waiting += 1
        try:
            state = await poll_task(load_state, poll_seconds, answered)
        finally:
            self.waiting -= 1
        if state is None:
            raise AnswerLost(f"The MCP server {server} has been away for too long during {name}.", remedy=CHECK_FIRST)
        said = f" It says: {state.status_message[:SHOWN_CHARS]}" if state.status_message else ""
        try:
            if state.status == "completed":
                return CallToolResult.model_validate(state.result, by_name=False)
            if state.status == "failed":
                raise MCPError.from_error_data(ErrorData.model_validate(state.error, by_name=False))
        except ValidationError as error:
            text = (
                f"The MCP server {server} ended the task of {name} with something that is not a result ({EXTENSION})."
            )
            raise AnswerLost(text, remedy=CHECK_FIRST) from error
        if state.status == "cancelled":
            raise ToolFailed(f"The MCP server {server} cancelled the task of {name}.{said}")
        asked = {key: value for key, value in (state.input_requests or {}).items() if key not in answered}
        return InputRequiredResult.model_construct(input_requests=asked)

    async def answer_task(self, name: str, task_id: str, responses: Mapping[str, Any]) -> None:
        """Answer questions of a task. Idempotent: a server ignores a second answer.

        Raises:
            ToolFailed: The server cannot be reached, or refuses.
        """
        from mcp import MCPError
        from mcp.types import EmptyResult

        from tool_worker.tools.mcp.tasks import UpdateParams, UpdateTask

        params = UpdateParams(task_id=task_id, input_responses=dict(responses))
        connection = await self._open()
        try:
            await connection.session.send_request(
                UpdateTask(params=params), EmptyResult, request_read_timeout_seconds=self.spec.timeout
            )
        except (MCPError, ValidationError) as error:
            text = f"The MCP server {self.spec.name} did not take the answers for {name}: {str(error)[:SHOWN_CHARS]}"
            raise ToolFailed(text) from error

    async def cancel_task(self, task_id: str) -> None:
        """Ask the server to end a task, which it may ignore. Never raises."""
        from mcp.types import EmptyResult

        from tool_worker.tools.mcp.tasks import CancelTask, TaskParams

        with suppress(Exception):
            async with asyncio.timeout(CANCEL_SECONDS):
                connection = await self._open()
                await connection.session.send_request(CancelTask(params=TaskParams(task_id=task_id)), EmptyResult)

    async def _load_task(self, name: str, task_id: str) -> TaskState | None:
        """Return the state of a task; None while the server cannot be reached.

        Raises:
            AnswerLost: The server does not know the task.
        """
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS, METHOD_NOT_FOUND

        from tool_worker.tools.mcp.tasks import GetTask, TaskParams, TaskState

        try:
            connection = await self._open()
            with connection.mark_in_use():
                return await connection.session.send_request(
                    GetTask(params=TaskParams(task_id=task_id)),
                    TaskState,
                    request_read_timeout_seconds=self.spec.timeout,
                )
        except MCPError as error:
            if error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
                text = f"The MCP server {self.spec.name} does not know the task of {name} any more"
                raise AnswerLost(f"{text} ({error.message[:SHOWN_CHARS]}).", remedy=CHECK_FIRST) from error
            _log.info("a task of the MCP server %s cannot be polled: %s", self.spec.name, str(error)[:SHOWN_CHARS])
        except ToolFailed as error:
            _log.info("a task cannot be polled: %s", error.message)
        except ValidationError:
            _log.warning("the MCP server %s answers for a task, but not with its state", self.spec.name)
        return None

    async def _send_call(
        self, connection: McpConnection, params: Mapping[str, Any], show_progress: ShowProgress | None
    ) -> CallAnswer:
        # `send_request`, because the SDK's own `call_tool` drops answers that do not fit the tool's output schema.
        from mcp.types import CallToolRequest, CallToolRequestParams

        from tool_worker.tools.mcp.tasks import ANSWER

        request = CallToolRequest(params=CallToolRequestParams.model_validate(params, by_name=False))
        with connection.mark_in_use():
            try:
                return await connection.session.send_request(
                    request,
                    ANSWER,
                    request_read_timeout_seconds=self.spec.timeout,
                    progress_callback=show_progress,
                )
            except ValidationError as error:
                text = f"The MCP server {self.spec.name} answered the call of {params['name']}, but not with a result."
                raise AnswerLost(text, remedy=CHECK_FIRST) from error

    def _explain(self, error: MCPError, name: str) -> Exception:
        from mcp.types import CONNECTION_CLOSED

        from tool_worker.tools.mcp.http_connection import LOGIN_NEEDED, NOT_SENT

        server = self.spec.name
        if ANSWER_TOO_LONG in str(error):
            text = f"The tool {name} of the MCP server {server} answered with more than 16 MiB, which is not taken."
            return AnswerTooLong(text, remedy="The call has run; only its answer is lost. Ask for less, if you can.")
        if error.code == CONNECTION_CLOSED:
            why = error.message[:SHOWN_CHARS]
            if error.data in (NOT_SENT, LOGIN_NEEDED):
                return ToolFailed(f"The MCP server {server} cannot be reached: {why}. Nothing was called.")
            text = f"The MCP server {server} broke off before it answered the call of {name} ({why})."
            return AnswerLost(text, remedy=CHECK_FIRST)
        return error

    async def _open_current(self) -> McpConnection:
        connection = await self._open()
        await connection.list_if_changed(self.spec.name)
        return connection

    async def _open(self) -> McpConnection:
        async with self._turn:
            if self._connection is not None and not await self._connection.is_alive():
                await self._connection.aclose()
                self._connection = None
            if self._connection is None:
                self._connection = await McpConnection.connect(
                    self.spec,
                    self._launch_program,
                    Announcements(self.changed),
                    tokens=self._tokens,
                    limit_seconds=self._connect_limit_seconds,
                )
                if self._was_reached:  # its version may have changed
                    self.changed.set()
                self._was_reached = True
            return self._connection

    def _launch_program(self, spec: McpServerSpec) -> ProgramLaunch:
        self._log = None
        launch = self._launch(spec)
        self._log = launch.log
        return launch
