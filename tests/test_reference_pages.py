"""The pages that are made of classes agree with them."""

from __future__ import annotations

import re

import pytest

from broker.contract.codec import find_kinds
from broker.runtime.settings import WORKER_SETTINGS
from controller_worker.settings import ControllerVariables
from tests.environment_variables import OURS
from tests.page_blocks import pages
from tests.reference_pages import PAGES, SCHEMAS
from tests.settings_page import own_fields
from tests.source_code import ROOT
from tool_worker.settings import ToolVariables


@pytest.mark.parametrize("path", PAGES)
def test_the_page_is_what_the_classes_say(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path](), f"{path} is out of date: run `make docs`"


def test_there_are_no_other_schemas() -> None:
    assert {f"{SCHEMAS}/{path.name}" for path in (ROOT / SCHEMAS).iterdir()} <= set(PAGES)


def test_every_process_knows_the_names_that_workers_read() -> None:
    assert {*own_fields(ControllerVariables), *own_fields(ToolVariables)} == WORKER_SETTINGS


def test_every_variable_that_a_page_names_is_read() -> None:
    known = set(OURS.findall((ROOT / "docs" / "settings.md").read_text(encoding="utf-8")))
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert {name for name in OURS.findall(text) if name.startswith("DECKHANDS_")} - known == set(), page


def test_every_kind_has_a_section() -> None:
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^### `(\w+\.\w+)`$", page, re.MULTILINE))
    ours = {kind for kind, owner in find_kinds().items() if owner.__module__.startswith("broker.contract.")}
    assert sections == ours
