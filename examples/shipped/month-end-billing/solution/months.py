"""Arithmetic with months."""

from datetime import date

DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def days_in(year, month):
    """Return how many days the month has."""
    if month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0):
        return 29
    return DAYS[month - 1]


def add_months(day, months):
    """Return the same day some months later, or the last day of that month."""
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    month += 1
    return date(year, month, min(day.day, days_in(year, month)))
