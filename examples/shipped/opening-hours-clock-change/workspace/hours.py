"""Opening hours."""

from datetime import timedelta


def intervals(zone, week, day):
    """Yield the opening times of a local day as moments."""
    for first, last in week[day.weekday()]:
        yield (
            zone.to_utc(day.year, day.month, day.day, first),
            zone.to_utc(day.year, day.month, day.day, last),
        )


def open_seconds(zone, week, start, end):
    """Return how many seconds the shop is open from start to end."""
    total = 0
    day = zone.local_date(start)
    while day <= zone.local_date(end):
        for first, last in intervals(zone, week, day):
            total += max(0, min(last, end) - max(first, start))
        day += timedelta(days=1)
    return total
