"""Events for interactive reading on a terminal: the agent's thoughts, actions and results, step by step.

Holds: the same texts as in plain lines, cleaned the same way; only colour, folding, spacing and the model's reasoning
differ.
Does not: print anything; see `deckhands.cli.screen_printer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from broker.contract import Action, Event, ModelReply, Paragraph
from broker.runtime import format_count
from deckhands.client.reading.rendering import STYLE_OF_ROLE, Renderer
from deckhands.client.reading.terminal import clean

FOLDED_LINES = 12
"""The number of lines shown of an output; the others are counted."""
FOLDED_DIFF_LINES = 40
FOLDED_THOUGHT_LINES = 8
FOLDED_COLUMNS = 400
"""The length at which a line is cut, so that one line does not fill the screen."""
UNFOLDED_LINES, UNFOLDED_COLUMNS = 1_000_000, 1_000_000

_HUNK = re.compile(r"^@@ -\d", re.MULTILINE)
_MODEL_MARK = "~ "


class ScreenRenderer(Renderer):
    """Turns the events of a log into coloured lines for a terminal.

    A step starts with an empty line. Diffs are coloured line by line. Long outputs are folded, unless `everything` is
    set.
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        super().__init__(is_coloured=True)
        self._is_whole = is_whole

    def lines(self, event: Event, *, shown: str = "") -> list[str]:
        """See `Renderer.lines`."""
        if isinstance(event, ModelReply):
            return [] if shown else self._reasoning(event)
        found = super().lines(event, shown=shown)
        return ["", *found] if found and isinstance(event, Action) else found

    def diff(self, patch: str) -> list[str]:
        """Return all lines of a patch in their colours."""
        return [self.style(line, self._style_of(line)) for line in clean(patch).rstrip("\n").split("\n")]

    def _reasoning(self, reply: ModelReply) -> list[str]:
        """Return the model's reasoning before its reply, if its provider returns it."""
        if reply.service != "agent":
            return []
        texts = [block.get("thinking") for block in reply.thinking_blocks]
        text = "\n".join(text.strip() for text in texts if isinstance(text, str) and text.strip())
        if not text:
            return []
        return ["", *self._block(Paragraph(text, "detail", _MODEL_MARK, FOLDED_THOUGHT_LINES), FOLDED_COLUMNS)]

    def _block(self, paragraph: Paragraph, max_columns: int) -> Iterator[str]:
        """Yield the lines of a text: a diff in its colours, an output folded, anything else as in plain lines."""
        lines = clean(paragraph.text).strip("\n").split("\n")
        if lines == [""]:
            return
        is_diff = paragraph.role in ("", "detail") and _HUNK.search(paragraph.text) is not None
        limit, columns = self._limits(paragraph, max_columns, is_diff=is_diff)
        mark = paragraph.mark
        for number, line in enumerate(_fold(lines, limit)):
            shown = line if len(line) <= columns else line[:columns] + "…"
            full = (mark if number == 0 else " " * len(mark)) + shown
            style = self._style_of(line) if is_diff else STYLE_OF_ROLE[paragraph.role]
            yield self.style(full, style) if style else full

    def _limits(self, paragraph: Paragraph, max_columns: int, *, is_diff: bool) -> tuple[int, int]:
        """Return the number of lines to show of a text, and of characters per line."""
        if self._is_whole:
            return UNFOLDED_LINES, UNFOLDED_COLUMNS
        if is_diff:
            return max(FOLDED_DIFF_LINES, paragraph.max_lines), FOLDED_COLUMNS
        if paragraph.role == "detail":
            return min(FOLDED_LINES, paragraph.max_lines), min(FOLDED_COLUMNS, max_columns)
        return paragraph.max_lines, max_columns

    def _style_of(self, line: str) -> str:
        """Return the style of a line of a diff."""
        if line.startswith(("+++", "---", "diff ")):
            return "bold"
        return {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "dim")


def _fold(lines: list[str], limit: int) -> list[str]:
    """Return the first lines, the last ones, and the number of lines between them."""
    if len(lines) <= limit:
        return lines
    head = limit // 3
    tail = limit - head - 1
    left_out = len(lines) - head - tail
    return [*lines[:head], f"… {format_count(left_out, 'more line')} …", *lines[len(lines) - tail :]]
