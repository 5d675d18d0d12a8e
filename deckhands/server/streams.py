"""The stream of one conversation to one reader: its events as they are appended, and pieces of the current reply.

Holds: no event is skipped; at most one batch is read ahead of a reader, so slow readers cost no more than fast ones;
while the store is unavailable, the stream waits and keeps sending keep-alives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal

from broker.contract import AgentFinishAction, Event, MessageAction, ModelReply
from broker.log import LiveText
from broker.runtime import CorruptEntry, DeckhandsError, OutcomeUnknown, StoreUnavailable, draw_jitter, shorten_randomly
from deckhands.client import Client, Tally, has_ended, load_quoted_texts
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.models import count_chars, event_json
from deckhands.server.problems import RETRY_SECONDS, Problem, to_problem
from deckhands.server.shares import count_share, make_share_problem

QUEUED = 100
"""How many items are read ahead of the reader."""
EVENTS_AHEAD = 16
"""How many of them may be events."""
CHARS_AHEAD = 64 * 1024
"""Their total length, unless a single event is longer; a reader that reads nothing costs three times as much memory."""
PAUSE_SECONDS = 1.0
RESERVED_PART = 10
"""One part in so many of the server's streams is left for tenants that have few."""
FEW_PART = 100
"""A tenant has few streams below one part in so many."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a stream.

    Attributes:
        kind: `event`; `delta`, a piece of a reply; `problem`, the reason why the stream ends; `end`, the end of the
            stream.
        id: the event's id; 0 if none, so that a reader does not resume from it.
        chars: the approximate length of an event.
        event: the event itself; None for other items.
    """

    kind: Literal["event", "delta", "problem", "end"]
    content: dict[str, Any]
    id: int = 0
    chars: int = 0
    event: Event | None = None


class EventStream:
    """The items of one reader.

    Args:
        after: the id of the last event that the reader has.
        deltas: whether to send pieces of replies, too.
        is_whole: send long texts in full.
        until_settled: end with a summary when the conversation has settled.
        is_said_whole: whether to send the agent's messages in full, as in a summary.
        tally: the tally of the events up to `after`; None to read them.
    """

    def __init__(
        self,
        gateway: Gateway,
        principal: Principal,
        conversation_id: str,
        *,
        after: int = 0,
        deltas: bool = False,
        until_settled: bool = False,
        is_whole: bool = False,
        is_said_whole: bool = False,
        tally: Tally | None = None,
    ) -> None:
        self._gateway = gateway
        self._principal = principal
        self._conversation_id = conversation_id
        self._after = after
        self._deltas = deltas
        self._is_whole = is_whole
        self._is_said_whole = is_said_whole
        self._tally = (tally or Tally()) if until_settled else None
        self._queue: asyncio.Queue[Item] = asyncio.Queue(QUEUED)
        self._events_ahead = self._chars_ahead = 0
        self._has_room = asyncio.Event()
        self._quiet = gateway.options.quiet_seconds * shorten_randomly()
        self._checked = asyncio.get_running_loop().time()
        self._place = asyncio.current_task()

    async def batches(self) -> AsyncGenerator[list[Item]]:
        """Yield items as they arrive; an empty batch is a keep-alive.

        The last item is a `problem` or an `end`.

        Raises:
            Problem: too many streams are open.
        """
        gateway = self._gateway
        if self._place not in gateway.streams:
            check_stream_limits(gateway, self._principal)
            gateway.streams[self] = self._principal.key
        pumps = [asyncio.create_task(self._pump_events())]
        pumps += [asyncio.create_task(self._pump_deltas())] if self._deltas else []
        stopping = asyncio.create_task(gateway.is_stopping.wait())
        try:
            while True:
                batch = await self._next(stopping)
                yield batch
                if batch and batch[-1].kind in ("problem", "end"):
                    return
        finally:
            gateway.streams.pop(self, None)
            for task in (*pumps, stopping):
                task.cancel()
            await asyncio.gather(*pumps, stopping, return_exceptions=True)

    async def _next(self, stopping: asyncio.Task[Any]) -> list[Item]:
        loop = asyncio.get_running_loop()
        quiet = self._quiet
        if loop.time() - self._checked >= quiet:
            self._checked = loop.time()
            self._quiet = self._gateway.options.quiet_seconds * shorten_randomly()
            try:
                await self._gateway.recheck(self._principal)
            except (StoreUnavailable, OutcomeUnknown):
                pass  # checked again next time; meanwhile the store is unreadable anyway
            except DeckhandsError as error:
                return [Item("problem", to_problem(error))]
        if self._queue.empty():
            getting = asyncio.ensure_future(self._queue.get())
            try:
                await asyncio.wait((getting, stopping), timeout=quiet, return_when=asyncio.FIRST_COMPLETED)
            finally:
                getting.cancel()  # never awaited again if the reader has left
            if not getting.done():
                if stopping.done():
                    return [Item("problem", to_problem(ServerStopping()))]
                return []
            batch = [self._take(getting.result())]
        else:
            batch = []
        while not self._queue.empty() and (not batch or batch[-1].kind not in ("problem", "end")):
            batch.append(self._take(self._queue.get_nowait()))
        return batch

    def _take(self, item: Item) -> Item:
        if item.kind == "event":
            self._events_ahead -= 1
            self._chars_ahead -= item.chars
            self._has_room.set()
        return item

    async def _put(self, event: Event) -> None:
        """Queue an event, once there is room for it."""
        content = dict(event_json(event))
        item = Item("event", content, event.id, count_chars(content), event)
        while self._events_ahead and (
            self._events_ahead >= EVENTS_AHEAD or self._chars_ahead + item.chars > CHARS_AHEAD
        ):
            self._has_room.clear()
            await self._has_room.wait()
        self._events_ahead += 1
        self._chars_ahead += item.chars
        await self._queue.put(item)

    async def _pump_events(self) -> None:
        """Read the log into the queue until the stream ends."""
        try:
            if self._tally is not None and self._after:
                if self._tally.last_event_id < self._after:
                    events = await self._gateway.follower.events(self._conversation_id, is_lenient=True)
                    seen = [event for event in events if event.id <= self._after]
                    for event in await load_quoted_texts(self._gateway.follower, self._conversation_id, seen):
                        self._tally.add(event)
                if await self._is_over():
                    return
            while not await self._follow():  # noqa: ASYNC110  (the store went away, and nothing says that it is back)
                await asyncio.sleep(PAUSE_SECONDS * draw_jitter())
        except DeckhandsError as error:
            await self._queue.put(Item("problem", to_problem(error)))
        except Exception:  # noqa: BLE001  (the reader is not left without an end, and resumes)
            _log.exception("a stream of %s failed", self._conversation_id)
            failed = Problem(500, "internal_error", "The server failed.", remedy="Resume; its log says why.")
            await self._queue.put(Item("problem", to_problem(failed)))

    async def _follow(self) -> bool:
        """Read until the stream ends. Returns False if the store became unavailable."""
        events = self._gateway.follower.tail(
            self._conversation_id,
            after=self._after,
            is_whole=self._is_whole,
            is_lenient=True,
            is_endless=True,
        )
        try:
            async with contextlib.aclosing(events):
                async for found in events:
                    event = (
                        await with_full_message(self._gateway.follower, self._conversation_id, found)
                        if self._is_said_whole
                        else found
                    )
                    await self._put(event)
                    self._after = event.id
                    if self._tally is not None:
                        self._tally.add(
                            *await load_quoted_texts(self._gateway.follower, self._conversation_id, [event])
                        )
                        if await self._is_over():
                            return True
        except (StoreUnavailable, OutcomeUnknown):
            return False
        await self._queue.put(Item("end", {"reason": "archived", **self._summary()}))
        return True

    async def _is_over(self) -> bool:
        """End the stream if the conversation has settled, and return whether it has."""
        assert self._tally is not None
        if not await has_ended(self._gateway.follower, self._conversation_id, self._tally):
            return False
        await self._queue.put(Item("end", {"reason": "settled", **self._summary()}))
        return True

    def _summary(self) -> dict[str, Any]:
        return {"summary": self._tally.summary().as_json()} if self._tally is not None else {}

    async def _pump_deltas(self) -> None:
        """Queue the pieces of replies that fit. Their offsets show the reader which ones it missed."""
        while True:
            live = LiveText(self._gateway.follower.store, self._conversation_id)
            try:
                async with contextlib.aclosing(live.watch()) as pieces:
                    async for piece in pieces:
                        content = {"call": piece.call, "kind": piece.kind, "text": piece.text, "at": piece.at}
                        with contextlib.suppress(asyncio.QueueFull):
                            self._queue.put_nowait(Item("delta", content))
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(PAUSE_SECONDS * draw_jitter())


def check_stream_limits(gateway: Gateway, principal: Principal) -> None:
    """Check the limits on open streams and long-polling requests.

    Each tenant may have a share of them. The last ones are reserved for tenants with few, so that several busy tenants
    cannot use all.

    Raises:
        Problem: too many are open for this key, for its tenant or in all.
    """
    key = principal.key
    if sum(other.id == key.id for other in gateway.streams.values()) >= key.streams:
        raise Problem(
            429,
            "too_many_streams_of_key",
            f"This key has {key.streams:,} streams open at this server, as many as its limit `streams` allows.",
            remedy="Close one, or use a key with a higher limit: `deckhands key add --streams`.",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )
    if len(gateway.streams) >= gateway.options.max_streams:
        raise Problem(
            503, "too_many_streams", "The server has reached its limit of open streams.", remedy="Use another server."
        )
    most = gateway.options.max_streams
    own = sum(other.tenant == key.tenant for other in gateway.streams.values())
    if own >= count_share(most, gateway.options.tenant_percent):
        raise make_share_problem("streams", own)
    if most - len(gateway.streams) <= most // RESERVED_PART and own >= max(1, most // FEW_PART):
        raise Problem(
            429,
            "too_many_streams_of_tenant",
            f"This tenant has {own:,} streams open at this server. The last free ones are for tenants that have few.",
            remedy="Close one, or use another server.",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )


def reserve_stream(gateway: Gateway, principal: Principal) -> None:
    """Reserve a slot for this request's stream or long poll until its task ends.

    Raises the errors of `check_stream_limits`.

    There is no await between the check and the reservation, so concurrent requests cannot share a slot.
    """
    check_stream_limits(gateway, principal)
    task = asyncio.current_task()
    assert task is not None
    gateway.streams[task] = principal.key
    task.add_done_callback(lambda ended: gateway.streams.pop(ended, None))


async def with_full_message(client: Client, conversation_id: str, event: Event) -> Event:
    """Return an event with its full text if it is a message of the agent."""
    if isinstance(event, ModelReply | MessageAction | AgentFinishAction):
        with contextlib.suppress(CorruptEntry):
            return await client.log.blobs.restore_event(conversation_id, event)
    return event


class ServerStopping(DeckhandsError):
    """The server is shutting down. The reader resumes at another server, or at this one after its restart."""

    code = "server_stopping"
    retryable = True

    def __init__(self) -> None:
        super().__init__("The server is stopping.", remedy="Resume after the last event.")


class SlowReader(DeckhandsError):
    """The reader does not read the data sent to it."""

    code = "slow_reader"
    retryable = True

    def __init__(self) -> None:
        super().__init__("The client read nothing from the stream for too long.", remedy="Resume after the last event.")
