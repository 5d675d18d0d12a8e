"""When a job is due."""

from datetime import timedelta

from fields import parse


def next_run(text, after):
    """Return the first minute after the given time at which the job is due."""
    minute, hour, day, month, weekday = text.split()
    minutes = parse(minute, 0, 59)
    hours = parse(hour, 0, 23)
    days = parse(day, 1, 31)
    months = parse(month, 1, 12)
    weekdays = parse(weekday, 0, 7)
    time = after.replace(second=0, microsecond=0)
    while True:
        if (
            time.minute in minutes
            and time.hour in hours
            and time.day in days
            and time.month in months
            and time.weekday() in weekdays
        ):
            return time
        time += timedelta(minutes=1)
