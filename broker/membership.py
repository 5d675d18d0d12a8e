"""Being a worker: one heartbeat per worker and shard that carries progress, and the sweep everybody does for all.

Holds: a worker whose heartbeat lapsed is buried by any other: its conversations go back to the ready stream, what it
had been handed goes back to its streams. A buried worker finds out at its next beat and starts over as a new one.
Keys: `deck:{k}:workers`, `deck:{k}:worker:<w>:about`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from broker.clock import to_millis
from broker.connection import texts_by_name
from broker.store import Store

HEARTBEAT_SECONDS = 0.3
HEARTBEAT_TTL_SECONDS = 1.7
LOST_RING_PATIENCE_SECONDS = 3.0
ROLES = ("controller", "tool")


@dataclass(frozen=True, slots=True)
class Tick:
    """What one beat found to do for everybody."""

    buried: int
    woken: int
    rung_again: int


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as others see it."""

    worker_id: str
    role: str
    deadline_ms: int
    about: Mapping[str, str]


class Membership:
    """One incarnation of one worker."""

    def __init__(
        self,
        store: Store,
        worker_id: str,
        role: str,
        *,
        streams: Sequence[Sequence[str]] = (),
        about: Mapping[str, str] | None = None,
        ttl_seconds: float = HEARTBEAT_TTL_SECONDS,
    ) -> None:
        """Describe the worker.

        Args:
            streams: for a tool worker, the action streams it reads, for each shard.
            about: facts to show, such as node and pid.
        """
        self._store = store
        self._worker_id = worker_id
        self._role = role
        self._streams = streams or [()] * store.shards
        self._about = dict(about or {})
        self._ttl_ms = int(ttl_seconds * 1000)

    async def register(self) -> None:
        """Enter every shard.  Idempotent."""
        facts = [part for item in self._about.items() for part in item]
        for names, streams in zip(self._store.all_shards, self._streams, strict=True):
            await self._store.function(
                "deck_register",
                (names.root,),
                self._worker_id,
                self._ttl_ms,
                self._role,
                len(streams),
                *streams,
                *facts,
            )

    async def tick(self, progress: int) -> Tick | None:
        """Beat in every shard and do what is due there.

        Returns:
            What was done, or None when this worker was buried in one of them and owns nothing there any more.
        """
        total = [0, 0, 0]
        for names in self._store.all_shards:
            reply = await self._store.function("deck_tick", (names.root,), *self._beat(progress))
            if reply[0] == "swept":
                return None
            total = [done + int(more) for done, more in zip(total, reply[1:], strict=True)]
        return Tick(*total)

    def tick_commands(self, progress: int) -> list[tuple[str | int, ...]]:
        """Return the beats of `tick` as commands, for a connection that is not the loop's."""
        return [("FCALL", "deck_tick", 1, names.root, *self._beat(progress)) for names in self._store.all_shards]

    async def leave(self) -> None:
        """Hand everything back at once.  Idempotent."""
        for names in self._store.all_shards:
            while await self._store.function("deck_leave", (names.root,), self._worker_id) != ["left"]:
                pass  # each call hands back a thousand things

    def _beat(self, progress: int) -> tuple[str, int, int, int]:
        return self._worker_id, self._ttl_ms, progress, int(LOST_RING_PATIENCE_SECONDS * 1000)


async def members(store: Store) -> list[Member]:
    """Return the workers of the first shard, the longest silent first."""
    names = store.all_shards[0]
    flat = await store.persist(lambda: store.connection.call("ZRANGE", names.workers, 0, -1, "WITHSCORES"))
    found = []
    for worker, deadline in zip(flat[::2], flat[1::2], strict=True):
        worker_id = worker.decode()
        pairs = await store.persist(lambda: store.connection.call("HGETALL", names.about(worker_id)))  # noqa: B023
        about = texts_by_name(pairs)
        found.append(Member(worker_id, about.get("role", ""), int(float(deadline)), about))
    return found


async def silent_roles(store: Store) -> list[str]:
    """Return for which roles no worker has beaten in the last minute, as far as this machine's clock can tell."""
    since_ms = to_millis(store.clock.now() - timedelta(minutes=1))
    heard = {member.role for member in await members(store) if member.deadline_ms > since_ms}
    return [role for role in ROLES if role not in heard]
