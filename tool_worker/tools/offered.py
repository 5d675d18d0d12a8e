"""The tools that this worker offers besides those of the workspace: loads, publishes and calls them.

Holds: every call is answered by exactly one observation, whatever the tool does. After a worker's death, its call runs
again only if the outcome policy allows it. A tool that has changed since it was offered is not called.
Does not: touch a workspace. A tool runs in the tool worker, with its rights.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from pydantic import BaseModel, TypeAdapter

from broker.contract import (
    ErrorObservation,
    MCPAction,
    Observation,
    OfferedToolAction,
    OutcomePolicy,
    OutcomeUnknownObservation,
    ToolCallObservation,
    ToolOffer,
    truncate_content,
)
from broker.coordination import ActionClaimed, ActionReclaimed
from broker.runtime import UsageError, explain_passing, find_missing_variable
from broker.secrets import Masker
from broker.tools import (
    CustomTool,
    ToolContext,
    ToolFailed,
    ToolFailure,
    ToolRunner,
    as_custom_tool,
    entry_points,
    import_tool,
)

ENTRY_POINTS = "deckhands.tools"
UNKNOWN_TEXT = (
    "The worker that ran this call ended before the result was recorded. "
    "The call may have taken effect. Check before you repeat it."
)

EXPECTED_LIMIT_SECONDS = 60.0
"""How long a call on a newly started worker waits for its tool to become known."""

MAX_ANSWER_CHARS = 2**20
"""Longer answers are cut to head and tail: masking, packing and writing a text blocks the event loop."""

MAX_IMAGES = 10
MAX_IMAGES_CHARS = 8 * 2**20
"""Limit of all images of one answer together, so that they fit into one event with its text."""

REMEDY_OF_NAMED = (
    "Install the module where that worker can import it, or correct DECKHANDS_TOOLS (module:attribute, …), "
    "and restart the worker."
)
REMEDY_OF_PACKAGE = "Repair or remove the package that brings it, and restart the worker."

_log = logging.getLogger(__name__)
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


class OfferedTools:
    """The custom tools of one worker, by key."""

    def __init__(self, tools: Iterable[CustomTool], failures: Iterable[ToolFailure] = ()) -> None:
        self._tools = {tool.offer.key: tool for tool in tools}
        self._failures = {failure.source: failure for failure in failures}
        self._expected: dict[str, asyncio.Event] = {}

    @property
    def offers(self) -> tuple[ToolOffer, ...]:
        """The offers to publish."""
        return tuple(tool.offer for tool in self._tools.values())

    @property
    def failures(self) -> tuple[ToolFailure, ...]:
        """The failures to report: sources that currently provide no tools."""
        return tuple(self._failures.values())

    def fail(self, failure: ToolFailure) -> None:
        """Record that a source provides no tools."""
        self._failures[failure.source] = failure

    def recover(self, source: str) -> bool:
        """Record that a source provides tools again; return whether it had failed before. Idempotent."""
        return self._failures.pop(source, None) is not None

    def replace(self, tools: Iterable[CustomTool], *, prefix: str) -> None:
        """Replace all tools whose key starts with the prefix."""
        kept = {key: tool for key, tool in self._tools.items() if not key.startswith(prefix)}
        self._tools = kept | {tool.offer.key: tool for tool in tools}
        self.expect(prefix).set()

    def expect(self, prefix: str) -> asyncio.Event:
        """Announce tools under this prefix; calls to them wait until they are known."""
        return self._expected.setdefault(prefix, asyncio.Event())

    async def call(
        self,
        action: OfferedToolAction,
        claim: ActionClaimed | ActionReclaimed,
        conversation_id: str,
        context: ToolContext | None = None,
        *,
        tool: CustomTool | None = None,
    ) -> Observation:
        """Run a call, or find out its outcome. Failures of the tool are returned, not raised.

        Idempotent: as far as the tool's outcome policy allows.

        Args:
            context: Identifies the call to the tool, and carries the request to stop.
            tool: A tool of this conversation alone; None: one that is offered to all.
        """
        context = context or ToolContext(conversation_id, action.id)
        is_own = isinstance(action, MCPAction) and action.server is not None
        tool = tool if is_own else await self._find_tool(action.tool or action.name)
        if tool is None:
            why = self._explain_missing(action.tool or action.name)
            text = f"{why} Nothing was called. Continue without it, or tell the user."
            return ErrorObservation(content=text, error_id="no_such_tool")
        if action.fingerprint and action.fingerprint != tool.offer.fingerprint:
            text = (
                f"The tool {action.name} has changed since this conversation began and was not called. "
                "Continue without it, or tell the user."
            )
            return ErrorObservation(content=text, error_id="tool_changed")
        try:
            arguments = tool.parse_arguments(action.arguments)
            if isinstance(claim, ActionReclaimed) and tool.offer.outcome is not OutcomePolicy.IDEMPOTENT:
                if tool.check is None:
                    return OutcomeUnknownObservation(content=UNKNOWN_TEXT)
                found = await _run_tool(tool, tool.check, arguments, context)
                if found is not None:
                    return _to_observation(action, found)
            return _to_observation(action, await _run_tool(tool, tool.run, arguments, context))
        except ToolFailed as error:
            return ErrorObservation(content=_cut(str(error)), error_id=error.code)
        except TimeoutError:
            context.cancelled.set()
            text = f"The tool {action.name} did not answer within {tool.timeout_seconds:g} seconds."
            return ErrorObservation(content=text, error_id="tool_timeout")
        except (Exception, SystemExit) as error:  # noqa: BLE001  (every error of a tool becomes its answer)
            _log.warning("the tool %s failed", action.name, exc_info=error)
            text = f"The tool {action.name} failed: {type(error).__name__}: {error}"
            if variable := find_missing_variable(error):
                text = f"The tool {action.name} reads the environment variable {variable}, which its worker lacks. "
                text += explain_passing(variable)
            return ErrorObservation(content=_cut(text), error_id=ToolFailed.code)

    async def drop(self, action: OfferedToolAction, context: ToolContext, *, tool: CustomTool | None = None) -> None:
        """End what a call has left elsewhere. Idempotent. Arguments as of `call`."""
        found = tool or self._tools.get(action.tool or action.name)
        if found is not None and found.drop is not None:
            await found.drop(context)

    def _explain_missing(self, key: str) -> str:
        server, mark, name = key.partition("/")
        is_known = mark and f"{server}/" in self._expected and self._expected[f"{server}/"].is_set()
        if is_known:
            return f"The MCP server {server} no longer has the tool {name}."
        return f"This worker has no tool {key!r}."

    async def _find_tool(self, key: str) -> CustomTool | None:
        for prefix, is_known in self._expected.items():
            if key.startswith(prefix):
                with suppress(TimeoutError):
                    async with asyncio.timeout(EXPECTED_LIMIT_SECONDS):
                        await is_known.wait()
        return self._tools.get(key)


def load_tools(named: Iterable[str], pools: Iterable[str], *, masker: Masker | None = None) -> OfferedTools:
    """Load the tools of installed packages (entry points `deckhands.tools`) and the named ones.

    A tool that cannot be loaded is logged and recorded as a failure: the worker serves the others, and users who ask
    for the tool see the reason.

    Args:
        named: Importable objects as `module:attribute`.
        pools: The worker's pools; tools for other pools are left out.
        masker: Masks the worker's secrets in the reasons of failures.
    """
    sources: list[tuple[str, Callable[[], Any], str]] = [
        (name, partial(import_tool, name), REMEDY_OF_NAMED) for name in named
    ]
    sources += [
        (f"the entry point {point.name} of {ENTRY_POINTS}", point.load, REMEDY_OF_PACKAGE)
        for point in entry_points(ENTRY_POINTS)
    ]
    tools, failures = [], []
    for source, load, usual_remedy in sources:
        try:
            tools.append(as_custom_tool(load()))
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a foreign module may raise anything)
            _log.error("%s provides no tool", source, exc_info=error)
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, UsageError) else str(error)
            remedy = usual_remedy
            if variable := find_missing_variable(error):
                reason = f"It reads the environment variable {variable}, which this worker lacks."
                remedy = explain_passing(variable)
            reason = masker.mask_text(reason) if masker else reason
            failures.append(ToolFailure(source=source, reason=reason, remedy=remedy))
    served = {"", *pools}
    return OfferedTools([tool for tool in tools if tool.offer.pool in served], failures)


async def _run_tool(tool: CustomTool, run: ToolRunner, arguments: Any, context: ToolContext) -> Any:
    async with asyncio.timeout(tool.timeout_seconds):
        if inspect.iscoroutinefunction(run):
            return await run(arguments, context)
        found = await run_in_own_thread(run, arguments, context)
        return await found if inspect.isawaitable(found) else found


def _to_observation(action: OfferedToolAction, found: Any) -> Observation:
    """Turn a tool's return value into an observation whose texts have at most `MAX_ANSWER_CHARS`.

    A string is the content. A model or an object is data, and its field `content`, if any, is the text for the model;
    otherwise the model reads the data as JSON.
    """
    if isinstance(found, Observation):
        images: Sequence[str] = getattr(found, "image_urls", None) or ()
        kept_images = choose_images(images)
        changes: dict[str, Any] = {"content": _cut(found.content)} if len(found.content) > MAX_ANSWER_CHARS else {}
        if len(kept_images) < len(images):
            note = f"\n[{len(images) - len(kept_images)} of {len(images)} images are left out.]"
            changes |= {"content": _cut(found.content) + note, "image_urls": kept_images}
        return found.model_copy(update=changes) if changes else found
    if found is None or isinstance(found, str):
        return ToolCallObservation(content=_cut(found or ""), name=action.name)
    try:
        plain = found.model_dump(mode="json") if isinstance(found, BaseModel) else _ANY.dump_python(found, mode="json")
        outputs = cast("Mapping[str, Any]", plain) if isinstance(plain, dict) else {"result": plain}
        written = _ANY.dump_json(plain, indent=2).decode("utf-8", "replace")
        content = outputs.get("content")
        if not isinstance(content, str):
            content = written
        # Truncated data would be invalid, so only the text of large data is kept.
        kept = dict(outputs) if len(written) <= MAX_ANSWER_CHARS else {}
        return ToolCallObservation(content=_cut(content), name=action.name, outputs=kept)
    except ValueError as error:
        raise ToolFailed(f"The tool {action.name} answered with something that is not data: {error}") from error


def choose_images(images: Iterable[str]) -> tuple[str, ...]:
    """Return the first images, within the limits of number and total size."""
    kept: list[str] = []
    chars = 0
    for image in images:
        chars += len(image)
        if len(kept) == MAX_IMAGES or chars > MAX_IMAGES_CHARS:
            break
        kept.append(image)
    return tuple(kept)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_ANSWER_CHARS else truncate_content(text, MAX_ANSWER_CHARS)


async def run_in_own_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a new thread and return its result.

    The call starts immediately, even if many others block. A call that never ends blocks no thread of the loop's pool
    and does not keep the process alive. Every exception of the function, even SystemExit, is raised here as an ordinary
    exception. If the caller is cancelled, the thread runs on.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        found, error = None, None
        try:
            found = context.run(function, *arguments)
        except Exception as raised:  # noqa: BLE001  (raised again in the caller)
            error = raised
        except BaseException as raised:  # noqa: BLE001  (SystemExit would end the waiting task)
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(_settle, answer, found, error)

    threading.Thread(target=work, name=f"call of {getattr(function, '__qualname__', function)}", daemon=True).start()
    return await answer


def _settle(answer: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if answer.done():  # the caller was cancelled
        return
    if error is None:
        answer.set_result(found)
    elif isinstance(error, StopIteration):  # a future cannot hold one
        answer.set_exception(RuntimeError(f"StopIteration: {error}"))
    else:
        answer.set_exception(error)
