"""docs/models.md is true: it names every error."""

import re
from pathlib import Path

from controller_worker.providers.choices import REPEATED_ELSEWHERE
from controller_worker.providers.errors import MODEL_ERRORS

DOCS = (Path(__file__).parents[4] / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_error_is_where_it_belongs() -> None:
    rows = re.findall(r"\| (`[^|]+) \| (yes|no) \| (yes|only[^|]+) \|", DOCS)
    told = {code: (again, asked) for codes, again, asked in rows for code in re.findall(r"`(\w+)`", codes)}
    assert told.keys() == MODEL_ERRORS.keys()
    for code, (again, asked) in told.items():
        assert (again == "yes") == MODEL_ERRORS[code].retryable, code
        assert (asked != "yes") == (code in REPEATED_ELSEWHERE), code
