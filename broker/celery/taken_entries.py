"""A pop that loses nothing: entries of a Celery queue between leaving it and the note that they are under way.

kombu takes an entry by BRPOP, and then notes it among those that are under way. A worker that is killed in between
takes the entry with it. Here the broker moves the entry into a list of the worker's connection, and the note removes
it from there in the same transaction.

Holds: at every moment an entry is in its queue, in such a list, or under way. Any worker that reads the queue puts back
what is in a list whose connection has shown no life for `ALIVE_SECONDS`.
Does not: prevent that an entry is delivered a second time; its task must be idempotent under its id.

Keys, in Celery's broker:
    deckhands:takers                      a set of `<connection> <queue>`: the lists in which entries may be
    deckhands:taken:<connection> <queue>  a list of the entries; at most one
    deckhands:taking:<connection>         expires when the connection shows no life
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty
from typing import Any

from kombu.utils.json import loads
from redis import exceptions as redis_errors

from broker.celery.messages import (
    NOT_THE_MESSAGE,
    Channel,
    Connection,
    Messages,
    QoS,
    Transport,
    note_dropped,
)
from broker.runtime import SYSTEM_CLOCK, failpoint, new_key

TAKERS, TAKEN, TAKING = "deckhands:takers", "deckhands:taken:", "deckhands:taking:"
ALIVE_SECONDS = 10
BLOCK_SECONDS = 0.25
"""One list can be waited for; an idle worker looks at those of other priorities this often."""
PUT_BACK_LIMIT = 1_000
"""Entries of one list that are put back at once."""


class KeptQoS(QoS):
    """What is under way, and what is about to be."""

    _is_noting = False

    def append(self, message: Any, delivery_tag: Any) -> None:
        """Note that a message is under way."""
        self._is_noting = True
        try:
            super().append(message, delivery_tag)
        finally:
            self._is_noting = False
        self.channel.taken = None

    @contextmanager
    def pipe_or_acquire(self, pipe: Any = None, client: Any = None) -> Iterator[Any]:
        """Return a transaction; the one that notes a message also removes it from where it was taken to."""
        with super().pipe_or_acquire(pipe, client) as transaction:
            if self._is_noting and self.channel.taken is not None:
                transaction.lrem(*self.channel.taken)
            yield transaction

    def restore_visible(self, *arguments: Any, **options: Any) -> None:
        """Put back what others have left: of what was under way, and of what was taken."""
        super().restore_visible(*arguments, **options)
        self.channel.put_back_taken()


class KeptChannel(Channel):
    """Takes entries so that none is lost."""

    QoS = KeptQoS
    taken: tuple[str, int, bytes] | None = None
    """The entry that is being delivered: its list, how many to remove, and itself."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._taker = new_key()
        self._asked = ""

    def put_back_taken(self) -> None:
        """Show life, and put back what connections have taken that show none."""
        own = self._keys(self.active_queues)
        with self.conn_or_acquire() as client:
            client.set(TAKING + self._taker, 1, ex=ALIVE_SECONDS)
            for member in client.smembers(TAKERS):
                name = member.decode(errors="replace")
                taker, _, queue = name.partition(" ")
                if client.exists(TAKING + taker):
                    continue
                if queue not in own:  # perhaps nobody reads it any more; what is in the list waits for those who do
                    with suppress(redis_errors.ResponseError):
                        if not client.llen(TAKEN + name):
                            self._forget_list(client, name)
                    continue
                try:
                    self._put_back(client, name, queue)
                except redis_errors.ResponseError as error:
                    note_dropped(f"the list {TAKEN + name!r} of Celery's broker", error)
                    client.srem(TAKERS, member)

    def _put_back(self, client: Any, name: str, queue: str) -> None:
        for _ in range(PUT_BACK_LIMIT):
            if client.lmove(TAKEN + name, queue, "RIGHT", "RIGHT") is None:
                self._forget_list(client, name)
                return

    def _forget_list(self, client: Any, name: str) -> None:
        """Forget an empty list, unless its connection shows life meanwhile: it may be about to take an entry."""
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
        with self.conn_or_acquire() as client:
            lengths = self._show_life(client, keys)
        waiting = [key for key, length in zip(keys, lengths, strict=True) if length]
        self._asked = (waiting or keys)[0]
        self._in_poll = self.client.connection
        self._brpop_sent_at = SYSTEM_CLOCK.monotonic()
        limit = min(timeout or self.brpop_timeout, BLOCK_SECONDS)
        self.client.connection.send_command("BLMOVE", self._asked, self._list(self._asked), "RIGHT", "LEFT", limit)

    def _show_life(self, client: Any, keys: list[str]) -> list[int]:
        """Note that this connection may take entries; return the lengths of the lists that it reads."""
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
        # An answer was lost with its connection. Under another name, the entry counts as that of a dead worker.
        self._taker = new_key()
        return self._show_life(client, keys)

    def _brpop_read(self, **options: Any) -> Any:
        return self._or_dropped("an entry of a Celery queue", lambda: self._read_taken(**options))

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
            raise Empty
        failpoint("celery.taken")
        self.taken = (self._list(self._asked), 1, entry)
        queue = self._asked.rsplit(self.sep, 1)[0]
        try:
            self._queue_cycle.rotate(queue)
            self.connection._deliver(loads(entry.decode()), queue)  # noqa: SLF001  (as kombu does)
        except NOT_THE_MESSAGE:
            self.taken = None  # it stays where it is, and comes back
            raise
        finally:
            self._forget_taken()
        return True

    def _forget_taken(self) -> None:
        """Remove an entry that was not noted, because it is no message."""
        if self.taken is not None:
            with self.conn_or_acquire() as client:
                client.lrem(*self.taken)
            self.taken = None

    def _keys(self, queues: Iterable[str]) -> list[str]:
        """Return the lists of these queues, those of the highest priority first."""
        return [self._q_for_pri(queue, priority) for priority in self.priority_steps for queue in queues]

    def _list(self, queue: str) -> str:
        return f"{TAKEN}{self._taker} {queue}"


class KeptTransport(Transport):
    """A transport that loses nothing."""

    Channel = KeptChannel


class KeptConnection(Connection):
    """A connection by this transport."""

    own_transport = KeptTransport


class KeptMessages(Messages):
    """How an application connects whose queue must lose nothing."""

    Connection = KeptConnection
