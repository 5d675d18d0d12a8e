"""Adds the tools of MCP servers to a worker's offered tools (OpenHands 10.8).

Holds: a tool enters a conversation as data, under `<server>/<tool>`, with its description and schema pinned by their
hash. If a server changes a tool later, existing conversations keep the old description, and the tool is not called.
No part of a server's text is hidden from human readers: terminal control characters, characters that reorder a line,
and invisible characters are escaped.
Does not: trust a server. Its texts are information for the model; of its hints, only the one that allows repeating a
call after a crash is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from broker.contract import (
    MAX_DESCRIPTION_CHARS,
    MCPObservation,
    MCPQuestionObservation,
    Observation,
    OutcomePolicy,
    OutcomeUnknownObservation,
    ServerQuestion,
    ToolOffer,
)
from broker.runtime import failpoint
from broker.secrets import Masker
from broker.tools import (
    KEY_FIELD,
    CustomTool,
    LoginNeeded,
    McpServerSpec,
    McpTokens,
    ToolContext,
    ToolFailed,
    ToolFailure,
)
from tool_worker.tools.mcp.connection import CONNECT_LIMIT_SECONDS, ProgramLaunch
from tool_worker.tools.mcp.incoming import SHOWN_NAME_CHARS
from tool_worker.tools.mcp.reading import make_reading_tools
from tool_worker.tools.mcp.server import CHECK_FIRST, McpServer, ShowProgress
from tool_worker.tools.offered import UNKNOWN_TEXT, OfferedTools, choose_images
from tool_worker.tools.remote_work import RemoteContext, RemoteWork

if TYPE_CHECKING:
    from mcp import MCPError
    from mcp.types import CallToolResult, InputRequiredResult, Tool

    from tool_worker.tools.mcp.tasks import CallRecord

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
POLL_SECONDS = 60.0
"""Polling interval of servers that cannot announce changes of their tools."""

MAX_WAITING = 1_000
"""Tasks of one server that a worker waits for; with so many, it starts no further calls there."""

Publish = Callable[[Sequence[ToolOffer]], Awaitable[None]]

_log = logging.getLogger(__name__)
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_TEXTS = frozenset({"description", "title", "$comment"})


class McpServers:
    """The servers of one tool worker.

    Args:
        tokens: Logins at servers; None for none.
        masker: Masks the worker's secrets in reports about failing servers.
        report: Called after the failures of `offered` have changed.
    """

    def __init__(
        self,
        specs: Sequence[McpServerSpec],
        offered: OfferedTools,
        launch: Callable[[McpServerSpec], ProgramLaunch],
        *,
        tokens: McpTokens | None = None,
        masker: Masker | None = None,
        report: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._servers = [McpServer(spec, launch, tokens=tokens) for spec in specs]
        self._offered = offered
        self._masker = masker or Masker()
        self._report = report or _report_nothing
        for spec in specs:
            offered.expect(make_prefix(spec))

    async def offer(self, publish: Publish) -> None:
        """Connect to every server and publish its tools; retries until a server is reached."""
        await asyncio.gather(*(self._offer(server, publish) for server in self._servers))

    async def follow(self, publish: Publish) -> None:
        """Publish the tools again whenever a server changes them; never returns."""
        await asyncio.gather(*(self._follow(server, publish) for server in self._servers))

    async def aclose(self) -> None:
        """End all connections. Idempotent."""
        await asyncio.gather(*(server.aclose() for server in self._servers))

    async def _follow(self, server: McpServer, publish: Publish) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        offered = loop.time()
        while True:
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await server.changed.wait()
            except TimeoutError:
                if await server.needs_polling():
                    with suppress(ToolFailed):
                        await server.list_tools()  # sets `changed` if the tools changed
                continue
            # Backs off if a server changes its tools constantly or dies early.
            is_soon = loop.time() - offered < 2 * pause
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS) if is_soon else FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            server.changed.clear()
            await self._offer(server, publish)
            offered = loop.time()

    async def _offer(self, server: McpServer, publish: Publish) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                tools = make_custom_tools(server, await server.list_tools())
                taken = {tool.offer.key for tool in tools}
                tools += [tool for tool in make_reading_tools(server) if tool.offer.key not in taken]
                break
            except ToolFailed as error:
                _log.warning("%s", error)
                self._offered.fail(self._make_failure(server, error))
                await self._report()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._offered.replace(tools, prefix=make_prefix(server.spec))
        await publish([tool.offer for tool in tools])
        if self._offered.recover(_source_name(server.spec)):
            await self._report()

    def _make_failure(self, server: McpServer, error: ToolFailed) -> ToolFailure:
        spec = server.spec
        words = server.read_last_words()
        reason = f"{error.message} Its last words: {words}" if words else error.message
        if isinstance(error, LoginNeeded):
            remedy = error.remedy
        elif spec.command:
            remedy = f"Correct the command of {spec.name} in the file that DECKHANDS_MCP names; "
            remedy += f"what the program wrote is in <node dir>/.sandbox/mcp/{spec.name}.log there."
        else:
            remedy = f"Start the server {spec.name}, or correct its url in the file that DECKHANDS_MCP names."
        remedy += " The worker tries again by itself, and reads the file when it starts."
        return ToolFailure(
            source=_source_name(spec), server=spec.name, reason=self._masker.mask_text(reason), remedy=remedy
        )


async def _report_nothing() -> None:
    return


def _source_name(spec: McpServerSpec) -> str:
    return f"the MCP server {spec.name}"


def make_custom_tools(server: McpServer, tools: Sequence[Tool]) -> list[CustomTool]:
    """Return a server's tools that its entry allows; logs and leaves out those that cannot be offered."""
    found = []
    names = set[str]()
    for tool in tools:
        shown = tool.name[:SHOWN_NAME_CHARS]
        if tool.name in names:
            _log.warning("%s lists two tools named %r; the second is left out", server.spec.name, shown)
            continue
        if not any(fnmatchcase(tool.name, pattern) for pattern in server.spec.tools):
            continue
        names.add(tool.name)
        try:
            found.append(_make_custom_tool(server, tool))
        except ValueError as error:
            first = error.errors(include_input=False)[0]["msg"] if isinstance(error, ValidationError) else error
            _log.warning("the tool %r of %s cannot be offered and is left out: %s", shown, server.spec.name, first)
    return found


def _make_custom_tool(server: McpServer, tool: Tool) -> CustomTool:
    offer = make_offer(server.spec, tool)

    async def run(arguments: dict[str, Any], context: ToolContext) -> Observation:
        return await _Call(server, tool, offer, arguments, context).run()

    async def check(arguments: dict[str, Any], context: ToolContext) -> Observation:
        call = _Call(server, tool, offer, arguments, context)
        found = await call.resume() or await call.repeat_answer()
        return OutcomeUnknownObservation(content=UNKNOWN_TEXT) if found is None else found

    async def drop(context: ToolContext) -> None:
        await _Call(server, tool, offer, {}, context).drop()

    seconds = server.spec.timeout + server.spec.task_timeout + 2 * CONNECT_LIMIT_SECONDS
    return CustomTool(offer, None, run, check, timeout_seconds=seconds, drop=drop)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a tool, by one worker."""

    server: McpServer
    tool: Tool
    offer: ToolOffer
    arguments: dict[str, Any]
    context: ToolContext

    async def run(self) -> Observation:
        """Call the tool, unless an earlier worker called it and the server made a task of the call."""
        from tool_worker.tools.mcp.tasks import CallRecord

        if (found := await self.resume()) is not None:
            return found
        if (asked := await self._load_asked()) is not None:
            return await self._continue(asked)
        if self._asks is not None:
            raise ToolFailed(f"The questions of {self.tool.name} are not known any more. Nothing was called.")
        name, waiting = self.server.spec.name, self.server.waiting
        if waiting >= MAX_WAITING:
            text = f"This tool worker already waits for {waiting} tasks of the MCP server {name}. Nothing was called."
            raise ToolFailed(text, remedy="Call the tool again when some of them have ended.")
        own = self.context.idempotency_key
        return await self._call(CallRecord(server=name, owner=own, key=own))

    async def resume(self) -> Observation | None:
        """Continue with the task or the questions that an earlier worker has recorded; None if there are none."""
        from tool_worker.tools.mcp.tasks import CallRecord

        text = await self._work.load() if self._work is not None else None
        record = CallRecord.parse(text, server=self.server.spec.name, owner=self.context.idempotency_key)
        if record is None:
            return None
        return self._ask(record) if record.questions else await self._await_task(record)

    async def repeat_answer(self) -> Observation | None:
        """Answer a task's questions again, which has no second effect; None if this call answers none."""
        asked = await self._load_asked()
        return await self._continue(asked) if asked is not None and asked.task_id else None

    async def drop(self) -> None:
        """End the task of a call whose questions were dropped, and forget the call. Idempotent."""
        asked = await self._load_asked()
        if asked is None or self._work is None:
            return
        if asked.task_id:
            await self.server.cancel_task(asked.task_id)
        await self._work.forget()

    @property
    def _asks(self) -> int | None:
        return self.context.asks if isinstance(self.context, RemoteContext) else None

    @property
    def _show_progress(self) -> ShowProgress | None:
        progress = self.context.progress if isinstance(self.context, RemoteContext) else None
        return None if progress is None else progress.show

    @property
    def _work(self) -> RemoteWork | None:
        return self.context.work if isinstance(self.context, RemoteContext) else None

    async def _load_asked(self) -> CallRecord | None:
        """Return the record of the call that this one continues, with its questions; None if there is none."""
        from tool_worker.tools.mcp.tasks import CallRecord

        if self._asks is None or self._work is None:
            return None
        asked = CallRecord.parse(await self._work.load(self._asks), server=self.server.spec.name, owner=None)
        return asked if asked is not None and asked.questions else None

    async def _continue(self, asked: CallRecord) -> Observation:
        """Continue an earlier call with the user's answers. A bare confirmation consents to nothing."""
        from tool_worker.tools.mcp.tasks import MAX_ROUNDS, make_responses

        assert isinstance(self.context, RemoteContext)
        record = asked.model_copy(update={"owner": self.context.idempotency_key, "questions": (), "state": None})
        try:
            responses = make_responses(asked.questions, self.context.answers)
        except ValueError as error:
            if asked.rounds >= MAX_ROUNDS:
                raise await self._give_up(asked, f"the person was asked {MAX_ROUNDS} times") from error
            again = asked.model_copy(update={"owner": record.owner, "rounds": asked.rounds + 1})
            return await self._record_questions(again, f"{error} ")
        if not record.task_id:
            return await self._call(record, responses, asked.state)
        record = record.model_copy(update={"answered": (*record.answered, *responses)})
        await self.server.answer_task(self.tool.name, record.task_id, responses)
        failpoint("tool.question_answered")
        await self._save(record)
        return await self._await_task(record)

    async def _call(
        self, record: CallRecord, responses: Mapping[str, Any] | None = None, state: str | None = None
    ) -> Observation:
        from mcp import MCPError

        from tool_worker.tools.mcp.tasks import CreatedTask, to_poll_seconds

        meta = {KEY_FIELD: record.key}
        if self.context.traceparent:
            meta["traceparent"] = self.context.traceparent
        try:
            answer = await self.server.call(
                self.tool.name,
                self.arguments,
                self._check,
                meta=meta,
                responses=responses,
                state=state,
                show_progress=self._show_progress,
            )
        except MCPError as error:
            return self._observe_failure(error)
        if not isinstance(answer, CreatedTask):
            return await self._observe(answer, record)
        changes = {"task_id": answer.task_id, "poll_seconds": to_poll_seconds(answer.poll_interval_ms)}
        record = record.model_copy(update=changes)
        failpoint("tool.task_created")
        await self._save(record)
        failpoint("tool.task_recorded")
        return await self._await_task(record)

    async def _save(self, record: CallRecord) -> None:
        if self._work is not None:
            await self._work.save(record.model_dump_json())

    async def _await_task(self, record: CallRecord) -> Observation:
        from mcp import MCPError

        name, limit_seconds = self.tool.name, self.server.spec.task_timeout
        try:
            async with self._work.park() if self._work is not None else nullcontext():
                async with asyncio.timeout(limit_seconds):
                    answer = await self.server.await_task(
                        name, record.task_id, record.poll_seconds, record.answered, show_progress=self._show_progress
                    )
        except TimeoutError:
            await self.server.cancel_task(record.task_id)
            text = f"The task of {name} has not ended within {limit_seconds:g} seconds."
            raise ToolFailed(text, remedy=CHECK_FIRST) from None
        except asyncio.CancelledError:
            # Not on a worker's shutdown: the next worker polls the same task.
            if self.context.is_cancelled:
                await asyncio.shield(asyncio.create_task(self._stop(record)))
            raise
        except MCPError as error:
            return self._observe_failure(error)
        return await self._observe(answer, record)

    async def _stop(self, record: CallRecord) -> None:
        """End the task of a stopped call. If another worker has continued the call, that worker owns the task."""
        from tool_worker.tools.mcp.tasks import CallRecord

        if self._work is not None:
            found = CallRecord.parse(await self._work.load(), server=record.server, owner=record.owner)
            if found is None or found.questions:
                _log.info("the task of %s is not ended: another worker carries the call on", self.tool.name)
                return
        await self.server.cancel_task(record.task_id)
        if self._work is not None:
            await self._work.forget()

    async def _give_up(self, record: CallRecord, reason: object) -> ToolFailed:
        """End the task of a call that may ask no further questions; return its error."""
        if record.task_id:
            await self.server.cancel_task(record.task_id)
        return ToolFailed(f"The MCP server {self.server.spec.name} did not complete {self.tool.name}: {reason}.")

    async def _observe(self, answer: CallToolResult | InputRequiredResult, record: CallRecord) -> Observation:
        from mcp.types import InputRequiredResult

        from tool_worker.tools.mcp.tasks import MAX_QUESTIONS, MAX_ROUNDS, parse_questions

        if not isinstance(answer, InputRequiredResult):
            return _to_observation(answer, self.offer.name, self.arguments)
        asked = {
            key: request.model_dump(mode="json", by_alias=True) if isinstance(request, BaseModel) else request
            for key, request in (answer.input_requests or {}).items()
        }
        try:
            most = MAX_QUESTIONS if record.rounds < MAX_ROUNDS and self._work is not None else 0
            questions = tuple(_clean_question(question) for question in parse_questions(asked, most))
        except ValueError as error:
            raise await self._give_up(record, error) from error
        changes = {"questions": questions, "state": answer.request_state, "rounds": record.rounds + 1}
        return await self._record_questions(record.model_copy(update=changes))

    async def _record_questions(self, record: CallRecord, note: str = "") -> MCPQuestionObservation:
        await self._save(record)
        return self._ask(record, note)

    def _ask(self, record: CallRecord, note: str = "") -> MCPQuestionObservation:
        server = self.server.spec.name
        said = "\n".join(question.render(server) for question in record.questions)
        content = f"{note}The MCP server {server} asks the person:\n{said}"
        return MCPQuestionObservation(content=content, name=self.offer.name, questions=record.questions)

    def _observe_failure(self, error: MCPError) -> MCPObservation:
        name, timeout_seconds = self.offer.name, self.server.spec.timeout
        is_late = "timed out" in str(error).lower()
        text = f'Tool "{name}" timed out after {timeout_seconds:g} seconds' if is_late else str(error)
        failed = json.dumps({"isError": True, "error": text, "content": []})
        return MCPObservation(content=failed, name=name, arguments=self.arguments)

    def _check(self, tools: Sequence[Tool]) -> None:
        server, name = self.server, self.tool.name
        present = next((found for found in tools if found.name == name), None)
        if present is None:
            text = f"The MCP server {server.spec.name} no longer has the tool {name}."
            raise ToolFailed(f"{text} Nothing was called.", remedy="Continue without it, or tell the user.")
        if _has_changed(server, present, self.offer):
            raise ToolFailed(
                f"The MCP server {server.spec.name} has changed its tool {name} since this conversation began. "
                "The tool was not called.",
                remedy="Continue without it, or tell the user.",
            )


def _has_changed(server: McpServer, tool: Tool, offer: ToolOffer) -> bool:
    try:
        return make_offer(server.spec, tool).fingerprint != offer.fingerprint
    except ValueError:  # it can no longer be offered
        return True


def _to_observation(result: CallToolResult, name: str, arguments: dict[str, Any]) -> MCPObservation:
    """Return the observation of a result: its JSON as text, and its images up to the limits."""
    plain = result.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"result_type"})
    parts = [part for part in plain.get("content", []) if part.get("type") == "image"]
    images = choose_images(f"data:{part.get('mimeType', 'image/png')};base64,{part['data']}" for part in parts)
    for n, part in enumerate(parts, 1):
        part["data"] = f"[image {n}]" if n <= len(images) else "[image left out]"
    content = json.dumps(plain, ensure_ascii=False)
    return MCPObservation(content=content, name=name, arguments=arguments, image_urls=images or None)


def make_offer(spec: McpServerSpec, tool: Tool) -> ToolOffer:
    """Return the tool as published, under `<server>/<tool>`.

    Raises:
        ValueError: The tool cannot be offered; the text gives the reason.
    """
    if _INVISIBLE.search(tool.name):
        raise ValueError("its name has characters that are not seen")
    hints = tool.annotations
    may_repeat = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
    return ToolOffer(
        key=f"{make_prefix(spec)}{tool.name}",
        name=re.sub(r"[^A-Za-z0-9_-]", "_", tool.name)[:64],
        description=clean(tool.description or "")[:MAX_DESCRIPTION_CHARS],
        parameters=_clean_schema(tool.input_schema),
        runner="mcp",
        pool=spec.pool,
        outcome=OutcomePolicy.IDEMPOTENT if may_repeat else OutcomePolicy.AT_MOST_ONCE,
    )


def make_prefix(spec: McpServerSpec) -> str:
    """Return the prefix of the keys of a server's tools."""
    return f"{spec.name}/"


def clean(text: str) -> str:
    r"""Return a text with invisible characters escaped, as in `\u202e`."""
    return _INVISIBLE.sub(lambda found: found.group().encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def _clean_question(question: ServerQuestion) -> ServerQuestion:
    if _INVISIBLE.search(question.key):
        raise ValueError("the name of a question has characters that are not seen")
    changes: dict[str, Any] = {"message": clean(question.message), "url": clean(question.url)}
    if question.fields is not None:
        changes["fields"] = _clean_strings(_clean_schema(question.fields))
    return question.model_copy(update=changes)


def _clean_strings(part: Any) -> Any:
    """Return a part of a form with all of its texts clean, because the user reads each of them."""
    if isinstance(part, dict):
        return {key: _clean_strings(item) for key, item in part.items()}
    if isinstance(part, list):
        return [_clean_strings(item) for item in part]
    return clean(part) if isinstance(part, str) else part


def _clean_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with clean texts for readers; parts that validate arguments are unchanged.

    Raises:
        ValueError: A parameter's name has invisible characters.
    """

    def clean_part(part: Any, *, is_names: bool = False) -> Any:
        if isinstance(part, list):
            return [clean_part(item) for item in part]
        if not isinstance(part, dict):
            return part
        if any(_INVISIBLE.search(key) for key in part):
            raise ValueError("a name in its schema has characters that are not seen")
        return {
            key: clean(item)
            if key in _TEXTS and isinstance(item, str) and not is_names
            else clean_part(item, is_names=key == "properties" and not is_names)
            for key, item in part.items()
        }

    found: dict[str, Any] = clean_part(schema)
    return found
