"""Server-sent events: converts the bytes of a reply to event texts, with a limit on every silence.

Holds: replies and events have a size limit. The time per event is linear in its length, however it is split. Chunks may
split lines and characters anywhere. A last event without its blank line counts, because several servers omit that line.
Does not: interpret the texts, or read the names and ids of events, which providers repeat in the text.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import MalformedReplyError, ModelTimeoutError

Chunk = TypeVar("Chunk")

REPLY_LIMIT_BYTES = 64 * 1024 * 1024
EVENT_LIMIT_CHARS = 16 * 1024 * 1024
SLACK_SECONDS = 5.0
CLOSING_SECONDS = 5.0
"""The longest wait after the stop reason for the usage and the last event."""
END_SECONDS = 0.25
"""The longest wait for the end of the body after the last event; then the connection is closed."""
DONE = "[DONE]"
SHOWN_BYTES = 200
"""The part of a reply shown in an error if it is neither events nor JSON."""
_JSON_BEGINS = (b"{", b"[")
_STREAM_BEGINS = (b":", b"event:", b"id:", b"retry:")


class EventDecoder:
    """Decodes one reply.

    Args:
        limit_chars: the maximum length of a line, and of the text of an event.
    """

    def __init__(self, limit_chars: int = EVENT_LIMIT_CHARS) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._limit_chars = limit_chars
        self._line = _make_line_buffer()
        self._texts: list[str] = []
        self._texts_chars = 0
        self._after_return = False

    def feed(self, chunk: bytes) -> list[str]:
        """Process the next bytes. Return the texts of the events that they complete.

        Raises:
            MalformedReplyError: a line or an event is too long.
        """
        text = self._decoder.decode(chunk)
        if self._after_return and text:
            text = text.removeprefix("\n")  # the second half of a split line end
            self._after_return = False
        if not text:
            return []
        self._after_return = text.endswith("\r")
        *ended, begun = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        if ended and self._line.tell():
            self._hold(ended[0])
            ended[0] = self._take_held_line()
        events = []
        for line in ended:
            if line.startswith("data:"):
                self._add(line)
            elif not line and self._texts:
                events.append(self._end_event())
        if begun:
            self._hold(begun)
        return events

    def finish(self) -> list[str]:
        """Return the text of the last event, if the end of the reply completes one.

        Raises:
            MalformedReplyError: the event is too long.
        """
        line = self._take_held_line()
        if line.startswith("data:"):
            self._add(line)
        return [self._end_event()] if self._texts else []

    def _hold(self, piece: str) -> None:
        """Append to the current line."""
        self._line.write(piece)
        self._check(self._line.tell())

    def _take_held_line(self) -> str:
        """Return the current line and start another."""
        line, self._line = self._line.getvalue(), _make_line_buffer()
        return line

    def _add(self, line: str) -> None:
        """Append a line to the text of the current event."""
        self._texts.append(line[5:].removeprefix(" "))
        self._texts_chars += len(self._texts[-1]) + 1
        self._check(self._texts_chars)

    def _end_event(self) -> str:
        """Return the text of the current event and start another."""
        text = "\n".join(self._texts)
        self._texts.clear()
        self._texts_chars = 0
        return text

    def _check(self, chars: int) -> None:
        if chars > self._limit_chars:
            raise MalformedReplyError(f"An event of the reply has more than {self._limit_chars} characters.")


def _make_line_buffer() -> io.StringIO:
    """Return a buffer for a line. Concatenating strings would take quadratic time."""
    return io.StringIO(newline="")


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The longest silences in seconds: before the first byte, after it, and after the stop reason."""

    first_byte_seconds: float
    idle_seconds: float
    closing_seconds: float = CLOSING_SECONDS

    @property
    def longest_seconds(self) -> float:
        """The minimum that a client's own timeout must allow."""
        return max(self.first_byte_seconds, self.idle_seconds) + SLACK_SECONDS


def make_stream_limits(config: LLMConfig) -> StreamLimits:
    """Return the configured limits."""
    return StreamLimits(config.first_byte_timeout or config.read_timeout, config.read_timeout)


@contextlib.asynccontextmanager
async def limit_wait_for_headers(limits: StreamLimits) -> AsyncIterator[None]:
    """Limit the wait for the headers of a reply, which many servers send with its first byte.

    Raises:
        ModelTimeoutError: the wait exceeded `first_byte_seconds`.
    """
    try:
        async with asyncio.timeout(limits.first_byte_seconds):
            yield
    except TimeoutError as error:
        raise ModelTimeoutError(
            f"The provider sent nothing for {limits.first_byte_seconds:g} s before its reply."
        ) from error


async def read_events(
    chunks: AsyncIterator[bytes],
    limits: StreamLimits,
    take: Callable[[str], bool],
    is_whole: Callable[[], bool] = lambda: False,
) -> bytes | None:
    """Pass the texts of a reply's events to `take`, up to the last one.

    The body usually ends there. If it does not, the connection cannot be reused, but the reply is complete.

    Args:
        take: processes a text, and returns whether it is the last one.
        is_whole: returns whether the reply is usable without the rest. Then only short silences are accepted.

    Returns:
        The body, if it is JSON instead of events, whatever its content type; None if there were events, or no body.

    Raises:
        ModelTimeoutError: a silence was too long.
        MalformedReplyError: the reply exceeds 64 MiB, an event is too long, or the body is neither events nor JSON.
    """
    decoder = EventDecoder()
    beginning = b""
    has_events = False
    whole: list[bytes] | None = None
    async for chunk in limit_silences(_limit_size(chunks), limits, is_whole):
        if not beginning:
            beginning = chunk.removeprefix(codecs.BOM_UTF8).lstrip()[:SHOWN_BYTES]
            whole = [] if beginning[:1] in _JSON_BEGINS else None
        if whole is not None:
            whole.append(chunk)
            continue
        for text in decoder.feed(chunk):
            has_events = True
            if take(text):
                await _read_to_the_end(chunks)
                return None
    if whole is not None:
        return b"".join(whole)
    for text in decoder.finish():
        has_events = True
        take(text)
    if beginning and not has_events and not beginning.startswith(_STREAM_BEGINS):
        shown = beginning.decode(errors="replace")
        raise MalformedReplyError(f"The reply is no stream of events: it begins with {shown!r}.", provider_text=shown)
    return None


async def _read_to_the_end(chunks: AsyncIterator[bytes]) -> None:
    """Read and discard the rest of a body for a short time, so that its connection can be reused."""
    with contextlib.suppress(Exception):  # clients raise different errors, and the reply is complete
        async with asyncio.timeout(END_SECONDS):
            async for _ in chunks:
                pass


async def read_whole_reply(chunks: AsyncIterator[bytes]) -> bytes:
    """Return a reply that is not a stream of events.

    Raises:
        MalformedReplyError: the reply exceeds 64 MiB.
    """
    return b"".join([chunk async for chunk in _limit_size(chunks)])


async def _limit_size(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > REPLY_LIMIT_BYTES:
            raise MalformedReplyError(f"The reply has more than {REPLY_LIMIT_BYTES >> 20} MiB.")
        yield chunk


async def limit_silences(
    chunks: AsyncIterator[Chunk], limits: StreamLimits, is_whole: Callable[[], bool] = lambda: False
) -> AsyncIterator[Chunk]:
    """Yield the chunks; limit the wait for each.

    Args:
        is_whole: returns whether the reply is usable without the rest. It may become true during a wait, because some
            clients hold back the end of a reply.

    Raises:
        ModelTimeoutError: a silence was too long.
    """
    limit = limits.first_byte_seconds
    where = "before the reply began"
    while True:
        try:
            async with asyncio.timeout(limit) as deadline:
                watch = _ClosingWatch(deadline, limits.closing_seconds, is_whole)
                try:
                    chunk = await anext(chunks)
                finally:
                    watch.end()
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise ModelTimeoutError(f"The provider sent nothing for {limit:g} s {where}.") from error
        yield chunk
        limit = limits.idle_seconds
        where = "within the reply"
        if is_whole():
            limit = min(limit, limits.closing_seconds)


class _ClosingWatch:
    """Shortens the current wait to `closing_seconds` once the reply is whole."""

    def __init__(self, deadline: asyncio.Timeout, closing_seconds: float, is_whole: Callable[[], bool]) -> None:
        self._deadline = deadline
        self._closing_seconds = closing_seconds
        self._is_whole = is_whole
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(closing_seconds, self._check)

    def end(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if not self._is_whole():
            self._timer = self._loop.call_later(self._closing_seconds, self._check)
            return
        due = self._deadline.when()
        soon = self._loop.time() + self._closing_seconds
        if due is not None and soon < due and not self._deadline.expired():
            self._deadline.reschedule(soon)
