"""Submit a task file, many tasks at once and only missing ones, and wait for the results.

Holds: a task whose conversation exists is not submitted again, so repeating an interrupted submission completes it.
Memory grows with the number of ids, not with the length of the tasks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from broker.runtime import AdmissionRefused, draw_jitter
from deckhands.client.client import Client
from deckhands.client.many import for_each
from deckhands.client.reading.summary import ExitCode, Summary
from deckhands.client.task_files.results_file import open_results
from deckhands.client.task_files.task_file import TaskFile, TaskLine

LOOKED_UP_AT_ONCE = 64

OnLine = Callable[[TaskLine, bool], None]
"""Called with each task that is in the store, and whether it was there before."""
Step = Callable[[], None]
Wait = Callable[[AdmissionRefused], Awaitable[None]]
"""Called with each refusal of admission; returns when to retry the task."""


@dataclass(slots=True)
class BatchOutcome:
    """The outcome of a task file.

    Attributes:
        lost: conversations that cannot be read any more, with the reason.
    """

    submitted: int = 0
    existing: int = 0
    states: Counter[str] = field(default_factory=Counter)
    codes: Counter[ExitCode] = field(default_factory=Counter)
    lost: list[tuple[str, str]] = field(default_factory=list)

    def count_settled(self, state: str, code: ExitCode) -> None:
        """Count a settled conversation."""
        self.states[state] += 1
        self.codes[code] += 1

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command that waited for all; see `combine_exit_codes`."""
        return ExitCode.ERROR if self.lost else combine_exit_codes(self.codes)


def combine_exit_codes(codes: Counter[ExitCode]) -> ExitCode:
    """Return the exit code for many: 0 if all have finished, the code that all others share, or 1."""
    others = [code for code in codes if code is not ExitCode.FINISHED]
    if not others:
        return ExitCode.FINISHED
    return others[0] if len(others) == 1 else ExitCode.ERROR


class AdmissionWaiter:
    """Waits for admission, and reports it once."""

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        self._say = say
        self._has_said = False

    async def wait(self, refused: AdmissionRefused) -> None:
        """Wait as long as the refusal asks, plus a random extra so that clients do not retry at the same time."""
        if not self._has_said:
            self._has_said = True
            self._say(f"{refused.message} The remaining tasks are submitted as soon as they may start.")
        await asyncio.sleep(refused.retry_after_seconds * (0.5 + draw_jitter()))


async def submit(client: Client, tasks: TaskFile, on_line: OnLine, *, wait: Wait | None = None) -> BatchOutcome:
    """Submit the tasks of a file that are not in the store. Idempotent.

    Args:
        wait: called when a task is refused admission; the task is retried afterwards. None: wait as long as needed.

    Raises:
        UsageError: a task cannot be started here; tasks already passed to `on_line` have been submitted.
        StoreError: the store cannot be used.
    """
    outcome, wait_for_admission = BatchOutcome(), wait or AdmissionWaiter().wait

    async def missing() -> AsyncIterator[TaskLine]:
        lines = tasks.lines()
        while some := list(islice(lines, LOOKED_UP_AT_ONCE)):
            there = await _find_existing(client, [line.conversation_id for line in some])
            for line in some:
                if line.conversation_id in there:
                    outcome.existing += 1
                    on_line(line, True)
                else:
                    yield line

    async def begin(line: TaskLine) -> None:
        request = line.request.model_copy(update={"idempotency_key": line.key})
        while True:
            try:
                await client.submit(request)
                break
            except AdmissionRefused as refused:
                await wait_for_admission(refused)
        outcome.submitted += 1
        on_line(line, False)

    await for_each(missing(), begin)
    return outcome


async def submit_and_wait(
    client: Client,
    tasks: TaskFile,
    on_line: OnLine,
    on_settled: Step,
    *,
    results: Path | None,
    wait: Wait | None = None,
) -> BatchOutcome:
    """Submit the tasks of a file that are not in the store, and wait until all have settled. Idempotent.

    Args:
        on_settled: called for each settled task, also for those whose result is in the file already.
        results: the file that gets one line per result as each task settles.

    Raises:
        UsageError: see `submit`, or `results` cannot be used.
        NotWritten: a result could not be written.
    """
    ids: dict[str, str] = {}
    outcome = BatchOutcome()
    with open_results(results) if results is not None else nullcontext() as file:
        async with client.watcher.ends() as ends:

            def add(line: TaskLine, was_there: bool) -> None:
                on_line(line, was_there)
                if file is not None and (written := file.done.get(line.conversation_id)) is not None:
                    outcome.count_settled(*written)
                    on_settled()
                    return
                ids[line.conversation_id] = line.line_id
                ends.add(line.conversation_id)

            async def fill() -> None:
                submitted = await submit(client, tasks, add, wait=wait)
                outcome.submitted = submitted.submitted
                outcome.existing = submitted.existing
                ends.complete()

            async def take() -> None:
                async for conversation_id, end in ends:
                    line_id = ids.pop(conversation_id)
                    if isinstance(end, Summary):
                        if file is not None:
                            file.add(line_id, conversation_id, end)
                        outcome.count_settled(end.state, end.exit_code)
                    else:
                        outcome.lost.append((line_id, end.message))
                    on_settled()

            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(take())
                    group.create_task(fill())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
    return outcome


async def _find_existing(client: Client, ids: list[str]) -> set[str]:
    store = client.store
    commands = [("HGET", names.meta, "last_id") for names in await store.locate_all(ids)]
    found = await store.call_many(commands)
    return {cid for cid, last_id in zip(ids, found, strict=True) if last_id is not None}
