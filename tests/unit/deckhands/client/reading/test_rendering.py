"""Events as lines and on a screen: readable, short, and unable to do anything to a terminal."""

from __future__ import annotations

import io
import re
from datetime import UTC, datetime, timedelta

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.actions import (
    AgentFinishAction,
    AgentThinkAction,
    CmdRunAction,
    LoopRecoveryAction,
    MCPAction,
    MessageAction,
)
from broker.contract.browser_events import BrowseInteractiveAction, BrowseURLAction
from broker.contract.events import ModelCallFailed, ModelReply, ToolCallMetadata, with_id
from broker.contract.file_events import (
    FileEditAction,
    FileEditObservation,
    FileReadAction,
    FileReadObservation,
    FileWriteAction,
)
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation, ErrorObservation
from broker.contract.recall import RecallObservation
from broker.contract.session_events import IPythonRunCellAction
from broker.contract.task_list import TaskItem, TaskTrackingAction
from deckhands.client.reading.rendering import Renderer
from deckhands.client.reading.screen import ScreenRenderer
from deckhands.client.reading.status_line import LiveArea, StatusLine, format_short_number
from deckhands.client.reading.terminal import clean, clean_line
from tests.unit.deckhands.sample_log import (
    STARTED,
    command,
    created,
    finished_log,
    numbered,
    output,
    reply,
    state,
    user,
)

PLAIN = Renderer(is_coloured=False)
COLOURED = Renderer(is_coloured=True)


def test_a_conversation_reads_like_this():
    lines = [line for event in finished_log() for line in PLAIN.lines(event)]
    assert lines == ["You: Fix it, please.", "$ make test", "  1 passed", "All tests pass."]


def test_what_else_there_is_to_see():
    assert PLAIN.lines(MessageAction(content="Which one?", source="agent")) == ["Agent: Which one?"]
    assert PLAIN.lines(AgentThinkAction(thought="Hm.")) == ["Hm."]
    assert PLAIN.lines(FileEditAction(path="/a.py", command="create", thought="Now the file.")) == [
        "Now the file.",
        "Editing /a.py (create)",
    ]
    assert PLAIN.lines(output(1, "boom", exit_code=2)) == ["  boom", "  exit code 2"]
    assert PLAIN.lines(FileReadObservation(path="/a", content="1\n2\n")) == ["  2 lines"]
    view = "Here's the result of running `cat -n` on /a:\n     1\tone\n"
    assert PLAIN.lines(FileReadObservation(path="/a", content=view, impl_source="oh_aci")) == ["  1 line"]
    missing = FileReadObservation(path="/a", content="ERROR:\nThe path /a does not exist.", impl_source="oh_aci")
    assert PLAIN.lines(missing) == ["  ERROR:", "  The path /a does not exist."]
    assert PLAIN.lines(ErrorObservation(content="no such file")) == ["  ! no such file"]
    assert PLAIN.lines(state("awaiting_user_input")) == ["(awaiting user input)"]
    assert PLAIN.lines(state("error", "RuntimeError: boom")) == ["! RuntimeError: boom"]
    assert PLAIN.lines(ModelCallFailed(code="rate_limit", content="slow down")) == [
        "! The model call failed (rate_limit): slow down. Try again later, or use another key or model."
    ]
    assert PLAIN.lines(AgentFinishAction()) == ["All done."]


def test_files_that_are_no_skills_are_named():
    found = RecallObservation(recall_type="workspace_context", unreadable_skills=("a.md: it has a tag",))
    assert PLAIN.lines(found) == ["  ! Left out, because it is not a skill: a.md: it has a tag"]


def test_the_lines_of_a_long_text_keep_its_ends():
    lines = PLAIN.lines(output(1, "\n".join(str(number) for number in range(100))))
    assert lines[9:12] == ["  9", "  … 80 more lines …", "  90"]
    assert len(lines) == 21


def test_colours_are_ours_alone():
    assert COLOURED.lines(command("ls \x1b[31mred")) == ["\x1b[36m$ ls \\x1b[31mred\x1b[0m"]


@pytest.mark.parametrize(
    ("suffix", "shown"),
    [
        (
            "\n[The command timed out after 5 seconds. You may wait longer to see more.]",
            ["The command timed out after 5 seconds."],
        ),
        (
            "\n[The command has no new output after 30 seconds. You may wait longer to see more.]",
            ["The command has no new output after 30 seconds."],
        ),
        (
            '\n[Your command "ls" is NOT executed. The previous command is still running. You may wait longer to see it.]',
            ['The command "ls" is NOT executed. The previous command is still running.'],
        ),
        ("\n[The command was cancelled before it ran.]\n[Terminal: t]", ["The command was cancelled before it ran."]),
        (
            "\n[The command was cancelled.]\n[The command also ended the shell.]",
            ["The command was cancelled.", "The command also ended the shell."],
        ),
        ("\n[The command runs in the background. It continues.]", []),
        ("\n[The whole output (90000 bytes) is in /tmp/x; search it with grep.]", []),
        ("", []),
    ],
)
def test_command_without_an_end_says_why(suffix, shown):
    metadata = CmdOutputMetadata(exit_code=-1, suffix=suffix)
    ended = CmdOutputObservation(command="ls", content="1", metadata=metadata)
    assert PLAIN.lines(ended) == ["  1", *(f"  {line}" for line in shown)]
    assert all(line in ended.sentence for line in shown)


def test_failed_model_call_is_shown_once_with_its_remedy():
    key = "STATUS$ERROR_LLM_AUTHENTICATION"
    failed = ModelCallFailed(code="authentication", content="bad key", last_error=key)
    renderer = Renderer(is_coloured=False)
    shown = [line for event in (failed, state("error", key)) for line in renderer.lines(event)]
    assert shown == ["! The model call failed (authentication): bad key. Check LLM_API_KEY."]


def test_removed_and_added_text_has_its_terminal_style():
    edit = FileEditAction(path="/a", command="str_replace", old_str="x", new_str="y")
    assert COLOURED.render_confirmation(edit)[1:] == ["\x1b[31m  - x\x1b[0m", "\x1b[32m  + y\x1b[0m"]


def test_control_and_hidden_characters_are_spelt_out():
    assert clean("a\x1b[1;31mb\x1b]8;;http://x\x1b\\c") == r"a\x1b[1;31mb\x1b]8;;http://x\x1b\c"
    assert clean("bell\x07 back\x08 csi\x9b31m") == r"bell\x07 back\x08 csi\x9b31m"
    assert clean("user\u202etxt.exe\u2066 \U000e0041") == r"user\u202etxt.exe\u2066 \U000e0041"
    assert clean("not UTF-8: \udcff") == r"not UTF-8: \udcff"
    assert clean("one\r\nfine\rhidden") == "one\nfine\\rhidden"


def test_escape_sequences_hide_no_part_of_a_command():
    lines = PLAIN.render_confirmation(command("ls # \x1b]0;\nrm -rf ~\n# \x07"))
    assert lines == [r"  $ ls # \x1b]0;", "    rm -rf ~", r"    # \x07"]


@given(st.text(st.characters()))
def test_nothing_a_terminal_obeys_is_left(text):
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", clean(text)
    )


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_plain_text_is_left_alone(text):
    assert clean(text) == text


def test_one_line_of_a_text():
    assert clean_line("a\n b\t\x1b[0mc") == r"a b \x1b[0mc"
    assert clean_line("x" * 300, limit=10) == "xxxxxxxxx…"


def test_question_shows_the_whole_action():
    assert PLAIN.render_confirmation(command("a\n" * 5_000 + "b" * 50_000)) == [
        "  $ a",
        *["    a"] * 4_999,
        "    " + "b" * 50_000,
    ]
    assert PLAIN.render_confirmation(FileWriteAction(path="a", content="one\ntwo")) == [
        "  Writing a",
        "  + one",
        "    two",
    ]
    assert (
        PLAIN.render_confirmation(FileWriteAction(path="a", content="x", start=2, end=5))[0]
        == "  Writing a, lines [2, 5)"
    )
    edit = FileEditAction(path="/a", command="str_replace", old_str="one", new_str="two\x07")
    assert PLAIN.render_confirmation(edit) == ["  Editing /a (str_replace)", "  - one", r"  + two\x07"]
    insert = FileEditAction(path="/a", command="insert", insert_line=3, new_str="x")
    assert PLAIN.render_confirmation(insert) == ["  Editing /a (insert), after line 3", "  + x"]
    assert PLAIN.render_confirmation(IPythonRunCellAction(code="1\n2")) == ["  1", "  2"]
    assert PLAIN.render_confirmation(BrowseInteractiveAction(browser_actions="click('1')")) == ["  click('1')"]
    assert PLAIN.render_confirmation(MCPAction(name="t", arguments={"a": 1})) == ["  Calling t {", '    "a": 1', "  }"]
    assert PLAIN.render_confirmation(FileReadAction(path="/etc/passwd")) == ["  Reading /etc/passwd"]


def test_calls_of_one_turn_and_their_results_are_told_apart():
    def called(text: str, number: int, of: int) -> CmdRunAction:
        call = {"function_name": "execute_bash", "tool_call_id": str(number), "reply_id": number}
        metadata = ToolCallMetadata(**call, total_calls_in_response=of)
        return CmdRunAction(id=number, command=text, tool_call_metadata=metadata)

    log = [called("make a", 7, 2), called("make b", 8, 2), output(8, "b\nis made"), output(7, "a")]
    log += [called("make c", 12, 1), output(12, "c")]
    renderer = Renderer(is_coloured=False)
    assert [line for event in log for line in renderer.lines(event)] == [
        *("[7] $ make a", "[8] $ make b", "[8]   b", "[8]   is made", "[7]   a"),
        *("$ make c", "  c"),
    ]


def test_a_failure_is_shown_once_and_a_retry_says_when():
    failed = ModelCallFailed(code="llm_config", content="No such file.")
    renderer = Renderer(is_coloured=False)
    assert renderer.lines(failed) == ["! The model call failed (llm_config): No such file."]
    assert renderer.lines(state("error", "LLMConfigError: No such file.")) == []
    assert renderer.lines(state("error", "LLMConfigError: No such file.")) == ["! LLMConfigError: No such file."]
    at = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
    again = ModelCallFailed(code="timeout", content="Too slow.", timestamp=at, retry_at=at + timedelta(seconds=8))
    assert renderer.lines(again) == [
        "! The model call failed (timeout): Too slow.; attempt 2 follows in 8 s, at 12:00:08 UTC"
    ]


def test_no_action_is_shown_by_the_name_of_its_kind():
    assert PLAIN.lines(IPythonRunCellAction(code="x = 1\nprint(x)", thought="Let me see.")) == [
        *("Let me see.", ">>> x = 1", "    print(x)")
    ]
    assert PLAIN.lines(BrowseURLAction(url="https://example.com/")) == ["Opening https://example.com/"]
    items = (TaskItem(id="1", title="Look", status="done"), TaskItem(id="2", title="Write"))
    assert PLAIN.lines(TaskTrackingAction(command="plan", task_list=items)) == ["Task list:", "✅ Look", "⏳ Write"]
    assert PLAIN.lines(TaskTrackingAction()) == ["Reading the task list"]
    odd = (TaskItem(id="1", title="Wait", status="blocked"),)  # the model's own word
    assert PLAIN.lines(TaskTrackingAction(command="plan", task_list=odd)) == ["Task list:", "⏳ Wait"]
    assert PLAIN.lines(LoopRecoveryAction(option=2, source="user")) == [
        "Out of the loop: restart before it and continue (go-on)"
    ]


def test_streamed_text_is_not_repeated_but_actions_are_shown():
    shown = 'I look around.{"command": "ls"}'
    action = CmdRunAction(command="ls", thought="I look around.", source="agent")
    assert PLAIN.lines(action, shown=shown) == ["$ ls"]
    assert PLAIN.lines(action, shown="I look") == ["I look around.", "$ ls"]
    finish = AgentFinishAction(final_thought='He said "done".\nSo I am.')
    assert PLAIN.lines(finish, shown='finish {"message": "He said \\"done\\".\\nSo I am."}') == []
    assert PLAIN.lines(output(1, "ls"), shown=shown) == ["  ls"]
    assert PLAIN.lines(user("ls"), shown=shown) == ["You: ls"]


OURS = re.compile(r"\x1b\[\d?m")
"""The only sequences that lines may hold: our colours."""
DIFF = "--- a.py\n+++ a.py\n@@ -1,2 +1,2 @@\n same\n-old\n+new"


def uncoloured(lines: list[str]) -> list[str]:
    return [
        OURS.sub("", line.replace("\x1b[31m", "").replace("\x1b[32m", "").replace("\x1b[36m", "")) for line in lines
    ]


def test_a_diff_is_coloured_line_by_line():
    lines = ScreenRenderer().lines(FileEditObservation(path="a.py", diff=DIFF))
    styles = [re.match(r"\x1b\[(\d+)m", line).group(1) for line in lines]
    assert styles == ["1", "1", "36", "2", "31", "32"]
    in_output = ScreenRenderer().lines(output(1, "diff --git a b\n" + DIFF))
    assert "\x1b[32m  +new\x1b[0m" in in_output


def test_a_list_of_points_is_no_diff():
    assert ScreenRenderer().lines(output(1, "- one\n+ two")) == ["\x1b[2m  - one\x1b[0m", "\x1b[2m  + two\x1b[0m"]


def test_a_long_output_is_folded_unless_everything_is_wanted():
    text = "\n".join(map(str, range(1, 101)))
    lines = uncoloured(ScreenRenderer().lines(output(1, text)))
    assert len(lines) == 12
    assert lines[:5] == ["  1", "  2", "  3", "  4", "  … 89 more lines …"]
    assert lines[-1] == "  100"
    assert len(ScreenRenderer(is_whole=True).lines(output(1, text))) == 100
    assert len(uncoloured(ScreenRenderer().lines(output(1, "x" * 5_000_000)))[0]) == 2 + 400 + 1


def test_model_reasoning_is_shown_before_its_actions():
    thinking = ({"type": "thinking", "thinking": "Hm.\nYes."}, {"type": "redacted_thinking", "data": "x"})
    assert uncoloured(ScreenRenderer().lines(ModelReply(thinking_blocks=thinking))) == ["", "~ Hm.", "  Yes."]
    assert ScreenRenderer().lines(ModelReply(thinking_blocks=thinking), shown="Hm.") == []
    assert ScreenRenderer().lines(ModelReply(thinking_blocks=thinking, service="condenser")) == []
    assert ScreenRenderer().lines(ModelReply(thinking_blocks=({"thinking": 7},))) == []
    assert Renderer(is_coloured=True).lines(ModelReply(thinking_blocks=thinking)) == []


HOSTILE = st.text(st.sampled_from("ab \x1b[]0;\x07\x9b\x90\x9d\u202e\u2066\r\n\b\x00\ud800@-+1,"), max_size=60)


@given(text=HOSTILE)
def test_nothing_of_an_event_reaches_the_terminal_raw(text: str):
    events = [
        MessageAction(content=text, source="agent"),
        output(1, text),
        FileEditObservation(diff=f"@@ -1 +1 @@\n{text}"),
        ModelReply(thinking_blocks=({"thinking": text},)),
        command(text or "a"),
    ]
    standing = StatusLine()
    standing.add(created())
    standing.add(state("running"))
    for event in events:
        for line in uncoloured(ScreenRenderer().lines(event)):
            assert line.isprintable() or not set(line) & set("\x1b\x9b\x90\x9d\x07\r\n\b\x00\u202e\u2066\ud800")
    (asked,) = numbered(command(text or "a"))
    standing.add(asked)
    screen = io.StringIO()
    LiveArea(screen).show([standing.line(STARTED)])
    sent = screen.getvalue().replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert not set(sent) & set("\x1b\x9b\x90\x9d\x07\r\n\b\x00\u202e\u2066\ud800")


def test_the_line_says_step_tokens_cost_time_and_what_happens():
    standing = StatusLine()
    assert standing.line(STARTED) == "| starting"
    log = finished_log()
    for event in log[:7]:
        standing.add(event)
    later = STARTED + timedelta(seconds=65)
    assert standing.line(later, turn=1) == "/ step 1 · 1.1k tokens · $0.2500 · 1:05 · $ make test (0:59)"
    standing.add(log[7])
    assert standing.line(later) == "| step 1 · 1.1k tokens · $0.2500 · 1:05 · asks the model"
    assert standing.line(later, waits_for="rate_limit").endswith("· waits for rate limit")
    standing.add(with_id(ModelCallFailed(code="rate_limit", content="slow", retry_at=later), 9))
    assert standing.line(later).endswith("· the model call failed (rate_limit), it is repeated")
    for event in log[8:]:
        standing.add(event)
    assert standing.line(later + timedelta(days=1)) == "- step 2 · 2.3k tokens · $0.5000 · 0:10 · finished"


def test_an_unknown_price_is_marked():
    standing = StatusLine()
    for event in numbered(created(), user("x"), reply(cost=None)):
        standing.add(event)
    assert "· cost unknown ·" in standing.line(STARTED)
    standing.add(with_id(reply(), 4))
    assert "· >= $0.2500 ·" in standing.line(STARTED)


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (1_000, "1.0k"), (999_949, "999.9k"), (999_950, "1.0M"), (12_340_000, "12.3M")]
)
def test_numbers_in_a_few_characters(number: int, text: str):
    assert format_short_number(number) == text


class Glass(io.StringIO):
    """A terminal of 80 columns and 6 lines, as a user sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(80, 6, history=100)
        self.screen.set_mode(pyte.modes.LNM)
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        self._stream.feed(text)
        return len(text)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]


def test_printed_lines_go_above_the_status_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    glass = Glass()
    area = LiveArea(glass)
    area.show(["writing", "status 1"])
    for number in range(8):
        area.above([f"line {number}"])
    assert glass.lines == ["line 4", "line 5", "line 6", "line 7", "writing", "status 1"]
    area.show(["status 2\x1b[31m" + "x" * 200])
    assert glass.lines[4].startswith(r"status 2\x1b[31mxx")
    assert (len(glass.lines[4]), glass.lines[4][-1], glass.lines[5]) == (79, "…", "")
    area.hide()
    area.above(["a question"])
    assert glass.lines[4:] == ["a question", ""]
    area.unhide()
    area.close()
    assert glass.lines[4:] == ["a question", ""]
    above = ["".join(line[column].data for column in range(80)).rstrip() for line in glass.screen.history.top]
    assert above == ["line 0", "line 1", "line 2", "line 3"], "nothing of the lines below has scrolled away"
