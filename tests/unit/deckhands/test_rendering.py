"""Events as lines: readable, short, and unable to do anything to a terminal."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from broker.actions import (
    AgentFinishAction,
    AgentThinkAction,
    BrowseInteractiveAction,
    IPythonRunCellAction,
    MCPAction,
    MessageAction,
)
from broker.events import ModelCallFailed
from broker.file_events import FileEditAction, FileReadAction, FileReadObservation, FileWriteAction
from broker.observations import ErrorObservation
from deckhands.rendering import Renderer, clean, clean_line
from tests.unit.deckhands.sample_log import command, finished_log, output, state, user

PLAIN = Renderer(is_coloured=False)
COLOURED = Renderer(is_coloured=True)


def test_a_conversation_reads_like_this():
    lines = [line for event in finished_log() for line in PLAIN.lines(event)]
    assert lines == ["You: Mend it, please.", "$ make test", "  1 passed", "All tests pass."]


def test_what_else_there_is_to_see():
    assert PLAIN.lines(MessageAction(content="Which one?", source="agent")) == ["Agent: Which one?"]
    assert PLAIN.lines(AgentThinkAction(thought="Hm.")) == ["Hm."]
    assert PLAIN.lines(FileEditAction(path="/a.py", command="create", thought="Now the file.")) == [
        "Now the file.",
        "Editing /a.py (create)",
    ]
    assert PLAIN.lines(output(1, "boom", exit_code=2)) == ["  boom", "  exit code 2"]
    assert PLAIN.lines(FileReadObservation(path="/a", content="1\n2\n")) == ["  2 lines"]
    assert PLAIN.lines(ErrorObservation(content="no such file")) == ["  ! no such file"]
    assert PLAIN.lines(state("awaiting_user_input")) == ["(awaiting user input)"]
    assert PLAIN.lines(state("error", "RuntimeError: boom")) == ["! RuntimeError: boom"]
    assert PLAIN.lines(ModelCallFailed(code="rate_limit", content="slow down")) == [
        "! The model call failed (rate_limit): slow down"
    ]
    assert PLAIN.lines(AgentFinishAction()) == ["All done."]


def test_the_lines_of_a_long_text_keep_its_ends():
    lines = PLAIN.lines(output(1, "\n".join(str(number) for number in range(100))))
    assert lines[9:12] == ["  9", "  … 80 more lines …", "  90"]
    assert len(lines) == 21


def test_every_line_of_a_text_is_indented_by_its_mark():
    assert PLAIN.lines(user("one\ntwo")) == ["You: one", "     two"]


def test_colours_are_ours_alone():
    assert COLOURED.lines(command("ls \x1b[31mred")) == ["\x1b[36m$ ls red\x1b[0m"]


def test_escape_sequences_are_dropped_whole():
    assert clean("a\x1b[1;31mb\x1b]0;title\x07c\x1b]8;;http://x\x1b\\d\x1bMe\x1bP1$r\x1b\\f") == "abcdef"


def test_other_control_characters_are_spelt_out():
    assert clean("bell\x07 back\x08 csi\x9b31m") == "bell\\x07 back\\x08 csi\\x9b31m"
    assert clean("user\u202etxt.exe\u2066") == "user\\x202etxt.exe\\x2066"


def test_a_progress_bar_becomes_lines():
    assert clean("10%\r20%\r\n30%\r") == "10%\n20%\n30%\n"


@given(st.text())
def test_nothing_a_terminal_obeys_is_left(text):
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", clean(text))


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_plain_text_is_left_alone(text):
    assert clean(text) == text


def test_one_line_of_a_text():
    assert clean_line("a\n b\t\x1b[0mc") == "a b c"
    assert clean_line("x" * 300, limit=10) == "xxxxxxxxx…"


def test_who_is_asked_sees_the_whole_of_what_would_be_done():
    assert PLAIN.asked(command("a\n" * 5_000 + "b" * 50_000)) == ["  $ a", *["    a"] * 4_999, "    " + "b" * 50_000]
    assert PLAIN.asked(FileWriteAction(path="a", content="one\ntwo")) == ["  Writing a", "  + one", "    two"]
    assert PLAIN.asked(FileWriteAction(path="a", content="x", start=2, end=5))[0] == "  Writing a, lines [2, 5)"
    edit = FileEditAction(path="/a", command="str_replace", old_str="one", new_str="two\x1b[2J")
    assert PLAIN.asked(edit) == ["  Editing /a (str_replace)", "  - one", "  + two"]
    insert = FileEditAction(path="/a", command="insert", insert_line=3, new_str="x")
    assert PLAIN.asked(insert) == ["  Editing /a (insert), after line 3", "  + x"]
    assert PLAIN.asked(IPythonRunCellAction(code="1\n2")) == ["  1", "  2"]
    assert PLAIN.asked(BrowseInteractiveAction(browser_actions="click('1')")) == ["  click('1')"]
    assert PLAIN.asked(MCPAction(name="t", arguments={"a": 1})) == ["  Calling t {", '    "a": 1', "  }"]
    assert PLAIN.asked(FileReadAction(path="/etc/passwd")) == ["  Reading /etc/passwd"]
