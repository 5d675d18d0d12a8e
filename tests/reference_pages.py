"""The pages and schemas that are made of classes. `python -m tests.reference_pages`, or `make docs`, writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tests.commands_page import commands_page
from tests.events_page import events_page
from tests.http_page import http_page
from tests.ingress_schemas import schemas, written_schema
from tests.settings_page import settings_page
from tests.source_code import ROOT
from tests.store_rights import rights_page
from tests.tasks_page import tasks_page
from tests.ways_in import ways_in_section

SCHEMAS = "docs/schemas"
PAGES: Mapping[str, Callable[[], str]] = {
    "docs/commands.md": commands_page,
    "docs/events.md": events_page,
    "docs/http.md": http_page,
    "docs/rights.md": rights_page,
    "docs/settings.md": settings_page,
    "docs/tasks.md": lambda: f"{tasks_page()}\n{ways_in_section()}",
    **{f"{SCHEMAS}/{name}": partial(written_schema, name) for name in schemas()},
}


def write_pages() -> None:
    for path, page in PAGES.items():
        (ROOT / path).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
