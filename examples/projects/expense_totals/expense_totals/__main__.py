"""Print the totals of the report that is named on the command line."""

import sys

from expense_totals.report import render, totals_by_category

with open(sys.argv[1], newline="", encoding="utf-8") as report:
    print(render(totals_by_category(report)))
