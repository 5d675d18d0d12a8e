"""Subscriptions and the days on which they are charged."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import islice

from billing_dates.months import add_months


@dataclass(frozen=True)
class Subscription:
    """A plan that is charged every so many months, for the first time at its start."""

    start: date
    months: int = 1
    cancelled: date | None = None

    def __post_init__(self) -> None:
        if self.months < 1:
            raise ValueError("a plan is charged every month at most")

    def charges(self, count: int) -> list[date]:
        """List the first charges, fewer than `count` if the subscription was cancelled before."""
        return list(islice(self._all_charges(), count))

    def next_charge(self, today: date) -> date | None:
        """Find the first charge after today; None if the subscription is cancelled by then."""
        return next((day for day in self._all_charges() if day > today), None)

    def _all_charges(self) -> Iterator[date]:
        day = self.start
        while self.cancelled is None or day < self.cancelled:
            yield day
            day = add_months(day, self.months)
