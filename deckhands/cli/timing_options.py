"""When a conversation begins, and what messages do while its agent works, as options of the command line."""

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
    """What `timing_options` adds to a verb."""

    not_before: str | None
    delay: str | None
    expires: str | None
    double_texting: DoubleTexting | None

    def fields(self) -> dict[str, Any]:
        """Return those that are given, as fields of a request.

        Raises:
            UsageError: one cannot be used.
        """
        found = {
            "not_before": moment_in(self.not_before, "--not-before") if self.not_before is not None else None,
            "delay": seconds_in(self.delay, "--delay") if self.delay is not None else None,
            "expires": _expires_in(self.expires) if self.expires is not None else None,
            "double_texting": self.double_texting,
        }
        return {name: value for name, value in found.items() if value is not None}


def timing_options(command: F) -> F:
    """Add the options that `TimingOptions` has fields for."""
    for option in (
        option_of("double_texting"),
        click.option(
            "--expires",
            metavar="TIME|DURATION",
            help="Never begin it if it has not begun by this time, or after this long.",
        ),
        click.option("--delay", metavar="DURATION", help="Begin it after this long: 90 (seconds), 30m, 12h, 2d."),
        click.option("--not-before", metavar="TIME", help="Begin it at this time: 2026-03-01T06:00[+01:00]."),
    ):
        command = option(command)
    return command


def seconds_in(text: str, option: str) -> float:
    """Return the seconds that a duration means.

    Raises:
        UsageError: it is none, or longer than ten years.
    """
    found = DURATION.fullmatch(text.strip().lower())
    seconds = float(found[1]) * UNITS[found[2]] if found else MAX_SECONDS + 1
    if seconds > MAX_SECONDS:
        raise UsageError(f"{option} {ascii(text)[:100]} is not a duration of up to ten years.", remedy=DURATION_REMEDY)
    return seconds


def moment_in(text: str, option: str) -> datetime:
    """Return the time that a person means; without a zone, it is one of this machine.

    Raises:
        UsageError: it is no time.
    """
    try:
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"{option} {ascii(text)[:100]} is not a time.", remedy=TIME_REMEDY) from None


def _expires_in(text: str) -> datetime | float:
    if DURATION.fullmatch(text.strip().lower()):
        return seconds_in(text, "--expires")
    try:
        return moment_in(text, "--expires")
    except UsageError:
        raise UsageError(
            f"--expires {ascii(text)[:100]} is neither a time nor a duration.",
            remedy=f"{TIME_REMEDY} {DURATION_REMEDY}",
        ) from None
