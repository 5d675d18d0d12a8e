"""A pop that loses nothing: keeps entries of a Celery queue safe until they are recorded as unacknowledged.

kombu pops an entry by BRPOP, and then records it as unacknowledged. A worker that is killed in between loses the entry.
Here the broker moves entries into a list of the worker's connection, and recording them removes them from there in the
same transaction. Entries that wait together are taken, recorded and acknowledged together.

Holds: at every moment an entry is in its queue, in such a list, or unacknowledged. Any worker of the queue puts back
the entries of a list whose connection has shown no life for `ALIVE_SECONDS`.
Does not: prevent a second delivery of an entry; its task must be idempotent under its id.

Keys, in Celery's broker:
    deckhands:takers                      a set of `<connection> <queue>`: the lists that may have entries
    deckhands:taken:<connection> <queue>  a list with the entries that are being delivered
    deckhands:taking:<connection>         expires when the connection shows no life
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty
from typing import Any

from kombu.utils.json import dumps, loads
from redis import exceptions as redis_errors

from broker.celery.messages import (
    Channel,
    FilteringConnection,
    FilteringTransport,
    Messages,
    QoS,
    log_dropped,
)
from broker.runtime import SYSTEM_CLOCK, failpoint, new_key

TAKERS, TAKEN, TAKING = "deckhands:takers", "deckhands:taken:", "deckhands:taking:"
ALIVE_SECONDS = 10
FIRST_BLOCK_SECONDS, LONGEST_BLOCK_SECONDS = 0.25, 2.0
"""A client can block on one list only. A worker checks the lists of other priorities this often, an idle one less."""
PUT_BACK_LIMIT = 1_000
"""Number of entries of one list that are put back at once."""
TAKEN_AT_ONCE, STEP = 32, 8
MAX_TAKEN_BYTES = 1 << 20
MAX_HELD_BYTES = 32 << 20
"""No further message is taken while unacknowledged ones have this size."""


class SafeQoS(QoS):
    """The unacknowledged messages, and those about to become so."""

    _noting: list[Any] | None = None
    """The messages that are being delivered, which are recorded together."""

    def append(self, message: Any, delivery_tag: Any) -> None:
        """Record a message as unacknowledged."""
        if self._noting is None:
            super().append(message, delivery_tag)
        else:
            self._noting.append(message)
            self._quick_append(delivery_tag, message)

    @contextmanager
    def noting(self, taken: str) -> Iterator[None]:
        """Record the messages that are delivered here, and remove all entries of their list, in one transaction.

        Args:
            taken: the list that their entries were moved to.
        """
        if self._dirty:
            self._flush()
        self._noting = []
        try:
            yield
            with self.pipe_or_acquire() as pipe:
                self._record(pipe)
                pipe.delete(taken).execute()
        finally:
            self._noting = None

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Drop a message, or return it to its queue. Only recorded messages can be returned, so record it first."""
        if self._noting:
            with self.pipe_or_acquire() as pipe:
                self._record(pipe)
                pipe.execute()
        super().reject(delivery_tag, requeue)

    def _record(self, pipe: Any) -> None:
        """Record the messages that are being delivered, and that no consumer has acknowledged."""
        now = SYSTEM_CLOCK.now().timestamp()
        if noted := [message for message in self._noting or () if message.delivery_tag not in self._dirty]:
            pipe.zadd(self.unacked_index_key, {message.delivery_tag: now for message in noted})
            routes = ((message, message.delivery_info) for message in noted)
            kept = {
                message.delivery_tag: dumps([message._raw, route["exchange"], route["routing_key"]])  # noqa: SLF001
                for message, route in routes
            }
            pipe.hset(self.unacked_key, mapping=kept)
        self._noting = []

    def ack_all(self, messages: Sequence[Any]) -> None:
        """Acknowledge messages together."""
        tags = [message.delivery_tag for message in messages]
        with self.pipe_or_acquire() as pipe:
            pipe.zrem(self.unacked_index_key, *tags).hdel(self.unacked_key, *tags).execute()
        for message in messages:
            message._state = "ACK"  # noqa: SLF001  (as kombu does)
            self._quick_ack(message.delivery_tag)

    def can_consume(self) -> bool:
        """Return whether more messages may be taken: their number and their size are bounded."""
        if self._dirty:
            self._flush()
        return bool(super().can_consume()) and sum(len(held.body) for held in self._delivered.values()) < MAX_HELD_BYTES

    def room(self) -> int:
        """Return how many messages may be taken now, at most `TAKEN_AT_ONCE`."""
        most = self.can_consume_max_estimate()
        return TAKEN_AT_ONCE if most is None else min(most, TAKEN_AT_ONCE)

    def restore_visible(self, *arguments: Any, **options: Any) -> None:
        """Put back the messages of dead workers: unacknowledged and taken ones."""
        super().restore_visible(*arguments, **options)
        self.channel.put_back_taken()


class SafeChannel(Channel):
    """Takes entries so that none is lost."""

    QoS = SafeQoS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._taker = new_key()
        self._asked = ""
        self._waiting = 0
        self._block_seconds = FIRST_BLOCK_SECONDS

    def put_back_taken(self) -> None:
        """Renew this connection's sign of life, and put back the entries of dead connections."""
        own = self._keys(self.active_queues)
        with self.conn_or_acquire() as client:
            pipe = client.pipeline(transaction=False)
            pipe.set(TAKING + self._taker, 1, ex=ALIVE_SECONDS)
            pipe.smembers(TAKERS)
            _, members = pipe.execute()
            takers = {member.partition(b" ")[0] for member in members} - {self._taker.encode()}
            for taker in takers:
                pipe.exists(TAKING.encode() + taker)
            dead = {taker for taker, is_alive in zip(takers, pipe.execute(), strict=True) if not is_alive}
            for member in members:
                if member.partition(b" ")[0] not in dead:
                    continue
                name = member.decode(errors="replace")
                queue = name.partition(" ")[2]
                if queue not in own:  # no worker may read it any more; its entries wait for one that does
                    with suppress(redis_errors.ResponseError):
                        if not client.llen(TAKEN + name):
                            self._remove_list(client, name)
                    continue
                try:
                    self._put_back(client, name, queue)
                except redis_errors.ResponseError as error:
                    log_dropped(f"the list {TAKEN + name!r} of Celery's broker", error)
                    client.srem(TAKERS, member)

    def _put_back(self, client: Any, name: str, queue: str) -> None:
        for _ in range(PUT_BACK_LIMIT):
            if client.lmove(TAKEN + name, queue, "LEFT", "RIGHT") is None:  # the latest first: the order stays
                self._remove_list(client, name)
                return

    def _remove_list(self, client: Any, name: str) -> None:
        """Remove an empty list from the set, unless its connection is alive and may be about to take an entry."""
        life = TAKING + name.partition(" ")[0]
        with client.pipeline() as pipe, suppress(redis_errors.WatchError):
            pipe.watch(life)
            if not pipe.exists(life):
                pipe.multi()
                pipe.srem(TAKERS, name)
                pipe.execute()

    def _brpop_start(self, timeout: float | None = None) -> None:
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues:
            return
        keys = self._keys(queues)
        lengths = self._record_life(self.client, keys)
        self._asked, self._waiting = next((item for item in zip(keys, lengths, strict=True) if item[1]), (keys[0], 0))
        self._in_poll = self.client.connection
        self._brpop_sent_at = SYSTEM_CLOCK.monotonic()
        limit = min(timeout or self.brpop_timeout, self._block_seconds)
        self.client.connection.send_command("BLMOVE", self._asked, self._list(self._asked), "RIGHT", "LEFT", limit)

    def _record_life(self, client: Any, keys: list[str]) -> list[int]:
        """Record that this connection may take entries. Return the lengths of its lists."""
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.llen(key)
        for key in keys:
            pipe.llen(self._list(key))
        pipe.sadd(TAKERS, *(f"{self._taker} {key}" for key in keys))
        pipe.set(TAKING + self._taker, 1, ex=ALIVE_SECONDS)
        found: list[int] = pipe.execute()
        if not any(found[len(keys) : 2 * len(keys)]):
            return found[: len(keys)]
        # A reply was lost with its connection. With a new name, the entry counts as that of a dead worker.
        self._taker = new_key()
        return self._record_life(client, keys)

    def _brpop_read(self, **options: Any) -> Any:
        return self._drop_invalid("an entry of a Celery queue", lambda: self._read_taken(**options))

    def _read_taken(self, **options: Any) -> Any:
        try:
            entry = self.client.parse_response(self.client.connection, "BLMOVE", **options)
        except self.connection_errors:
            self.client.connection.disconnect()
            raise
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()
        if entry is None:
            self._block_seconds = min(2 * self._block_seconds, LONGEST_BLOCK_SECONDS)
            raise Empty
        self._block_seconds = FIRST_BLOCK_SECONDS
        entries = [entry, *self._take_more(len(entry))]
        failpoint("celery.taken")
        queue = self._asked.rsplit(self.sep, 1)[0]
        self._queue_cycle.rotate(queue)
        with self.qos.noting(self._list(self._asked)):
            for each in entries:
                self._drop_invalid("an entry of a Celery queue", partial(self._deliver, each, queue))
        return True

    def _take_more(self, size: int) -> list[bytes]:
        """Move further waiting entries into the list of the taken ones, and return them.

        Few are taken at once, because their size is unknown until they arrive.
        """
        found: list[bytes] = []
        left = min(self._waiting, self.qos.room()) - 1
        while left > 0 and size < MAX_TAKEN_BYTES:
            with self.conn_or_acquire() as client:
                pipe = client.pipeline(transaction=False)
                for _ in range(min(left, STEP)):
                    pipe.lmove(self._asked, self._list(self._asked), "RIGHT", "LEFT")
                step = [entry for entry in pipe.execute() if entry is not None]
            found += step
            size += sum(map(len, step))
            left = left - STEP if len(step) == STEP else 0
        return found

    def _deliver(self, entry: bytes, queue: str) -> None:
        self.connection._deliver(loads(entry.decode()), queue)  # noqa: SLF001  (as kombu does)

    def _keys(self, queues: Iterable[str]) -> list[str]:
        """Return the lists of these queues, highest priority first."""
        return [self._q_for_pri(queue, priority) for priority in self.priority_steps for queue in queues]

    def _list(self, queue: str) -> str:
        return f"{TAKEN}{self._taker} {queue}"


class SafeTransport(FilteringTransport):
    """A transport that loses no message."""

    Channel = SafeChannel


class SafeConnection(FilteringConnection):
    """A connection with this transport."""

    own_transport = SafeTransport


class SafeMessages(Messages):
    """The classes of an application whose queue must lose nothing."""

    Connection = SafeConnection
