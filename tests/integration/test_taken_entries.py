"""Cleanup of the lists that hold taken entries of a Celery queue: none that may still be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from broker.celery.taken_entries import TAKEN, TAKERS, TAKING, SafeChannel, SafeConnection
from broker.store.embedded import EmbeddedValkey

QUEUE = "deckhands"


class Interrupted:
    """A client behind whose back something happens when a list has been found empty."""

    def __init__(self, client: Any, happens: Any) -> None:
        self._client, self._happens = client, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def lmove(self, *arguments: Any) -> Any:
        found = self._client.lmove(*arguments)
        if found is None:
            self._happens()
        return found


async def test_a_list_whose_connection_shows_life_meanwhile_is_not_forgotten(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "store")
    await server.start()
    try:
        with SafeConnection(server.celery_url) as connection:
            quiet, other = (cast("SafeChannel", connection.channel()) for _ in range(2))
            client = quiet.client
            name = f"{quiet._taker} {QUEUE}"
            quiet._record_life(client, [QUEUE])
            client.delete(TAKING + quiet._taker)  # it had as much as it may have, and asked for nothing
            other._put_back(Interrupted(client, lambda: quiet._record_life(client, [QUEUE])), name, QUEUE)
            client.lpush(TAKEN + name, "taken as its worker was killed")
            client.delete(TAKING + quiet._taker)
            for member in client.smembers(TAKERS):
                other._put_back(client, member.decode(), QUEUE)
            assert client.lrange(QUEUE, 0, -1) == [b"taken as its worker was killed"]
            other._put_back(client, name, QUEUE)
            assert not client.smembers(TAKERS)
    finally:
        await server.stop()


async def test_empty_lists_of_unread_queues_are_forgotten(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "store")
    await server.start()
    try:
        with SafeConnection(server.celery_url) as connection:
            channel = cast("SafeChannel", connection.channel())
            client = channel.client
            client.sadd(TAKERS, "gone former", "gone kept", "here former")
            client.lpush(TAKEN + "gone kept", "an entry")
            client.set(TAKING + "here", 1)
            channel.put_back_taken()
            assert client.smembers(TAKERS) == {b"gone kept", b"here former"}
            assert client.lrange(TAKEN + "gone kept", 0, -1) == [b"an entry"]
    finally:
        await server.stop()
