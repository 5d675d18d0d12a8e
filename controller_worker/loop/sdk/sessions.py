"""The limit on the SDK programs of a worker, and the choice of the program to end when a slot is needed.

Holds: never more than the limit. The program that has waited longest for a tool or a user is ended first; a fresh one
restores its turn from the log within seconds. The other sessions wait in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from controller_worker.loop.sdk.runner import PROGRAM, can_sandbox

DEFAULT_LIMIT = 8

SandboxChoice = Literal["auto", "bwrap", "none"]


class ProgramHolder(Protocol):
    """A session with a program."""

    @property
    def is_awaited(self) -> bool:
        """Whether the conversation waits for the program, rather than the program for the conversation."""
        ...

    def give_up(self) -> None:
        """End the program; the session calls `SdkSessions.give_slot`."""
        ...


class SdkSessions:
    """The programs of one worker.

    Args:
        limit: maximum number of programs.
        program: the program that runs the SDK.
        sandbox: `auto`: a sandbox if available; `bwrap`: refuse without one; `none`: no sandbox.

    Attributes:
        endings: tasks that wait for the ends of stopped programs.
    """

    def __init__(
        self, limit: int = DEFAULT_LIMIT, sandbox: SandboxChoice = "auto", *, program: Sequence[str] = PROGRAM
    ) -> None:
        self.limit = limit
        self.program = program
        self._sandbox = sandbox
        self.endings: set[asyncio.Task[None]] = set()
        self._held: dict[ProgramHolder, None] = {}
        self._waiting: dict[ProgramHolder, Callable[[], None]] = {}

    @property
    def count(self) -> int:
        """The number of programs."""
        return len(self._held)

    @property
    def is_sandboxed(self) -> bool:
        """Whether programs run in a sandbox."""
        return self._sandbox == "bwrap" or (self._sandbox == "auto" and can_sandbox())

    async def aclose(self) -> None:
        """Wait until the stopped programs have ended."""
        while self.endings:
            await asyncio.wait(self.endings)

    def take_slot(self, session: ProgramHolder, when_free: Callable[[], None]) -> bool:
        """Take a slot for a program. Return False if none is free; `when_free` is then called once one may be free."""
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
        self.retry_first()
        return True

    def note_use(self, session: ProgramHolder) -> None:
        """Note that a session was just used and is no longer awaited."""
        if session in self._held:
            del self._held[session]
            self._held[session] = None
        self.retry_first()

    def give_slot(self, session: ProgramHolder) -> None:
        """Give back a slot, or leave the queue for slots. Idempotent."""
        self._waiting.pop(session, None)
        if session in self._held:
            del self._held[session]
            self.retry_first()

    def retry_first(self) -> None:
        """Let the first waiting session try again."""
        if self._waiting:
            next(iter(self._waiting.values()))()
