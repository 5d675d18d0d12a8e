"""The part of each package that the tests have run, from the data of `make coverage`.

Does not: see what a killed process has run, nor a sandboxed workspace host.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import PurePath

from coverage import Coverage

from tests.house_rules import MAY_IMPORT
from tests.source_code import ROOT


def table() -> str:
    """Return a line for each package, and each package in it, with the statements that ran."""
    coverage = Coverage()
    coverage.combine()
    statements: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for file in (path for package in MAY_IMPORT for path in ROOT.glob(f"{package}/**/*.py")):
        parts = file.relative_to(ROOT).parts
        if "examples" in parts:
            continue
        _, all_lines, _, missed, _ = coverage.analysis2(str(file))
        for name in {"all", parts[0], str(PurePath(*parts[:2])) if len(parts) > 2 else parts[0]}:
            statements[name] += len(all_lines)
            missing[name] += len(missed)
    rows = [f"{'package':36} {'statements':>10} {'missed':>7} {'ran':>7}"]
    for name in sorted(statements):
        share = 1 - missing[name] / statements[name] if statements[name] else 1.0
        rows.append(f"{name:36} {statements[name]:10,} {missing[name]:7,} {share:7.1%}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
