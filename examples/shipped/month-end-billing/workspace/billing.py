"""When subscriptions are billed, and how much."""

from datetime import date

from months import add_months


def dates(start, months, count):
    """Return the first dates of a plan which is billed every few months."""
    if months == 12:
        return [date(start.year + n, start.month, start.day) for n in range(count)]
    result = [start]
    while len(result) < count:
        result.append(add_months(result[-1], months))
    return result


def prorate(cents, start, months, change):
    """Return the price for the rest of the period in which the change falls."""
    current = start
    while add_months(current, months) < change:
        current = add_months(current, months)
    end = add_months(current, months)
    return round(cents * ((end - change).days - 1) / 30)
