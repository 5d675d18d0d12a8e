"""When subscriptions are billed, and how much."""

from months import add_months


def dates(start, months, count):
    """Return the first dates of a plan which is billed every few months."""
    return [add_months(start, months * number) for number in range(count)]


def prorate(cents, start, months, change):
    """Return the price for the rest of the period in which the change falls."""
    number = 0
    while add_months(start, months * (number + 1)) <= change:
        number += 1
    current = add_months(start, months * number)
    end = add_months(start, months * (number + 1))
    days = (end - current).days
    return (2 * cents * (end - change).days + days) // (2 * days)
