"""Arithmetic on intervals of minutes; (start, end) does not contain its end."""

Interval = tuple[int, int]


def merge(intervals: list[Interval]) -> list[Interval]:
    """Join intervals that overlap or touch, and sort them."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def clip(interval: Interval, day: Interval) -> Interval | None:
    """Cut an interval to the working day; None if nothing is left of it."""
    start = max(interval[0], day[0])
    end = min(interval[1], day[1])
    return (start, end) if start < end else None


def free_slots(busy: list[Interval], day: Interval, at_least: int = 15) -> list[Interval]:
    """Find the gaps of at least so many minutes between busy times of the day."""
    clipped = [part for part in (clip(interval, day) for interval in busy) if part]
    slots = []
    free_from = day[0]
    for start, end in merge(clipped):
        if start - free_from >= at_least:
            slots.append((free_from, start))
        free_from = end
    if day[1] - free_from >= at_least:
        slots.append((free_from, day[1]))
    return slots
