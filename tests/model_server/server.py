"""The HTTP server: routes, the record of requests, and the way a reply travels.

Besides the providers' routes there are `GET /v1/models`, and for the tests: `GET /requests` (requests and their
outcomes), `DELETE /requests`, `POST /faults` (a new plan), `GET /counts`, and `GET /wait?disconnected=1` (returns as
soon as the named counts are reached: tests wait on it instead of sleeping).
"""

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pydantic_core
from aiohttp import web

from controller_worker.providers.scripted import Script, ScriptedTurn
from tests.model_server import chat_format, messages_format, responses_format
from tests.model_server.batches import BatchShelf, refuse
from tests.model_server.faults import STATUS_FAULTS, Fault, FaultPlan, spoil_body, spoil_turn, stopped
from tests.model_server.latency import Latency
from tests.model_server.quota import Quota, retry_after

FORMATS: Mapping[str, ModuleType] = {module.PATH: module for module in (chat_format, messages_format, responses_format)}
COUNTED: Mapping[str, ModuleType] = {
    "/v1/messages/count_tokens": messages_format,
    "/v1/responses/input_tokens": responses_format,
}
COUNTING_TURN = -2
REQUEST_LIMIT_BYTES = 64 * 1024 * 1024
BODIES_REMEMBERED = 10_000
WAIT_LIMIT_SECONDS = 600.0
SHUTDOWN_SECONDS = 0.5
_WRONG_TYPES = {"html": "text/html", "wrong_type": "text/plain"}
_OF_THE_WAY = {"reset", "hang", "hang_body", "drip", "cut", "flood", "split", "held_open", "reset_behind"}
FLOOD_BYTES = 1 << 20
SPLIT_BYTES = 7
"""Cuts lines, line ends and characters of several bytes alike."""


@dataclass(slots=True)
class Record:
    """One request. `outcome` is None while it is open, then `answered`, `refused` or `disconnected`."""

    number: int
    path: str
    headers: dict[str, str]
    body: bytes
    peer: str = ""
    fault: str | None = None
    outcome: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the answer of `GET /requests`."""
        try:
            body = json.loads(self.body)
        except ValueError:
            body = self.body.decode(errors="replace")
        shown = {name: getattr(self, name) for name in ("number", "path", "headers", "peer", "fault", "outcome")}
        return shown | {"body": body}


class Asked(NamedTuple):
    """The parts of a request on which a reply depends."""

    path: str
    model: str
    number: int
    is_stream: bool
    stops: tuple[str, ...]
    script: int


class ModelServer:
    """State and handlers of one server."""

    def __init__(
        self,
        script: Script,
        *,
        latency: Latency | None = None,
        models: Sequence[str] = (),
        key: str | None = None,
        records: int = 200,
        faults: FaultPlan | None = None,
        quota: Quota | None = None,
        batch_seconds: float = 0.2,
        by_text: Sequence[tuple[str, Script]] = (),
    ) -> None:
        self._script = script
        self._by_text = [(text.encode(), other) for text, other in by_text]
        self._latency = latency or Latency()
        self._models = tuple(models)
        self._key = key
        self._records: deque[Record] = deque(maxlen=records)
        self._plan = faults or FaultPlan.of_script(script)
        self._quota = quota or Quota()
        self._batches = BatchShelf(script, lambda: self._plan, batch_seconds)
        self._bodies: dict[Asked, bytes] = {}
        self._counts = {"received": 0, "in_flight": 0, "answered": 0, "refused": 0, "disconnected": 0}
        self._changed = asyncio.Condition()

    def app(self) -> web.Application:
        """Build the application."""
        app = web.Application(client_max_size=REQUEST_LIMIT_BYTES)
        app.add_routes([web.post(path, self._complete) for path in FORMATS])
        app.add_routes([web.post(path, self._count_tokens) for path in COUNTED])
        app.add_routes(self._batches.routes())
        app.add_routes(
            [
                web.get("/v1/models", self._list_models),
                web.get("/requests", self._show_requests),
                web.delete("/requests", self._clear_requests),
                web.post("/faults", self._set_faults),
                web.get("/counts", self._show_counts),
                web.get("/wait", self._wait),
            ]
        )
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        peer = str(request.transport.get_extra_info("peername") if request.transport else "")
        record = Record(self._counts["received"], request.path, dict(request.headers), await request.read(), peer)
        self._records.append(record)
        self._count(received=1, in_flight=1)
        outcome = "disconnected"
        try:
            response = await self._answer(request, record)
            outcome = "answered" if response.status == 200 else "refused"
        finally:
            record.outcome = outcome
            self._count(in_flight=-1, **{outcome: 1})
            await self._notify()
        return response

    async def _answer(self, request: web.Request, record: Record) -> web.StreamResponse:
        wire = FORMATS[request.path]
        if self._key is not None and self._key not in (
            request.headers.get("x-api-key"),
            request.headers.get("Authorization", "").removeprefix("Bearer "),
        ):
            return refuse(wire, "unauthorized")
        try:
            body = pydantic_core.from_json(record.body)  # three times as fast as json, which counts at 200 in flight
            if self._models and body["model"] not in self._models:
                return refuse(wire, "unknown_model", f"The model `{body['model']}` does not exist.")
            number = wire.replies_so_far(body)
            complaint = wire.complaint(body, {name.lower(): value for name, value in record.headers.items()})
        except (ValueError, KeyError, TypeError) as error:
            return refuse(wire, "bad_request", f"The request is malformed: {error!r}.")
        if complaint is not None:
            return refuse(wire, "bad_request", complaint)
        fault = self._plan.next(number)
        record.fault = fault.kind if fault else None
        await self._notify()
        script = next((other for text, other in self._by_text if text in record.body), self._script)
        turn = script.get_turn(number)
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "")
        refused_for = self._quota.enter(key, turn.usage.prompt_tokens + turn.usage.completion_tokens)
        if refused_for is not None:
            return refuse(wire, "rate_limit", retry_after=retry_after(refused_for))
        seconds = turn.latency_seconds
        if seconds is None:
            seconds = self._latency.of_request(record.body, number)
        try:
            await asyncio.sleep(script.latency_seconds if seconds is None else seconds)
        finally:
            self._quota.leave(key)
        if fault is not None and fault.kind in STATUS_FAULTS:
            return refuse(wire, fault.kind, fault.text, fault.retry_after)
        if fault is not None and fault.kind == "redirect":
            return web.Response(status=307, headers={"Location": str(request.url)})
        is_stream = body.get("stream") is True and (
            fault is None or fault.kind not in ("not_streamed", "error_as_reply")
        )
        stops = tuple(body.get("stop") or body.get("stop_sequences") or ())
        content = self._render(Asked(request.path, body["model"], number, is_stream, stops, id(script)), turn, fault)
        content_type = "text/event-stream" if is_stream else "application/json"
        if fault is None or fault.kind not in _OF_THE_WAY:
            content_type = _WRONG_TYPES.get(fault.kind if fault is not None else "", content_type)
            return web.Response(body=content, content_type=content_type, headers=self._quota.headers(key))
        return await _travel_badly(request, fault, content, content_type)

    def _render(self, asked: Asked, turn: ScriptedTurn, fault: Fault | None) -> bytes:
        wire, number, model = FORMATS[asked.path], asked.number, asked.model
        if fault is None and asked in self._bodies:
            return self._bodies[asked]
        kind = fault.kind if fault is not None else "none"
        if kind == "empty_choices":
            empty: bytes = wire.no_choices(number, model, is_stream=asked.is_stream)
            return empty
        if kind == "error_as_reply":
            return bytes(wire.error("rate_limit")[1])
        turn = stopped(spoil_turn(kind, turn), asked.stops)
        body: bytes = (wire.stream if asked.is_stream else wire.reply)(turn, number, model)
        if kind == "error_event":
            return bytes(body[: body.index(b"\n\n") + 2] + wire.error_event())
        if fault is None and len(self._bodies) < BODIES_REMEMBERED:
            self._bodies[asked] = body
        return spoil_body(kind, body)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """Count what the reply to the same prompt will report; a fault of the turn -2 is one of the counting."""
        wire = COUNTED[request.path]
        record = Record(self._counts["received"], request.path, dict(request.headers), await request.read())
        self._records.append(record)
        body, fault = json.loads(record.body), self._plan.next(COUNTING_TURN)
        if fault is not None and fault.kind == "hang":
            await asyncio.Event().wait()
        if fault is not None:
            return refuse(wire, fault.kind, fault.text, fault.retry_after)
        count = self._script.get_turn(wire.replies_so_far(body)).usage.prompt_tokens
        return web.json_response({"input_tokens": count})

    async def _list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self._models]})

    async def _show_requests(self, _: web.Request) -> web.Response:
        return web.json_response([record.as_json() for record in self._records])

    async def _clear_requests(self, _: web.Request) -> web.Response:
        self._records.clear()
        return web.json_response({})

    async def _set_faults(self, request: web.Request) -> web.Response:
        self._plan = FaultPlan([Fault.model_validate(fault) for fault in await request.json()])
        return web.json_response({})

    async def _show_counts(self, _: web.Request) -> web.Response:
        return web.json_response(self._counts)

    async def _wait(self, request: web.Request) -> web.Response:
        """Return the counts once each named one is reached, or with status 408 after 150 s: a worker imports for long."""
        wanted = {name: int(value) for name, value in request.query.items()}
        try:
            async with asyncio.timeout(WAIT_LIMIT_SECONDS), self._changed:
                await self._changed.wait_for(lambda: all(self._counts[name] >= value for name, value in wanted.items()))
        except TimeoutError:
            return web.json_response(self._counts, status=408)
        return web.json_response(self._counts)

    def _count(self, **changes: int) -> None:
        for name, change in changes.items():
            self._counts[name] += change

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def serve(server: ModelServer, host: str, port: int) -> None:
    """Serve until cancelled; print the port as the first line."""
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _travel_badly(request: web.Request, fault: Fault, content: bytes, content_type: str) -> web.StreamResponse:
    if fault.kind in ("reset", "hang"):
        if fault.kind == "hang":
            await asyncio.Event().wait()
        _disconnect(request)
        return web.Response()
    length = {} if fault.kind in ("flood", "held_open", "reset_behind") else {"Content-Length": str(len(content))}
    response = web.StreamResponse(headers={"Content-Type": content_type} | length)
    await response.prepare(request)
    while fault.kind == "flood":  # until the client has enough
        await response.write(b"\n" * FLOOD_BYTES)
    if fault.kind == "split":
        for position in range(0, len(content), SPLIT_BYTES):
            await response.write(content[position : position + SPLIT_BYTES])
        return response
    if fault.kind == "drip":
        for position in range(len(content)):
            await response.write(content[position : position + 1])
            await asyncio.sleep(fault.interval_seconds)
        return response
    is_whole = fault.kind in ("held_open", "reset_behind")  # only the connection has no end, or a bad one
    if is_whole and fault.left_out:
        content = b"".join(event + b"\n\n" for event in content.split(b"\n\n")[: -1 - fault.left_out])
    await response.write(content if is_whole else content[: len(content) // 2])
    if fault.kind in ("hang_body", "held_open"):
        await asyncio.Event().wait()
    _disconnect(request)
    return response


def _disconnect(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
