"""`deckhands replay`: decide a recorded conversation anew, offline, and say where today's decision would differ.

The replay itself is `python -m controller_worker.loop.replay`, a process of the package that decides.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from broker.log.export import event_line
from broker.runtime.errors import DeckhandsError, UsageError
from deckhands.cli.options import json_option
from deckhands.cli.output import note, print_json
from deckhands.cli.reach import read_events
from deckhands.reading.terminal import clean_line, print_text
from deckhands.settings import FaceSettings

SAME, ANOTHER = 0, 1
LINE_LIMIT = 10_000


class ReplayFailed(DeckhandsError):
    """The process that replays did not come to an answer."""

    code = "replay_failed"


@click.command()
@click.argument("source", metavar="ID|FILE")
@json_option
def replay(*, source: str, as_json: bool) -> int:
    """Decide a conversation anew, with no model, and compare byte by byte.

    SOURCE is a conversation, a run, or a file of events as `deckhands export` writes it. The exit code is 0 when every
    decision is the same, and 1 when one is not: the first of them is shown with what is decided in its place.
    """
    report = _replayed(_lines(FaceSettings.from_env(), source))
    if as_json:
        print_json(report)
    else:
        _tell(report)
    return SAME if report["is_same"] else ANOTHER


def _lines(settings: FaceSettings, source: str) -> Iterable[str]:
    path = Path(source)
    if path.is_dir():
        path /= "events.jsonl"
    if path.suffix or path.exists():
        try:
            return path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"The file {path} cannot be read: {error}.", remedy="Name another.") from error
    return [event_line(event) for event in asyncio.run(read_events(settings, source))]


def _replayed(lines: Iterable[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "controller_worker.loop.replay"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ReplayFailed(f"The replay ended with {done.returncode}: {last}") from error
    if "error" in report:
        raise UsageError(report["error"], remedy=report["remedy"])
    return report


def _tell(report: dict[str, Any]) -> None:
    name = report["conversation_id"]
    if report["is_same"]:
        print_text(f"{name}: {report['events']} events, {report['decided']} of them decided anew; all are the same.")
        if report["is_waiting"]:
            note("Its log ends where a controller worker would go on at once.")
        return
    at = report["divergence"]["event_id"]
    print_text(f"{name}: the first difference is at event {at}; {report['decided']} decisions before it are the same.")
    for line in report["divergence"]["diff"]:
        print_text(clean_line(line, limit=LINE_LIMIT))
