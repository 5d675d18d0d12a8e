"""An MCP server of revision 2026-07-28 in the test's own process that makes tasks of calls, and outlives all workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.scripted_mcp_server import served

VERSION = "2026-07-28"
KEY = "deckhands/idempotencyKey"
SCHEMA = {"type": "object", "properties": {"seconds": {"type": "number"}, "name": {"type": "string"}}}
TOOLS = [
    {"name": "job", "inputSchema": SCHEMA},
    {"name": "keyed_job", "inputSchema": SCHEMA, "annotations": {"idempotentHint": True}},
    {"name": "asking_job", "inputSchema": SCHEMA},
    {"name": "ask", "inputSchema": SCHEMA},
]
COMPLETE = {"resultType": "complete"}
STATE = "opaque é"
FORM = {"type": "object", "properties": {"size": {"type": "number"}}, "required": ["size"]}


def question(message: str = "Which size?", **params: Any) -> dict[str, Any]:
    """Return a question of the server, for the form that asks for a size."""
    return {
        "method": "elicitation/create",
        "params": {"mode": "form", "message": message, "requestedSchema": FORM} | params,
    }


@dataclass
class RemoteJob:
    """A task.

    Attributes:
        ends_at: infinite until the test ends it.
        is_end_seen: a poll was answered after its end.
    """

    name: str
    ends_at: float
    is_cancelled: bool = False
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    polls: int = 0
    is_end_seen: bool = False
    is_asking: bool = False
    message: str = ""


@dataclass
class TaskServer:
    """The server.

    Attributes:
        started: how often each call was started, by the name that the call gives.
        metas: the `_meta` of each call.
        headers: those of the latest request.
        seen: the methods that were asked for.
        last_params: the parameters of the latest request.
        questions: what the tools that ask want to know.
        responses: the answers to them.
        is_away: it hangs up on every request.
        poll_ms: the interval that it suggests.
    """

    url: str = ""
    jobs: dict[str, RemoteJob] = field(default_factory=dict)
    by_key: dict[str, str] = field(default_factory=dict)
    started: Counter[str] = field(default_factory=Counter)
    metas: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    last_params: dict[str, Any] = field(default_factory=dict)
    questions: dict[str, Any] = field(default_factory=lambda: {"q1": question()})
    responses: list[Any] = field(default_factory=list)
    is_away: bool = False
    poll_ms: int = 100

    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.is_away and request.transport is not None:
            request.transport.abort()
            return web.Response(status=503)
        if request.method != "POST":
            return web.Response(status=405)
        asked = await request.json()
        if "id" not in asked:
            return web.Response(status=202)
        self.headers = dict(request.headers)
        method, params = asked["method"], asked.get("params") or {}
        self.seen[method] += 1
        self.last_params = params
        found = self._answer(method, params)
        body = {"result": found} if found is not None else {"error": {"code": -32602, "message": "no such thing"}}
        return web.json_response({"jsonrpc": "2.0", "id": asked["id"], **body})

    def _answer(self, method: str, params: dict[str, Any]) -> dict[str, Any] | None:
        cached = {**COMPLETE, "ttlMs": 0, "cacheScope": "private"}
        match method:
            case "server/discover":
                capabilities = {"tools": {}, "extensions": {"io.modelcontextprotocol/tasks": {}}}
                return {**cached, "supportedVersions": [VERSION], "capabilities": capabilities}
            case "tools/list":
                return {**cached, "tools": TOOLS}
            case "tools/call" if params["name"] == "ask":
                return self._ask(params)
            case "tools/call":
                return self._start(params)
            case "tasks/update" if params["taskId"] in self.jobs:
                self.responses.append(params["inputResponses"])
                self.jobs[params["taskId"]].ends_at = 0.0
                return COMPLETE
            case "tasks/get" if params["taskId"] in self.jobs:
                return self._state(params["taskId"])
            case "tasks/cancel" if params["taskId"] in self.jobs:
                self.jobs[params["taskId"]].is_cancelled = True
                return COMPLETE
        return None

    def _ask(self, params: dict[str, Any]) -> dict[str, Any]:
        self.metas.append(params["_meta"])
        if not params.get("inputResponses"):
            return {"resultType": "input_required", "inputRequests": self.questions, "requestState": STATE}
        assert params["requestState"] == STATE
        self.responses.append(params["inputResponses"])
        return {**COMPLETE, "content": [{"type": "text", "text": "thank you"}], "isError": False}

    def _start(self, params: dict[str, Any]) -> dict[str, Any]:
        meta, given = params["_meta"], params["arguments"]
        self.metas.append(meta)
        key = meta[KEY]
        is_known = params["name"] == "keyed_job" and key in self.by_key
        if not is_known:
            self.started[given["name"]] += 1
            seconds = given.get("seconds")
            ends_at = asyncio.get_running_loop().time() + seconds if seconds is not None else float("inf")
            self.by_key[key] = task_id = f"task-{len(self.jobs)}"
            self.jobs[task_id] = RemoteJob(given["name"], ends_at, is_asking=params["name"] == "asking_job")
        return {**self._describe(self.by_key[key]), "resultType": "task", "status": "working"}

    def _state(self, task_id: str) -> dict[str, Any]:
        job = self.jobs[task_id]
        job.polls += 1
        about = {**self._describe(task_id), **COMPLETE, "status": "working"}
        about |= {"statusMessage": job.message} if job.message else {}
        if job.error is not None:
            return {**about, "status": "failed", "error": job.error}
        if job.is_cancelled:
            return {**about, "status": "cancelled"}
        if asyncio.get_running_loop().time() < job.ends_at:
            is_asking = job.is_asking
            return {**about, "status": "input_required", "inputRequests": self.questions} if is_asking else about
        job.is_end_seen = True
        text = [{"type": "text", "text": f"{job.name} is done"}]
        return {**about, "status": "completed", "result": job.result or {"content": text, "isError": False}}

    def _describe(self, task_id: str) -> dict[str, Any]:
        now = "2026-11-30T08:00:00Z"
        about = {"taskId": task_id, "createdAt": now, "lastUpdatedAt": now, "ttlMs": None}
        return {**about, "pollIntervalMs": self.poll_ms}

    def end_all(self) -> None:
        """Let all tasks end now."""
        for job in self.jobs.values():
            job.ends_at = 0.0


@asynccontextmanager
async def task_server() -> AsyncIterator[TaskServer]:
    server = TaskServer()
    async with served(server.route) as url:
        server.url = url
        yield server
