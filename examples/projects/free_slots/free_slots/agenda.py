"""Meetings as people write them: `09:00-09:30 stand-up`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Meeting:
    interval: tuple[int, int]
    title: str


def parse_time(text: str) -> int:
    """Read `09:30` as minutes since midnight."""
    hours, minutes = text.split(":")
    if not (0 <= int(hours) <= 24 and 0 <= int(minutes) < 60):
        raise ValueError(f"not a time of day: {text}")
    return int(hours) * 60 + int(minutes)


def parse_meeting(line: str) -> Meeting:
    """Read one line of an agenda."""
    times, _, title = line.strip().partition(" ")
    start, _, end = times.partition("-")
    interval = (parse_time(start), parse_time(end))
    if interval[0] >= interval[1]:
        raise ValueError(f"ends before it starts: {line}")
    return Meeting(interval, title.strip())
