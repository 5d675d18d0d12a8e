"""docs/models.md is true: its profiles can be read, and it names every setting and every error."""

import re
from pathlib import Path

from controller_worker.providers.choices import REPEATED_ELSEWHERE
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import MODEL_ERRORS

DOCS = (Path(__file__).parents[4] / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_setting_is_named() -> None:
    listed = set(re.findall(r"`(\w+)`", DOCS.partition("## All settings")[2]))
    assert set(LLMConfig.model_fields) <= listed


def test_every_error_is_where_it_belongs() -> None:
    rows = re.findall(r"\| (`[^|]+) \| (yes|no) \| (yes|only[^|]+) \|", DOCS)
    told = {code: (again, asked) for codes, again, asked in rows for code in re.findall(r"`(\w+)`", codes)}
    assert told.keys() == MODEL_ERRORS.keys()
    for code, (again, asked) in told.items():
        assert (again == "yes") == MODEL_ERRORS[code].retryable, code
        assert (asked != "yes") == (code in REPEATED_ELSEWHERE), code
