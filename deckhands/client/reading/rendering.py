"""Events as lines for a terminal.

Holds: the content of an event cannot move the cursor, change colours, set the title, reverse the reading direction or
hide: control characters are printed as escapes.
Does not: show everything; `logs --json` and `export` do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from broker.contract import (
    Action,
    AgentState,
    AgentStateChangedObservation,
    Event,
    EventSource,
    ModelCallFailed,
    Paragraph,
    RiskyAction,
    Role,
)
from broker.runtime import format_count
from deckhands.client.reading.terminal import clean

MAX_COLUMNS = 2_000
MAX_ASKED_LINES = 10_000
MAX_ASKED_COLUMNS = 100_000
"""A user who confirms an action must see all of it, however long it is."""

_RESET = "\x1b[0m"
_STYLES = {"bold": "\x1b[1m", "dim": "\x1b[2m", "red": "\x1b[31m", "green": "\x1b[32m", "cyan": "\x1b[36m"}
STYLE_OF_ROLE: Mapping[Role, str] = {
    "": "",
    "user": "bold",
    "action": "cyan",
    "detail": "dim",
    "problem": "red",
    "success": "green",
    "added": "green",
    "removed": "red",
}
"""How a terminal shows each role of a paragraph; an empty style is the terminal's own."""


class Renderer:
    """Turns the events of a log into lines, in order, with colour or without.

    If one turn of the model has several actions, their lines and those of their results start with the number of the
    action. If two successive events report the same failure, it is shown once.
    """

    def __init__(self, *, is_coloured: bool) -> None:
        self._is_coloured = is_coloured
        self._numbered: set[int] = set()
        self._failure: ModelCallFailed | None = None

    def style(self, text: str, style: str) -> str:
        """Return one of our own texts in a style: bold, dim, red, green or cyan."""
        return f"{_STYLES[style]}{text}{_RESET}" if self._is_coloured and text else text

    def lines(self, event: Event, *, shown: str = "") -> list[str]:
        """Return the lines to show for an event; none if readers do not need it.

        Args:
            shown: the part of the model's reply that was printed before; it is not repeated.
        """
        mark = self._number_of(event)
        if not event.is_shown_to_users or self._repeats_failure(event):
            return []
        return [f"{self.style(mark, 'dim')}{line}" for line in self._blocks(_find_unseen(event, shown))]

    def render_confirmation(self, action: Action) -> list[str]:
        """Return the lines of an action that awaits confirmation, with everything it would do."""
        whole = (replace(paragraph, max_lines=MAX_ASKED_LINES) for paragraph in action.confirmation_paragraphs)
        return list(self._blocks(whole, max_columns=MAX_ASKED_COLUMNS))

    def render_question(self, action: RiskyAction) -> list[str]:
        """Return the lines of the question whether an action may run."""
        return [
            f"The agent asks to run action {action.id} (risk {action.security_risk.name}):",
            *self.render_confirmation(action),
        ]

    def _number_of(self, event: Event) -> str:
        """Return the prefix for the lines of an action of a parallel turn, and of its result."""
        call = event.tool_call_metadata
        if isinstance(event, Action) and call is not None and call.total_calls_in_response > 1:
            self._numbered.add(event.id)
            return f"[{event.id}] "
        return f"[{event.cause}] " if event.cause in self._numbered else ""

    def _repeats_failure(self, event: Event) -> bool:
        """Return whether the event only repeats the failure of the previous event."""
        failure, self._failure = self._failure, None
        if isinstance(event, ModelCallFailed) and event.retry_at is None:
            self._failure = event
        if failure is None or not isinstance(event, AgentStateChangedObservation):
            return False
        texts = (failure.last_error, failure.content)
        is_same = any(text and text in event.reason for text in texts)
        return event.agent_state is AgentState.ERROR and is_same

    def _blocks(self, paragraphs: Iterable[Paragraph], max_columns: int = MAX_COLUMNS) -> Iterator[str]:
        for paragraph in paragraphs:
            yield from self._block(paragraph, max_columns)

    def _block(self, paragraph: Paragraph, max_columns: int) -> Iterator[str]:
        """Yield the first and the last lines of a text after its mark; nothing for an empty text."""
        mark = paragraph.mark
        style = STYLE_OF_ROLE[paragraph.role]
        max_lines = paragraph.max_lines
        lines = clean(paragraph.text).strip("\n").split("\n")
        if lines == [""]:
            return
        if len(lines) > max_lines:
            half = max_lines // 2
            lines = [*lines[:half], f"… {format_count(len(lines) - 2 * half, 'more line')} …", *lines[-half:]]
        for number, line in enumerate(lines):
            shown = line if len(line) <= max_columns else line[:max_columns] + "…"
            full = (mark if number == 0 else " " * len(mark)) + shown
            yield self.style(full, style) if style else full


def _find_unseen(event: Event, shown: str) -> Iterable[Paragraph]:
    """Return the texts of an event without those already shown; actions are always included."""
    if not shown or not isinstance(event, Action) or event.source is not EventSource.AGENT:
        return event.paragraphs
    return [part for part in event.paragraphs if part.role == "action" or not _is_in(part.text.strip(), shown)]


def _is_in(text: str, shown: str) -> bool:
    return text in shown or json.dumps(text)[1:-1] in shown or json.dumps(text, ensure_ascii=False)[1:-1] in shown
