"""Recorded exchanges with providers: a file holds settings, a conversation, the requests, the replies and the outcome.

`docs/models.md` says how a file looks. The server is real, in a thread, and answers what the file says.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from broker.contract.tool_specs import ToolSpec
from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import ModelError
from controller_worker.providers.llm import Completion, Delta, ModelRequest
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart, ToolCall

FOLDER = Path(__file__).with_name("recorded_wires")
KEY = "sk-recorded"
SERVER = "{server}"
"""Stands for the server's address in the settings of a file."""
STREAMED: Mapping[str, Mapping[str, Any]] = {
    "/chat/completions": {"stream": True, "stream_options": {"include_usage": True}},
    "/messages": {"stream": True},
    "/responses": {"stream": True},
}
"""By the end of a path: what a streamed request has besides what one for a whole reply has."""
NAMES_OF_LITELLM = ("model", "response_id")
"""What litellm names as it likes."""
IN_THE_PATH = ":streamGenerateContent"
"""Gemini streams at another path, which asks for the same."""


class Exchange(BaseModel):
    """One request and its answer.

    Attributes:
        path: where the request goes; of Gemini, up to the colon.
        headers: that it has at least, names in lower case.
        request: its whole body.
        status: of the answer.
        reply: the answer in one piece; a text is sent as it is.
        stream: the answer as events, each the raw text of one, without the blank line behind it.
        connection: its state after the stream: it ends, stays open, or breaks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    headers: dict[str, str] = {}
    request: dict[str, Any]
    status: int = 200
    reply: Any = None
    stream: tuple[str, ...] = ()
    connection: str = Field(default="ends", pattern="^(ends|held_open|reset)$")


class Recording(BaseModel):
    """One file; see `Exchange`.

    Attributes:
        about: the special behaviour, and its source.
        backends: with this protocol; each is tried.
        settings: of the model.
        tools: that it may call.
        messages: the conversation.
        exchanges: in order.
        unlike: by backend, or `litellm-stream` and the like, fields that it writes differently in every request; null
            for one that it leaves out.
        outcome: the result of the call: the parts of the reply that are not empty, or the code of its error.
        unlike_outcome: the same, for parts of the outcome.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    backends: tuple[str, ...]
    settings: dict[str, Any]
    tools: tuple[dict[str, Any], ...] = ()
    messages: tuple[dict[str, Any], ...]
    exchanges: tuple[Exchange, ...]
    unlike: dict[str, dict[str, Any]] = {}
    outcome: dict[str, Any]
    unlike_outcome: dict[str, dict[str, Any]] = {}

    @property
    def forms(self) -> list[bool]:
        """In which forms it can be tried: False for whole replies, True for streams."""
        whole = all(exchange.reply is not None for exchange in self.exchanges)
        streamed = all(exchange.stream or exchange.status != 200 for exchange in self.exchanges)
        return [False] * whole + [True] * streamed


def recordings(folder: Path = FOLDER) -> dict[str, Recording]:
    """Return all files, by name."""
    return {path.stem: Recording.model_validate_json(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}


def canonical(value: Any) -> str:
    """Write a value so that equal ones are equal byte by byte."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1)


class RecordedServer:
    """Answers as a recording says.

    Attributes:
        seen: path, headers and body of each request.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self._answers: list[tuple[Exchange, bool]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def prepare(self, exchanges: Sequence[Exchange], *, is_streamed: bool) -> None:
        """Forget what was seen; answer so next."""
        self.seen = []
        self._answers = [(exchange, is_streamed) for exchange in exchanges]

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[Exchange, bool] | None:
        """Keep a request and return its answer; None if there is none left."""
        self.seen.append((path, {name.lower(): value for name, value in headers.items()}, json.loads(body)))
        return self._answers.pop(0) if self._answers else None

    def stop(self) -> None:
        """End the thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(server: RecordedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = server.take(self.path, dict(self.headers.items()), body)
            if answer is None:
                self._send(500, b'{"error": {"message": "The recording has no further exchange."}}')
                return
            exchange, is_streamed = answer
            if is_streamed and exchange.stream:
                self._stream(exchange)
                return
            text = exchange.reply if isinstance(exchange.reply, str) else json.dumps(exchange.reply)
            self._send(exchange.status, text.encode())

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Connection", "close")  # litellm keeps connections beyond the loop of a test
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, exchange: Exchange) -> None:
            self.send_response(exchange.status)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.send_header("Connection", "close")
            self.end_headers()
            for event in exchange.stream:
                content = event.encode() + b"\n\n"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
            if exchange.connection == "ends":
                self.wfile.write(b"0\r\n\r\n")
            if exchange.connection == "held_open":
                self.rfile.read(1)  # until the client has had enough

    return Handler


def expected_outcome(recording: Recording, backend: str, *, is_streamed: bool) -> dict[str, Any]:
    """Return the result of the call with a backend."""
    unlike = recording.unlike_outcome
    wanted = recording.outcome | unlike.get(backend, {}) | (unlike.get(f"{backend}-stream", {}) if is_streamed else {})
    names = NAMES_OF_LITELLM if backend == "litellm" else ()
    return {name: part for name, part in wanted.items() if part is not None and name not in names}


async def played(recording: Recording, backend: str, server: RecordedServer, *, is_streamed: bool) -> dict[str, Any]:
    """Make the call of a recording; return its result."""
    server.prepare(recording.exchanges, is_streamed=is_streamed)
    settings = {"api_key": KEY, "native_tool_calling": True, "backend": backend} | recording.settings
    if not is_streamed:
        settings |= {"stream_replies": "off"}
    written = json.dumps(settings).replace(SERVER, server.url)
    llm = create_llm(LLMConfig.create(**json.loads(written)), SystemClock())
    shown: list[Delta] = []
    request = ModelRequest(
        tuple(map(_message, recording.messages)),
        tuple(ToolSpec(**tool) for tool in recording.tools),
        "c1",
        0,
        "/w",
        on_delta=shown.append if is_streamed else None,
    )
    try:
        outcome = outcome_of(await llm.complete(request))
        return {name: part for name, part in outcome.items() if backend != "litellm" or name not in NAMES_OF_LITELLM}
    except ModelError as error:
        return {"error": error.code}
    finally:
        await llm.aclose()


def expected_request(recording: Recording, exchange: Exchange, backend: str, *, is_streamed: bool) -> dict[str, Any]:
    """Return the body that a backend is to send."""
    wanted = exchange.request | recording.unlike.get(backend, {})
    if is_streamed:
        wanted |= next((fields for end, fields in STREAMED.items() if exchange.path.endswith(end)), {})
        wanted |= recording.unlike.get(f"{backend}-stream", {})
    return {name: value for name, value in wanted.items() if value is not None}


def outcome_of(completion: Completion) -> dict[str, Any]:
    """Return the parts of a reply that are not empty, without its duration and the remaining quotas."""
    parts = asdict(completion) | {"latency_seconds": None, "quota_left": None}
    parts["usage"] = {name: count for name, count in parts["usage"].items() if count}
    parts["tool_calls"] = [{name: part for name, part in call.items() if part} for call in parts["tool_calls"]]
    parts["thinking_blocks"] = list(parts["thinking_blocks"])
    parts["is_usage_estimated"] = completion.is_usage_estimated or None
    if completion.cost_usd is not None:
        parts["cost_usd"] = round(completion.cost_usd, 9)
    return {name: part for name, part in parts.items() if part not in (None, "", [], {})}


def _message(fields: Mapping[str, Any]) -> Message:
    content = fields.get("content") or []
    parts = [content] if isinstance(content, str) else content
    return Message(
        fields["role"],
        tuple(TextPart(part) if isinstance(part, str) else ImagePart(part["url"]) for part in parts),
        tuple(ToolCall(**call) for call in fields.get("tool_calls", ())),
        tool_call_id=fields.get("tool_call_id"),
        name=fields.get("name"),
        thinking_blocks=tuple(fields.get("thinking_blocks", ())),
    )
