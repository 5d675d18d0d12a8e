"""Submit a task file, many tasks at once and only missing ones, and wait for the results.

The results file has one JSON object per line, appended as each task settles.

Holds: a task whose conversation exists is not submitted again, so repeating an interrupted submission completes it.
Memory grows with the number of ids, not with the length of the tasks. Each result is stored once and whole. A line that
was cut off by a kill is dropped when the file is opened again, and one process writes at a time.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from broker.runtime import AdmissionRefused, DeckhandsError, UsageError, draw_jitter
from deckhands.client.client import Client
from deckhands.client.many import for_each
from deckhands.client.reading.summary import ExitCode, Summary
from deckhands.client.task_files.task_file import TaskFile, TaskLine

LINE_PREFIX = b'{"id": '
READ_BYTES = 2**16
MAX_LINE_BYTES = 2**26


class NotWritten(DeckhandsError):
    """A result could not be written."""

    code = "not_written"


class ResultsFile:
    """An open results file.

    Attributes:
        done: the state and the exit code of each conversation that has a result.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.done: dict[str, tuple[str, ExitCode]] = {}
        self._path = path
        self._descriptor = descriptor
        self._read()

    def add(self, line_id: str, conversation_id: str, summary: Summary) -> None:
        """Write a result, unless it is stored already. Idempotent.

        Raises:
            NotWritten: it could not be written; see `result_of` for the content of a line.
        """
        if conversation_id in self.done:
            return
        line = json.dumps({"id": line_id, **render_result(conversation_id, summary)}).encode() + b"\n"
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise NotWritten(
                f"The file {self._path} cannot be written: {error.strerror}.",
                remedy="Free space on the disk, and repeat the command.",
            ) from error
        self.done[conversation_id] = (summary.state, summary.exit_code)

    def sync(self) -> None:
        """Flush to disk, so that a power failure loses nothing."""
        os.fsync(self._descriptor)

    def _read(self) -> None:
        """Read the existing results, and drop a line that was cut off."""
        end = number = 0
        with os.fdopen(os.dup(self._descriptor), "rb", buffering=READ_BYTES) as file:
            file.seek(0)
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                is_whole = line.endswith(b"\n")
                try:
                    fields = json.loads(line)
                    summary = Summary.from_json(fields["summary"])
                    self.done[str(fields["conversation_id"])] = (summary.state, summary.exit_code)
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    if is_whole or not (line.startswith(LINE_PREFIX) or LINE_PREFIX.startswith(line)):
                        raise UsageError(
                            f"Line {number} of {self._path} is not a result.",
                            remedy="Name another file with --results.",
                        ) from None
                    os.ftruncate(self._descriptor, end)
                    return
                end += len(line)
                if not is_whole:  # complete except for its line end
                    os.write(self._descriptor, b"\n")


def render_result(conversation_id: str, summary: Summary) -> dict[str, Any]:
    """Return the fields of a result beside the task's id: the conversation and the fields of `show --json`."""
    return {"conversation_id": conversation_id, "summary": summary.as_json()}


@contextmanager
def open_results(path: Path) -> Iterator[ResultsFile]:
    """Open a results file, and create it if needed.

    Raises:
        UsageError: the file is unusable, has other content, or is being written by another process.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"The file {path} cannot be written: {why}.", remedy="Name another with --results.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = ResultsFile(path, descriptor)
        except OSError as error:
            why = "another process writes it" if isinstance(error, BlockingIOError) else error.strerror
            raise UsageError(
                f"The file {path} cannot be used: {why}.", remedy="Name another with --results."
            ) from error
        yield found
        found.sync()
    finally:
        os.close(descriptor)


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
    """Return the exit code for many conversations: 0 if all have finished, the common code of all others, or 1."""
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
        wait: called when a task is refused admission; the task is retried afterwards. None to wait as long as needed.

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
