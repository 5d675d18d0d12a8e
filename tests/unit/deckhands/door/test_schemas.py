"""The schemas in the documentation are those of the code."""

from __future__ import annotations

import pytest

from deckhands.door.schemas import schemas, written
from tests.source_code import ROOT

FOLDER = ROOT / "docs" / "schemas"


@pytest.mark.parametrize("name", schemas())
def test_a_schema_is_current(name: str) -> None:
    """Write them again: `python -m deckhands.door.schemas docs/schemas`."""
    assert (FOLDER / name).read_text("utf-8") == written(schemas()[name])


def test_there_are_no_others() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(schemas())
