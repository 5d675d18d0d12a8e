"""Events and the line below them, as a person at a terminal sees them."""

from __future__ import annotations

import io
import re
from datetime import timedelta

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.actions import MessageAction
from broker.contract.events import ModelCallFailed, ModelReply, with_id
from broker.contract.file_events import FileEditObservation
from deckhands.client.reading.live_area import LiveArea
from deckhands.client.reading.rendering import Renderer
from deckhands.client.reading.screen import ScreenRenderer
from deckhands.client.reading.status_line import StatusLine, format_duration, format_short_number
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

OURS = re.compile(r"\x1b\[\d?m")
"""The only sequences that lines may hold: our colours."""
DIFF = "--- a.py\n+++ a.py\n@@ -1,2 +1,2 @@\n same\n-old\n+new"


def plain(lines: list[str]) -> list[str]:
    return [
        OURS.sub("", line.replace("\x1b[31m", "").replace("\x1b[32m", "").replace("\x1b[36m", "")) for line in lines
    ]


def test_a_step_begins_with_an_empty_line():
    lines = [line for event in finished_log() for line in plain(ScreenRenderer().lines(event))]
    assert lines == ["", "You: Fix it, please.", "", "$ make test", "  1 passed", "", "All tests pass."]


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
    lines = plain(ScreenRenderer().lines(output(1, text)))
    assert len(lines) == 12
    assert lines[:5] == ["  1", "  2", "  3", "  4", "  … 89 more lines …"]
    assert lines[-1] == "  100"
    assert len(ScreenRenderer(is_whole=True).lines(output(1, text))) == 100
    assert len(plain(ScreenRenderer().lines(output(1, "x" * 5_000_000)))[0]) == 2 + 400 + 1


def test_model_reasoning_is_shown_before_its_actions():
    thinking = ({"type": "thinking", "thinking": "Hm.\nYes."}, {"type": "redacted_thinking", "data": "x"})
    assert plain(ScreenRenderer().lines(ModelReply(thinking_blocks=thinking))) == ["", "~ Hm.", "  Yes."]
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
        for line in plain(ScreenRenderer().lines(event)):
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


def test_times_in_a_few_characters():
    assert [format_duration(-1), format_duration(59.9), format_duration(3_599), format_duration(3_600)] == [
        "0:00",
        "0:59",
        "59:59",
        "1:00:00",
    ]


class Glass(io.StringIO):
    """A terminal of 80 columns and 6 lines, as a person sees it."""

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


def test_what_is_printed_goes_above_the_lines_that_stay(monkeypatch: pytest.MonkeyPatch):
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
