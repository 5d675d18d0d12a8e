"""MCP servers of single conversations: those that a task names, and those that a skill of its workspace asks for.

Holds: a server is reached only if the operator's file allows its host, which is checked at each call. A connection
serves one conversation. Headers get secrets of that conversation and no others; the log has their names alone. A
skill's server gets no secret, and a program of a skill is never started: the operator's server of that name stands for
it.
Untrusted: a task, a skill, and an action of the log may name any address.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import ValidationError

from broker.contract import (
    SERVER_FILES,
    MCPAction,
    McpAddress,
    SkillReader,
    SkillServer,
    SurveyObservation,
    ToolOffer,
    parse_surveyed_files,
)
from broker.runtime import VARIABLE, UsageError
from broker.secrets import Secrets
from broker.tools import AllowedServers, CustomTool, McpServerSpec, ToolFailed, check_limits, is_allowed_address
from tool_worker.tools.mcp.connection import ProgramLaunch
from tool_worker.tools.mcp.server import McpServer
from tool_worker.tools.mcp.servers import make_custom_tools
from tool_worker.tools.offered import OfferedTools
from tool_worker.tools.remote_work import RemoteWork

if TYPE_CHECKING:
    from mcp.types import Tool

MAX_IDLE = 32
"""Connections that are kept for the next call."""
IDLE_SECONDS = 300.0
PAUSE_SECONDS = 5.0
MAX_ATTEMPTS = 180
"""As long as a task of an operator's server is waited for."""
MAX_NOTICES = 20
SHOWN_CHARS = 100
_log = logging.getLogger(__name__)
ALLOW = "The operator allows hosts under `allow` in the file that DECKHANDS_MCP of the tool workers names."


@dataclass(slots=True)
class _Connection:
    server: McpServer
    users: int = 0
    last_used: float = field(default=0.0)


class TaskServers:
    """The servers of the conversations of one tool worker.

    Args:
        allowed: What tasks and skills may use.
        names: The servers of the operator's file.
        offered: The worker's tools, with those of the operator's servers.
        secrets: The secrets of conversations; None: there are none.
    """

    def __init__(
        self,
        allowed: AllowedServers,
        names: Iterable[str] = (),
        *,
        offered: OfferedTools,
        secrets: Secrets | None = None,
    ) -> None:
        self._allowed = allowed
        self._names = frozenset(names)
        self._offered = offered
        self._secrets = secrets
        self._connections: OrderedDict[tuple[str, str], _Connection] = OrderedDict()

    async def add_offers(
        self, conversation_id: str, answer: SurveyObservation, servers: Mapping[str, McpAddress], *, with_skills: bool
    ) -> SurveyObservation:
        """Return the answer of a survey with the tools of the servers of a task and of the skills that it found."""
        tools: list[ToolOffer] = []
        failures = [answer.failure] if answer.failure else []
        notices = list(answer.left_out or ())
        listed = [self._list_tools(conversation_id, *server, self._allowed.tasks) for server in servers.items()]
        for found in await asyncio.gather(*listed):
            failures += [found] if isinstance(found, str) else []
            tools += [] if isinstance(found, str) else found
        if with_skills:
            asked = await asyncio.to_thread(_find_skill_servers, answer)
            wanted = {server.name: server for server in reversed(asked) if server.name not in servers}
            found_for = [self._list_for_skill(conversation_id, server) for server in wanted.values()]
            for found in await asyncio.gather(*found_for):
                notices += [found] if isinstance(found, str) else []
                tools += [] if isinstance(found, str) else found
        try:
            chosen = check_limits(tools)
        except UsageError as error:
            chosen, failures = (), [*failures, str(error)]
        if len(notices) > MAX_NOTICES:
            notices = [*notices[:MAX_NOTICES], f"and {len(notices) - MAX_NOTICES} more servers of skills"]
        changes = {"tools": chosen or None, "failure": " ".join(failures), "left_out": tuple(notices) or None}
        return answer.model_copy(update=changes)

    @asynccontextmanager
    async def use_tool(
        self, conversation_id: str, action: MCPAction, work: RemoteWork | None = None
    ) -> AsyncIterator[CustomTool | None]:
        """Yield the tool of a call, connected to its server; None if the server does not have it any more.

        Args:
            work: The record of the call. If an earlier worker has left one, a server that is away is waited for.

        Raises:
            ToolFailed: The server is not allowed, cannot be reached, or needs a secret that is missing.
        """
        assert action.server is not None
        name = action.tool.partition("/")[0]
        hosts: Sequence[str] = self._allowed.tasks
        if not action.server.headers:  # an address with headers is a task's, not a skill's
            hosts = (*hosts, *self._allowed.skills)
        spec = await self._make_spec(conversation_id, name, action.server, hosts)
        async with self._use(conversation_id, spec) as server:
            tools = make_custom_tools(server, await _list_patiently(server, work))
            yield next((tool for tool in tools if tool.offer.key == action.tool), None)

    async def aclose(self) -> None:
        """End all connections. Idempotent."""
        connections, self._connections = self._connections, OrderedDict()
        await asyncio.gather(*(connection.server.aclose() for connection in connections.values()))

    async def _list_for_skill(self, conversation_id: str, asked: SkillServer) -> list[ToolOffer] | str:
        if asked.name in self._names:
            if asked.name in self._allowed.skill_servers:
                return [offer for offer in self._offered.offers if offer.key.startswith(f"{asked.name}/")]
            why = f"the operator's server of this name is not one of `allow.skill_servers`. {ALLOW}"
        elif not asked.url:
            why = "it is a program, and the operator's file has no server of this name."
        elif not is_allowed_address(asked.url, self._allowed.skills):
            host = urlsplit(asked.url).hostname or "?"
            why = f"its host {host[:SHOWN_CHARS]!r} is not one of `allow.skills`. {ALLOW}"
        elif asked.has_own_values:
            why = "it needs headers or variables, and a skill gives none. Let the task name it in `mcp_servers`."
        else:
            try:
                address = McpAddress(url=asked.url)
            except ValidationError:
                return _make_notice(asked, "its url cannot be used.")
            found = await self._list_tools(conversation_id, asked.name, address, self._allowed.skills)
            return _make_notice(asked, found) if isinstance(found, str) else found
        return _make_notice(asked, why)

    async def _list_tools(
        self, conversation_id: str, name: str, address: McpAddress, hosts: Sequence[str]
    ) -> list[ToolOffer] | str:
        """Return the tools of a server, or why there are none."""
        if name in self._names:
            return (
                f"The task gives the MCP server {name} a url, and the operator's file has a server of this name. "
                "Name the operator's server without a url, or choose another name."
            )
        try:
            spec = await self._make_spec(conversation_id, name, address, hosts)
            async with self._use(conversation_id, spec) as server:
                tools = make_custom_tools(server, await server.list_tools())
        except ToolFailed as error:
            return str(error)
        return [tool.offer.model_copy(update={"server": address}) for tool in tools]

    async def _make_spec(
        self, conversation_id: str, name: str, address: McpAddress, hosts: Sequence[str]
    ) -> McpServerSpec:
        if not is_allowed_address(address.url, hosts):
            shown = urlsplit(address.url).netloc[:SHOWN_CHARS]
            raise ToolFailed(
                f"The MCP server {name} of the task is at {shown!r}, which this cluster does not allow. It was not "
                "reached.",
                remedy=ALLOW,
            )
        named = " ".join(address.headers.values())
        values = await self._secrets.find_named(conversation_id, named) if self._secrets and named else {}
        for variable in VARIABLE.finditer(named):
            if variable[1] not in values:
                raise ToolFailed(
                    f"A header of the MCP server {name} needs the secret {variable[1]}, which the task does not have.",
                    remedy=f"Give the task the secret {variable[1]}.",
                )
        headers = {
            key: VARIABLE.sub(lambda variable: values[variable[1]], text) for key, text in address.headers.items()
        }
        if any(not text.isprintable() for text in headers.values()):
            raise ToolFailed(f"A secret in a header of the MCP server {name} has a line break or a control character.")
        return McpServerSpec(name=name, url=address.url, headers=headers, type=address.type, tools=address.tools)

    @asynccontextmanager
    async def _use(self, conversation_id: str, spec: McpServerSpec) -> AsyncIterator[McpServer]:
        """Yield a connection of the conversation, which is kept for its next call."""
        key = (conversation_id, spec.model_dump_json())
        connection = self._connections.setdefault(key, _Connection(McpServer(spec, _never_launch)))
        connection.users += 1
        try:
            yield connection.server
        finally:
            connection.users -= 1
            connection.last_used = asyncio.get_running_loop().time()
            if key in self._connections:
                self._connections.move_to_end(key)
            await self._close_idle()

    async def _close_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        idle = [key for key, connection in self._connections.items() if not connection.users]
        for number, key in enumerate(idle):
            if len(idle) - number > MAX_IDLE or now - self._connections[key].last_used > IDLE_SECONDS:
                await self._connections.pop(key).server.aclose()


async def _list_patiently(server: McpServer, work: RemoteWork | None) -> list[Tool]:
    try:
        return await server.list_tools()
    except ToolFailed as error:
        if work is None or await work.load() is None:
            raise
        _log.info("a call waits for its server: %s", error.message)
    async with work.park():
        for _ in range(MAX_ATTEMPTS):
            await asyncio.sleep(PAUSE_SECONDS)
            with suppress(ToolFailed):
                return await server.list_tools()
    return await server.list_tools()


def _find_skill_servers(answer: SurveyObservation) -> tuple[SkillServer, ...]:
    files = list(parse_surveyed_files(answer.content))
    if not any(path.endswith(SERVER_FILES) or "mcp_tools" in (text or "") for path, text in files):
        return ()
    reader = SkillReader()
    for path, text in files:
        reader.add_surveyed(path, text)
    return reader.to_skill_files().servers


def _make_notice(asked: SkillServer, why: str) -> str:
    return f"the MCP server {asked.name} of the skill {ascii(asked.skill)[:SHOWN_CHARS]} is not offered: {why}"


def _never_launch(spec: McpServerSpec) -> ProgramLaunch:
    raise AssertionError(f"{spec.name} has no program")
