"""Reading an expense report and adding it up."""

import csv
from collections.abc import Iterable

from expense_totals.money import format_cents, parse_cents


def totals_by_category(lines: Iterable[str]) -> dict[str, int]:
    """Sum the cents of each category, in the order of their names."""
    totals: dict[str, int] = {}
    for row in csv.DictReader(lines):
        category = row["category"].strip().lower() or "other"
        totals[category] = totals.get(category, 0) + parse_cents(row["amount"])
    return dict(sorted(totals.items()))


def render(totals: dict[str, int]) -> str:
    """Lay the totals out as a table with a last line for their sum."""
    rows = [*totals.items(), ("total", sum(totals.values()))]
    return "\n".join(f"{name:<8}{format_cents(cents):>11}" for name, cents in rows)
