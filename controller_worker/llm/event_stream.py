"""Server-sent events: from the bytes of a reply to the texts of its events, with a limit on every silence.

Holds: a reply may not grow without end; lines and characters may be cut anywhere between chunks; an event without its
blank line at the end counts, as several servers leave the last one out.
Does not: know what the texts mean, or read names and ids of events: the providers repeat them in the text.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

from controller_worker.llm.config import LLMConfig
from controller_worker.llm.errors import MalformedReplyError, ModelTimeoutError

Chunk = TypeVar("Chunk")

REPLY_LIMIT_BYTES = 64 * 1024 * 1024
SLACK_SECONDS = 5.0
DONE = "[DONE]"


class EventDecoder:
    """Decodes one reply."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._texts: list[str] = []
        self._after_return = False

    def feed(self, chunk: bytes) -> list[str]:
        """Take in the next bytes; return the texts of the events that end in them."""
        text = self._decoder.decode(chunk)
        if self._after_return and text:
            text = text.removeprefix("\n")  # the other half of a line end that was cut in two
        if text:
            self._after_return = text.endswith("\r")
        *lines, self._line = (self._line + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return [event for line in lines if (event := self._take(line)) is not None]

    def finish(self) -> list[str]:
        """Return the text of the event that the end of the reply ends, if there is one."""
        events = [self._take(self._line), self._take("")]
        self._line = ""
        return [event for event in events if event is not None]

    def _take(self, line: str) -> str | None:
        """Take in a line; return the event that it ends."""
        if line.startswith("data:"):
            self._texts.append(line[5:].removeprefix(" "))
        if line or not self._texts:
            return None
        text, self._texts = "\n".join(self._texts), []
        return text


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Longest silences, in seconds: before the first byte of a reply, and after it."""

    first_byte_seconds: float
    idle_seconds: float

    @property
    def longest_seconds(self) -> float:
        """What a client's own limit has to allow."""
        return max(self.first_byte_seconds, self.idle_seconds) + SLACK_SECONDS


def stream_limits(config: LLMConfig) -> StreamLimits:
    """Return the configured limits."""
    return StreamLimits(config.first_byte_timeout or config.read_timeout, config.read_timeout)


@contextlib.asynccontextmanager
async def until_headers(limits: StreamLimits) -> AsyncIterator[None]:
    """Limit the wait for the headers of a reply, which many servers send with its first byte.

    Raises:
        ModelTimeoutError: it was too long.
    """
    try:
        async with asyncio.timeout(limits.first_byte_seconds):
            yield
    except TimeoutError as error:
        raise ModelTimeoutError(
            f"There was a silence of {limits.first_byte_seconds:g} s before the reply began."
        ) from error


async def event_texts(chunks: AsyncIterator[bytes], limits: StreamLimits) -> AsyncIterator[str]:
    """Yield the texts of a reply's events.

    Raises:
        ModelTimeoutError: a silence was too long.
        MalformedReplyError: it has more than 64 MiB.
    """
    decoder = EventDecoder()
    async for chunk in within_limits(_bounded(chunks), limits):
        for text in decoder.feed(chunk):
            yield text
    for text in decoder.finish():
        yield text


async def whole_reply(chunks: AsyncIterator[bytes]) -> bytes:
    """Return a reply that is no stream of events.

    Raises:
        MalformedReplyError: it has more than 64 MiB.
    """
    return b"".join([chunk async for chunk in _bounded(chunks)])


async def _bounded(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > REPLY_LIMIT_BYTES:
            raise MalformedReplyError(f"The reply has more than {REPLY_LIMIT_BYTES >> 20} MiB.")
        yield chunk


async def within_limits(chunks: AsyncIterator[Chunk], limits: StreamLimits) -> AsyncIterator[Chunk]:
    """Yield what comes, as long as it comes in time.

    Raises:
        ModelTimeoutError: a silence was too long.
    """
    limit, where = limits.first_byte_seconds, "before the reply began"
    while True:
        try:
            async with asyncio.timeout(limit):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise ModelTimeoutError(f"There was a silence of {limit:g} s {where}.") from error
        yield chunk
        limit, where = limits.idle_seconds, "within the reply"
