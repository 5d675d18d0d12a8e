"""Adding months to dates."""

import calendar
from datetime import date


def add_months(day: date, months: int) -> date:
    """Move a date by whole months; the day becomes the month's last one if the month is too short."""
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    last_day = calendar.monthrange(year, month + 1)[1]
    return date(year, month + 1, min(day.day, last_day))
