"""Options for the start time of a conversation, and for messages sent while its agent works."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from broker.contract import MAX_SECONDS, DoubleTexting
from broker.runtime import UsageError
from deckhands.cli.field_options import option_of

F = TypeVar("F", bound=Callable[..., Any])

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
DURATION_REMEDY = "Write seconds, or a number with s, m, h, d or w: 90, 30m, 1.5h."
TIME_REMEDY = "Write 2026-03-01T06:00, which is a time of this machine's zone, or 2026-03-01T06:00+01:00."


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """The options that `timing_options` adds to a command."""

    not_before: str | None
    delay: str | None
    expires: str | None
    double_texting: DoubleTexting | None

    def fields(self) -> dict[str, Any]:
        """Return the given options as fields of a request.

        Raises:
            UsageError: one is invalid.
        """
        found = {
            "not_before": parse_time(self.not_before, "--not-before") if self.not_before is not None else None,
            "delay": parse_duration(self.delay, "--delay") if self.delay is not None else None,
            "expires": _expires_in(self.expires) if self.expires is not None else None,
            "double_texting": self.double_texting,
        }
        return {name: value for name, value in found.items() if value is not None}


def timing_options(command: F) -> F:
    """Add the options of `TimingOptions`."""
    for option in (
        option_of("double_texting"),
        click.option(
            "--expires",
            metavar="TIME|DURATION",
            help="Never start it if it has not started by this time, or after this long.",
        ),
        click.option("--delay", metavar="DURATION", help="Start it after this long: 90 (seconds), 30m, 12h, 2d."),
        click.option("--not-before", metavar="TIME", help="Start it at this time: 2026-03-01T06:00[+01:00]."),
    ):
        command = option(command)
    return command


def parse_duration(text: str, option: str) -> float:
    """Parse a duration into seconds.

    Raises:
        UsageError: it is not a duration, or longer than ten years.
    """
    found = DURATION.fullmatch(text.strip().lower())
    seconds = float(found[1]) * UNITS[found[2]] if found else MAX_SECONDS + 1
    if seconds > MAX_SECONDS:
        raise UsageError(f"{option} {ascii(text)[:100]} is not a duration of up to ten years.", remedy=DURATION_REMEDY)
    return seconds


def parse_time(text: str, option: str) -> datetime:
    """Parse a time; without a time zone, it is in this machine's zone.

    Raises:
        UsageError: it is not a time.
    """
    try:
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"{option} {ascii(text)[:100]} is not a time.", remedy=TIME_REMEDY) from None


def _expires_in(text: str) -> datetime | float:
    if DURATION.fullmatch(text.strip().lower()):
        return parse_duration(text, "--expires")
    try:
        return parse_time(text, "--expires")
    except UsageError:
        raise UsageError(
            f"--expires {ascii(text)[:100]} is neither a time nor a duration.",
            remedy=f"{TIME_REMEDY} {DURATION_REMEDY}",
        ) from None
