"""`deckhands demo`: the demo, followed from a terminal."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from broker.runtime import SYSTEM_CLOCK, Clock, DeckhandsError, format_count
from deckhands.cli.command_group import with_options
from deckhands.cli.demo import Demo, DemoProgress, DemoReport, DemoSpec
from deckhands.cli.options import json_option
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.client import ExitCode, is_redrawn, note, print_json, print_text, redraw
from deckhands.operations import find_sandbox_fault
from deckhands.settings import CliSettings

SECTION = "Start a conversation"
SUMMARIES = {"demo": "Run 20 agents at once while their workers are killed. Needs no model."}

REDRAW_SECONDS = 0.1
BAR_COLUMNS = 30


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `demo`."""

    conversations: int
    controllers: int
    tools: int
    kills: int
    seed: int
    keep: bool
    as_json: bool


@click.command()
@click.option("--conversations", type=click.IntRange(1, 1_000), default=20, show_default=True)
@click.option("--controllers", type=click.IntRange(1, 32), default=2, show_default=True)
@click.option("--tools", type=click.IntRange(1, 32), default=2, show_default=True)
@click.option("--kills", type=click.IntRange(0, 100), default=2, show_default=True, help="How many workers are killed.")
@click.option("--seed", type=int, default=0, show_default=True, help="Determines which workers are killed, and when.")
@click.option("--keep", is_flag=True, help="Keep the projects, the store and the logs.")
@json_option
@with_options(DemoOptions)
def demo(options: DemoOptions) -> int:
    """Let 20 agents repair 20 projects at once, while their workers are killed and replaced.

    The workers are real processes, and the tests of the projects really run. Only the model follows a script, so no key
    is needed. Exits with 0 if everything finished, every test passes and no event was lost or doubled.
    """
    settings = CliSettings.from_env()
    with _directory(is_kept=options.keep) as directory:
        workers = (
            f"{format_count(options.controllers, 'controller worker')}, {format_count(options.tools, 'tool worker')}"
        )
        note(f"{format_count(options.conversations, 'agent')}, {workers}, all in {directory}")
        spec = DemoSpec(
            directory,
            conversations=options.conversations,
            controllers=options.controllers,
            tools=options.tools,
            kills=options.kills,
            seed=options.seed,
            environment=_environment(settings),
        )
        report = asyncio.run(_run(spec))
    if report is None:
        return int(ExitCode.INTERRUPTED)
    if options.as_json:
        print_json(report.as_json())
    else:
        print_text("\n".join(report_lines(report)))
    return 0 if report.is_whole else 1


def _environment(settings: CliSettings) -> dict[str, str]:
    """Return the workers' environment. If no sandbox works, it uses none: all commands are part of the demo.

    Raises:
        DeckhandsError: a sandbox was set by name and does not work.
    """
    environment = dict(settings.environment)
    if reason := find_sandbox_fault(environment):
        if settings.sandbox != "auto":
            raise DeckhandsError(f"The sandbox {settings.sandbox} does not work here: {reason}.")
        note(f"No sandbox works here ({reason}); the demo runs its own, harmless commands without one.")
        environment["DECKHANDS_SANDBOX"] = "none"
    return environment


@contextmanager
def _directory(*, is_kept: bool) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="deckhands-demo-"))
    try:
        yield path
    except DeckhandsError:
        is_kept = True  # the error names logs in it
        raise
    finally:
        if is_kept:
            note(f"Everything is in {path}.")
        else:
            shutil.rmtree(path, ignore_errors=True)


async def _run(spec: DemoSpec) -> DemoReport | None:
    """Run the demo; returns None if it was interrupted."""
    screen = _Screen()
    run = Demo(spec, on_notice=screen.notice, on_progress=screen.progress)
    running = asyncio.ensure_future(run.run())
    on_stop_signals(running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        return None
    finally:
        screen.clear()


def report_lines(report: DemoReport) -> list[str]:
    """Return the final table."""
    longest, median = report.takeover_longest_seconds, report.takeover_median_seconds
    takeovers = f"{report.takeovers}, median {median:.2f} s, longest {longest:.2f} s" if longest is not None else "none"
    facts = {
        "conversations": str(report.conversations),
        "finished": str(report.finished),
        "tests passing": str(report.tests_passing),
        "workers killed": f"{len(report.kills)} ({', '.join(report.kills)})" if report.kills else "0",
        "takeovers": takeovers,
        "events": f"{report.events:,}",
        "events lost": str(report.events_lost),
        "observations doubled": str(report.observations_doubled),
        "wall time": f"{report.wall_seconds:.1f} s",
    }
    width = max(map(len, facts))
    verdict = "Everything finished, every test passes, every log is whole."
    return [
        *(f"{name:<{width}}  {value}" for name, value in facts.items()),
        *(f"! {trouble}" for trouble in [*report.violations, *report.failures][:20]),
        verdict if report.is_whole else "Something is missing, see above.",
    ]


class _Screen:
    """A line that is redrawn on a terminal; elsewhere, lines printed from time to time."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._is_terminal = is_redrawn(sys.stderr)
        self._started = self._drawn = self._clock.monotonic()
        self._quarter = 0

    def progress(self, progress: DemoProgress) -> None:
        """Show the progress."""
        now = self._clock.monotonic()
        if self._is_terminal:
            if now - self._drawn >= REDRAW_SECONDS:
                self._drawn = now
                line = self._line(progress, now)[: shutil.get_terminal_size().columns - 1]
                redraw(line)
            return
        quarter = 4 * progress.finished // progress.conversations
        if quarter > self._quarter:
            self._quarter = quarter
            note(self._line(progress, now))

    def notice(self, text: str) -> None:
        """Print a notice."""
        self.clear()
        note(f"{self._clock.monotonic() - self._started:6.1f} s  {text}")

    def clear(self) -> None:
        """Clear the progress line."""
        if self._is_terminal:
            redraw("")

    def _line(self, progress: DemoProgress, now: float) -> str:
        done = BAR_COLUMNS * progress.replies // max(1, progress.replies_expected)
        bar = "#" * min(done, BAR_COLUMNS) + "." * (BAR_COLUMNS - done)
        return (
            f"{now - self._started:6.1f} s  [{bar}] {progress.finished}/{progress.conversations} finished, "
            f"{format_count(progress.events, 'event')}, {format_count(progress.killed, 'worker')} killed"
        )
