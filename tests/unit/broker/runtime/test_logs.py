"""Log lines as JSON: one object a line, whatever is in the record."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from broker.runtime.logs import ACTION, CONVERSATION, WORKER, JsonFormatter, make_extra


class Lines:
    """A logger whose lines are kept."""

    def __init__(self) -> None:
        self.written = io.StringIO()
        self.logger = logging.Logger("shop.stock")  # noqa: LOG001  (of this test alone)
        handler = logging.StreamHandler(self.written)
        handler.setFormatter(JsonFormatter("tool"))
        self.logger.addHandler(handler)

    def last(self) -> dict[str, Any]:
        *_, line = self.written.getvalue().splitlines()
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def lines() -> Iterator[Lines]:
    tokens = [(var, var.set(var.get())) for var in (WORKER, CONVERSATION, ACTION)]
    yield Lines()
    for var, token in tokens:
        var.reset(token)


def test_a_line_says_when_how_bad_where_and_who(lines: Lines) -> None:
    lines.logger.warning("%d lamps are left", 3)
    found = lines.last()
    assert found["message"] == "3 lamps are left"
    assert (found["level"], found["logger"], found["role"]) == ("WARNING", "shop.stock", "tool")
    assert found["time"].endswith("+00:00")
    assert "conversation_id" not in found


def test_a_line_has_what_its_task_works_for(lines: Lines) -> None:
    WORKER.set("tool-1")
    CONVERSATION.set("c1")
    ACTION.set(7)
    lines.logger.info("hello")
    found = lines.last()
    assert (found["worker_id"], found["conversation_id"], found["action_id"]) == ("tool-1", "c1", 7)


def test_conversation_named_by_the_line_wins(lines: Lines) -> None:
    CONVERSATION.set("c1")
    lines.logger.info("hello", extra=make_extra("c2", 9))
    assert (lines.last()["conversation_id"], lines.last()["action_id"]) == ("c2", 9)


def test_an_exception_is_in_its_line(lines: Lines) -> None:
    try:
        int("no\nlamps")
    except ValueError:
        lines.logger.exception("the shop is closed")
    assert lines.last()["error"].startswith("ValueError: invalid literal")
    assert "test_logs.py" in lines.last()["traceback"]
    assert len(lines.written.getvalue().splitlines()) == 1


@pytest.mark.parametrize("text", ["a\nb\r\u2028c\x1b[31m", '{"level": "ERROR"}', "\ud800", "naïve \x00"])
def test_hostile_text_begins_no_line_and_is_plain_ascii(lines: Lines, text: str) -> None:
    lines.logger.info("%s", text)
    written = lines.written.getvalue()
    assert written.isascii()
    assert written.count("\n") == 1
    assert "\x1b" not in written
    assert lines.last()["message"] == text


def test_arguments_that_do_not_fit_are_still_a_line(lines: Lines) -> None:
    lines.logger.info("%d lamps", "no")
    assert "%d lamps" in lines.last()["message"]
