"""The Messages endpoint that the CLI of the Claude Agent SDK uses as its provider, on the loopback of its sandbox.

It sends a reply of the log as a stream of the Messages protocol.

Holds: a call is answered only with a reply of the log. A request repeated by the CLI after a lost answer gets the same
reply. Requests without the token are refused. Calls outside the conversation (titles, counts) are answered here. The
ids of calls are those in the log, so that results from the SDK can be matched to actions. The usage is always the same
few tokens: the log has the real cost, and a CLI with a full window would compact a history that no model reads.
Does not: read prompts. The model's prompt is made from the log.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import h11

SERVER = "deckhands"
PREFIX = f"mcp__{SERVER}__"
"""The CLI's prefix for the tools of our MCP server."""

_USAGE = {
    "input_tokens": 1,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 1,
}

PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def to_stream(reply: Mapping[str, Any]) -> bytes:
    """Return a reply as server-sent events.

    Args:
        reply: `id`, `model`, `text`, and `calls`, each with `id`, `name` and `input` (an object).
    """
    blocks = list(_to_blocks(reply["text"], reply["calls"]))
    message = {
        "id": reply["id"] or "msg_deckhands",
        "type": "message",
        "role": "assistant",
        "model": reply["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _USAGE,
    }
    events: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
    for index, (begun, delta) in enumerate(blocks):
        events += [
            {"type": "content_block_start", "index": index, "content_block": begun},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    stop = "tool_use" if reply["calls"] else "end_turn"
    ended = {"stop_reason": stop, "stop_sequence": None}
    events += [{"type": "message_delta", "delta": ended, "usage": {"output_tokens": 1}}, {"type": "message_stop"}]
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


def _to_blocks(text: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    if text or not calls:  # a message must not be empty
        yield {"type": "text", "text": ""}, {"type": "text_delta", "text": text or "(nothing)"}
    for call in calls:
        begun = {"type": "tool_use", "id": call["id"], "name": PREFIX + call["name"], "input": {}}
        yield begun, {"type": "input_json_delta", "partial_json": json.dumps(call["input"])}


PING_SECONDS = 10.0
MAX_BODY_BYTES = 256 * 2**20
READ_BYTES = 2**16

_ASIDE = {"id": "", "model": "deckhands", "text": "ok", "calls": []}


class Endpoint:
    """Answers the calls of one CLI.

    Args:
        on_ask: called with the number of a call, from 1, that waits for a reply.
    """

    def __init__(self, token: str, on_ask: Callable[[int], None]) -> None:
        self._token = token
        self._on_ask = on_ask
        self._replies: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._asked = 0
        self._taken: Mapping[str, Any] | None = None
        self._turn = asyncio.Lock()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen, and return the address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def provide_reply(self, reply: Mapping[str, Any]) -> None:
        """Provide the next reply of the log; it is kept until the matching call arrives."""
        self._replies.put_nowait(reply)

    def start_turn(self) -> None:
        """Note that the next call continues no reply."""
        self._taken = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=READ_BYTES)
        try:
            while await self._exchange(connection, reader, writer):
                connection.start_next_cycle()
        except (OSError, h11.RemoteProtocolError, h11.LocalProtocolError, asyncio.IncompleteReadError):
            pass  # the CLI has hung up; it repeats the call
        finally:
            writer.close()

    async def _exchange(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; return False if the connection accepts no further request."""
        request = None
        body = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                request = event
                if not self._is_known(request):  # the body of a refused request is not read
                    message = {"type": "error", "error": {"type": "authentication_error", "message": "no"}}
                    await _EndpointAnswer(connection, writer).send_json(401, message)
                    return False
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BODY_BYTES:
                    return False
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return False
        assert request is not None
        await self._answer(request, bytes(body), _EndpointAnswer(connection, writer))
        return connection.our_state is h11.DONE

    def _is_known(self, request: h11.Request) -> bool:
        headers = {name.decode().lower(): value for name, value in request.headers}
        shown = headers.get("authorization", b"").removeprefix(b"Bearer ") or headers.get("x-api-key", b"")
        return hmac.compare_digest(shown, self._token.encode())

    async def _answer(self, request: h11.Request, body: bytes, answer: _EndpointAnswer) -> None:
        path = request.target.partition(b"?")[0]
        if path.endswith(b"/count_tokens"):
            await answer.send_json(200, {"input_tokens": 1})
        elif request.method == b"POST" and path.endswith(b"/v1/messages"):
            await self._message(body, answer)
        else:
            await answer.send_json(404, {"type": "error", "error": {"type": "not_found_error", "message": "no"}})

    async def _message(self, body: bytes, answer: _EndpointAnswer) -> None:
        try:
            asked = json.loads(body)
            names = [tool.get("name", "") for tool in asked.get("tools") or ()]
            messages = asked["messages"]
        except (ValueError, LookupError, TypeError, AttributeError):
            await answer.send_json(400, {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}})
            return
        await answer.start()
        if not any(str(name).startswith(PREFIX) for name in names):
            await answer.end(to_stream(_ASIDE))
            return
        async with self._turn:
            await answer.end(to_stream(await self._reply(messages, answer)))

    async def _reply(self, messages: Any, answer: _EndpointAnswer) -> Mapping[str, Any]:
        if self._taken is not None and not _is_continuation(messages, self._taken):
            return self._taken  # a repeated call with a lost answer
        if self._replies.empty():
            self._on_ask(self._asked + 1)
        waiting = asyncio.ensure_future(self._replies.get())
        try:
            while not (await asyncio.wait({waiting}, timeout=PING_SECONDS))[0]:
                await answer.send(PING)
        finally:
            waiting.cancel()
        self._asked += 1
        self._taken = waiting.result()
        return self._taken


def _is_continuation(messages: Any, reply: Mapping[str, Any]) -> bool:
    """Return whether a request contains the calls of a reply.

    Always False after a reply without calls, because a new turn follows.
    """
    text = json.dumps(messages)
    return bool(reply["calls"]) and all(f'"{call["id"]}"' in text for call in reply["calls"])


class _EndpointAnswer:
    """The answer to one request."""

    def __init__(self, connection: h11.Connection, writer: asyncio.StreamWriter) -> None:
        self._connection = connection
        self._writer = writer

    async def send_json(self, status: int, body: Mapping[str, Any]) -> None:
        """Answer with JSON."""
        content = json.dumps(body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(content)))]
        self._write(h11.Response(status_code=status, headers=headers), h11.Data(data=content), h11.EndOfMessage())
        await self._writer.drain()

    async def start(self) -> None:
        """Start a stream."""
        headers = [
            ("content-type", "text/event-stream"),
            ("cache-control", "no-cache"),
            ("transfer-encoding", "chunked"),
        ]
        self._write(h11.Response(status_code=200, headers=headers), h11.Data(data=PING))
        await self._writer.drain()

    async def send(self, content: bytes) -> None:
        """Send a part of the stream."""
        self._write(h11.Data(data=content))
        await self._writer.drain()

    async def end(self, content: bytes) -> None:
        """Send the last part of the stream."""
        self._write(h11.Data(data=content), h11.EndOfMessage())
        await self._writer.drain()

    def _write(self, *events: Any) -> None:
        for event in events:
            self._writer.write(self._connection.send(event) or b"")
