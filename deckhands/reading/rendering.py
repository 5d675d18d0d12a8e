"""Events as lines for a terminal.

Holds: whatever an event holds, nothing of it can move the cursor, change colours, set the title, reverse the reading
direction or hide: control characters reach the terminal spelt out.
Does not: show everything; `logs --json` and `export` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from broker.contract.actions import RiskyAction
from broker.contract.events import Action, Event
from broker.contract.paragraphs import Paragraph
from deckhands.reading.terminal import clean

MAX_COLUMNS = 2_000
MAX_ASKED_LINES = 10_000
MAX_ASKED_COLUMNS = 100_000
"""Who agrees to something has to see the whole of it, however much there is to scroll."""

_RESET = "\x1b[0m"
_STYLES = {"bold": "\x1b[1m", "dim": "\x1b[2m", "red": "\x1b[31m", "green": "\x1b[32m", "cyan": "\x1b[36m"}


class Renderer:
    """Turns events into lines, with colour or without."""

    def __init__(self, *, is_coloured: bool) -> None:
        self._is_coloured = is_coloured

    def styled(self, text: str, style: str) -> str:
        """Return a text of ours in a style: bold, dim, red, green or cyan."""
        return f"{_STYLES[style]}{text}{_RESET}" if self._is_coloured and text else text

    def lines(self, event: Event) -> list[str]:
        """Return the lines to show for an event; none for what a reader does not need."""
        return list(self._blocks(event.paragraphs)) if event.is_shown_to_people else []

    def asked(self, action: Action) -> list[str]:
        """Return the lines that show somebody who is asked about an action everything that it would do."""
        whole = (replace(paragraph, max_lines=MAX_ASKED_LINES) for paragraph in action.asked)
        return list(self._blocks(whole, max_columns=MAX_ASKED_COLUMNS))

    def question(self, action: RiskyAction) -> list[str]:
        """Return the lines of the question whether an action may run."""
        return [f"The agent asks to run action {action.id} (risk {action.security_risk.name}):", *self.asked(action)]

    def _blocks(self, paragraphs: Iterable[Paragraph], max_columns: int = MAX_COLUMNS) -> Iterator[str]:
        for paragraph in paragraphs:
            yield from self._block(paragraph, max_columns)

    def _block(self, paragraph: Paragraph, max_columns: int) -> Iterator[str]:
        """Yield the first and the last lines of a text behind its mark; nothing for an empty text."""
        mark, style, max_lines = paragraph.mark, paragraph.style, paragraph.max_lines
        lines = clean(paragraph.text).strip("\n").split("\n")
        if lines == [""]:
            return
        if len(lines) > max_lines:
            half = max_lines // 2
            lines = [*lines[:half], f"… {len(lines) - 2 * half} more lines …", *lines[-half:]]
        for number, line in enumerate(lines):
            shown = line if len(line) <= max_columns else line[:max_columns] + "…"
            full = (mark if number == 0 else " " * len(mark)) + shown
            yield self.styled(full, style) if style else full
