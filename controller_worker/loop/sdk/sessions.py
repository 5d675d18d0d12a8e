"""How many programs of the SDK a worker holds at once, and who gives one up for another.

Holds: never more than the limit. A conversation whose program waits for a tool or a person gives it up first, the one
that has waited longest; a fresh one is where the log ends within seconds. Others wait for their turn, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from controller_worker.loop.sdk.launch import PROGRAM, can_sandbox

DEFAULT_LIMIT = 8

SandboxChoice = Literal["auto", "bwrap", "none"]


class Held(Protocol):
    """A session that has a program."""

    @property
    def is_awaited(self) -> bool:
        """Whether the conversation waits for the program, and not the other way round."""
        ...

    def give_up(self) -> None:
        """End the program; the session calls `Sessions.give`."""
        ...


class Sessions:
    """The programs of one worker.

    Args:
        limit: how many at once.
        program: what runs the SDK.
        sandbox: `auto`: a sandbox where there is one; `bwrap`: nothing without one; `none`: none.

    Attributes:
        endings: what waits for the ends of programs that were stopped.
    """

    def __init__(
        self, limit: int = DEFAULT_LIMIT, sandbox: SandboxChoice = "auto", *, program: Sequence[str] = PROGRAM
    ) -> None:
        self.limit = limit
        self.program = program
        self._sandbox = sandbox
        self.endings: set[asyncio.Task[None]] = set()
        self._held: dict[Held, None] = {}
        self._waiting: dict[Held, Callable[[], None]] = {}

    @property
    def count(self) -> int:
        """How many programs are held."""
        return len(self._held)

    @property
    def is_sandboxed(self) -> bool:
        """Whether programs run in a sandbox."""
        return self._sandbox == "bwrap" or (self._sandbox == "auto" and can_sandbox())

    async def aclose(self) -> None:
        """Wait until the programs that were stopped have ended."""
        while self.endings:
            await asyncio.wait(self.endings)

    def take(self, session: Held, when_free: Callable[[], None]) -> bool:
        """Take a place for a program; False: there is none yet, and `when_free` is called once there may be one."""
        if session in self._held:
            return True
        self._waiting.setdefault(session, when_free)
        if next(iter(self._waiting)) is not session:
            return False
        if len(self._held) >= self.limit:
            idle = next((held for held in self._held if not held.is_awaited), None)
            if idle is None:
                return False
            idle.give_up()
        del self._waiting[session]
        self._held[session] = None
        self.look_again()
        return True

    def use(self, session: Held) -> None:
        """Note that a session has just been of use, and is not awaited any more."""
        if session in self._held:
            del self._held[session]
            self._held[session] = None
        self.look_again()

    def give(self, session: Held) -> None:
        """Give a place back, or the wait for one. Idempotent."""
        self._waiting.pop(session, None)
        if session in self._held:
            del self._held[session]
            self.look_again()

    def look_again(self) -> None:
        """Let the first who waits look again."""
        if self._waiting:
            next(iter(self._waiting.values()))()
