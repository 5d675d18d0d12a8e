"""The background task of a conversation's model call: the call itself, or a preparation that would block the loop.

Holds: there is one task at a time. A task that finishes despite its cancellation leaves no result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from broker.contract import ModelCallFailed

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The call cannot start yet. The next wake-up of the conversation tries again."""


@dataclass(frozen=True, slots=True)
class Started:
    """A task is running. When it ends, it wakes the conversation."""


@dataclass(frozen=True, slots=True)
class PromptCount:
    """The provider's count of a step's prompt.

    Attributes:
        step: see `name_step`; empty for none.
        tokens: None if it was not counted.
        ratio: counted tokens divided by estimated tokens.
    """

    step: str = ""
    tokens: int | None = None
    ratio: float | None = None


class CallTask:
    """Runs one task at a time.

    Args:
        on_end: awaited, in the task, after its result is stored; the task then counts as ended.

    Attributes:
        counted: the latest count of a prompt.
        failure: the step whose client cannot be created, with the reason; None without a failure.
    """

    def __init__(self, name: str, on_end: Callable[[], Awaitable[None]]) -> None:
        self.counted = PromptCount()
        self.failure: tuple[str, ModelCallFailed] | None = None
        self._name = name
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self._is_prepared = False
        self._is_call = False

    @property
    def is_running(self) -> bool:
        """Whether a task exists."""
        return self._task is not None

    def prepare(self, work: Callable[[], Awaitable[Result]], keep: Callable[[Result], None]) -> Started:
        """Start a preparation. After it, the loop tries to start the call again."""

        def keep_prepared(result: Result) -> None:
            keep(result)
            self._is_prepared = True

        self._is_call = False
        return self._start(work, keep_prepared, f"prepare {self._name}")

    def start(self, work: Callable[[], Awaitable[Result]], keep: Callable[[Result], None]) -> Started:
        """Start a task that must not raise. `keep` gets its result unless the task is cancelled."""
        self._is_call = True
        return self._start(work, keep, self._name)

    def take_prepared(self) -> bool:
        """Return, once, whether a preparation has ended."""
        is_prepared = self._is_prepared
        self._is_prepared = False
        return is_prepared

    def cancel(self) -> asyncio.Task[None] | None:
        """Cancel the task. Return it if it is the call; None if there was no task, or only a preparation."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task if self._is_call else None

    def _start(self, work: Callable[[], Awaitable[Result]], keep: Callable[[Result], None], name: str) -> Started:
        assert self._task is None, f"{self._name} already has a task"
        self._task = asyncio.create_task(self._run(work, keep), name=name)
        return Started()

    async def _run(self, work: Callable[[], Awaitable[Result]], keep: Callable[[Result], None]) -> None:
        result = await work()
        if self._task is asyncio.current_task():
            self._task = None
            keep(result)
            await self._on_end()
