"""When a job is due."""

from datetime import timedelta

from fields import MONTHS, WEEKDAYS, parse

NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
LONGEST = 366 * 9  # days from one leap day to the next


def next_run(text, after):
    """Return the first minute after the given time at which the job is due."""
    minute, hour, day, month, weekday = NAMED.get(text, text).split()
    minutes = sorted(parse(minute, 0, 59))
    hours = sorted(parse(hour, 0, 23))
    days = parse(day, 1, 31)
    months = parse(month, 1, 12, MONTHS)
    weekdays = {value % 7 for value in parse(weekday, 0, 7, WEEKDAYS)}
    either = not day.startswith("*") and not weekday.startswith("*")
    start = after.replace(second=0, microsecond=0) + timedelta(minutes=1)
    midnight = start.replace(hour=0, minute=0)
    for _ in range(LONGEST):
        fits = [midnight.day in days, midnight.isoweekday() % 7 in weekdays]
        if midnight.month in months and (any(fits) if either else all(fits)):
            for h in hours:
                for m in minutes:
                    time = midnight.replace(hour=h, minute=m)
                    if time >= start:
                        return time
        midnight += timedelta(days=1)
    return None
