"""Opening hours."""

from datetime import timedelta


def intervals(zone, week, day):
    """Return the opening times that begin on a local day, as moments."""
    next_day = day + timedelta(days=1)
    result = []
    for first, last in week[day.weekday()]:
        if first == last:
            continue
        end = day if first < last else next_day
        result.append(
            (
                zone.to_utc(day.year, day.month, day.day, first),
                zone.to_utc(end.year, end.month, end.day, last),
            )
        )
    return sorted(result)


def open_seconds(zone, week, start, end):
    """Return how many seconds the shop is open from start to end."""
    spans = []
    day = zone.local_date(start) - timedelta(days=1)
    while day <= zone.local_date(end):
        spans += intervals(zone, week, day)
        day += timedelta(days=1)
    total = 0
    counted = start
    for first, last in sorted(spans):
        first, last = max(first, counted), min(last, end)
        if first < last:
            total += last - first
            counted = last
    return total


def next_open(zone, week, moment):
    """Return the first moment, now or later, at which the shop is open."""
    today = zone.local_date(moment)
    found = []
    for days in range(-1, 16):
        for first, last in intervals(zone, week, today + timedelta(days=days)):
            if max(first, moment) < last:
                found.append(max(first, moment))
    return min(found, default=None)
