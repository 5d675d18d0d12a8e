"""`deckhands replay`: repeat the decisions of a recorded conversation offline, and report the first difference.

The replay itself is a separate process, `python -m controller_worker.loop.replay`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from broker.log import render_event_line
from broker.runtime import DeckhandsError, UsageError, format_count
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import find_full_id
from deckhands.cli.options import json_option
from deckhands.client import clean_line, note, print_json, print_text, read_events
from deckhands.settings import CliSettings

SECTION = "Read conversations"
SUMMARIES = {"replay": "Repeat the decisions of a recorded conversation offline, and compare."}

SAME, ANOTHER = 0, 1
LINE_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of `replay`; `source` is a conversation, a run, or a file of events."""

    source: str
    as_json: bool


class ReplayFailed(DeckhandsError):
    """The replay process ended without an answer."""

    code = "replay_failed"


@click.command()
@click.argument("source", metavar="ID|FILE")
@json_option
@with_options(ReplayOptions)
def replay(options: ReplayOptions) -> int:
    """Repeat the decisions of a conversation without a model, and compare them byte by byte.

    ID names a conversation or a run; FILE is a file of events written by `deckhands export`. Exits with 0 if every
    decision is the same. Otherwise it exits with 1 and shows the first difference.
    """
    report = _run_replay(_lines(CliSettings.from_env(), options.source))
    if options.as_json:
        print_json(report)
    else:
        _report(report)
    return SAME if report["is_same"] else ANOTHER


def _lines(settings: CliSettings, source: str) -> Iterable[str]:
    path = Path(source)
    if path.is_dir():
        path /= "events.jsonl"
    if path.suffix or path.exists():
        try:
            return path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"The file {path} cannot be read: {error}.", remedy="Name another.") from error
    return [render_event_line(event) for event in asyncio.run(read_events(settings, find_full_id(source)))]


def _run_replay(lines: Iterable[str]) -> dict[str, Any]:
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
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ReplayFailed(f"The replay ended with {done.returncode}: {last}") from error
    if "error" in report:
        raise UsageError(report["error"], remedy=report["remedy"])
    return report


def _report(report: dict[str, Any]) -> None:
    name = report["conversation_id"]
    if report["is_same"]:
        number = format_count(report["events"], "event")
        print_text(f"{name}: {number}, {report['decided']} of them decided again; all are the same.")
        if report["is_waiting"]:
            note("Its log ends where a controller worker would continue at once.")
        return
    at = report["divergence"]["event_id"]
    print_text(f"{name}: the first difference is at event {at}; {report['decided']} decisions before it are the same.")
    for line in report["divergence"]["diff"]:
        print_text(clean_line(line, limit=LINE_LIMIT))
