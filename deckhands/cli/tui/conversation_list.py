"""The list of conversations in `top`. It draws only the rows on the screen, even if there are ten thousand."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from broker.runtime import SYSTEM_CLOCK
from deckhands.cli.tui.conversation_cache import DEAD, CachedConversation
from deckhands.client import fit_width, format_duration, format_short_number, measure_width

COLUMNS: Sequence[tuple[str, int, str]] = (
    ("STATE", 27, "state"),
    ("STEPS", 6, "steps"),
    ("TOKENS", 7, "tokens"),
    ("COST", 10, "cost"),
    ("UPDATED", 8, "updated"),
    ("AGE", 8, "age"),
    ("CONVERSATION", 26, ""),
    ("TITLE", 0, "title"),
)
"""Heading, width and sort key of each column; the last column takes the rest of the line."""
RIGHT = frozenset(("STEPS", "TOKENS", "COST", "UPDATED", "AGE"))
NARROW = 100
"""Narrower screens leave out the columns in `SPARE`."""
SPARE = frozenset(("TOKENS", "AGE"))
STYLES = {
    "running": Style(color="green"),
    "error": Style(color="red"),
    DEAD: Style(color="red", bold=True),
    "awaiting_user_confirmation": Style(color="yellow", bold=True),
    "awaiting_user_input": Style(color="yellow"),
    "paused": Style(color="yellow"),
    "finished": Style(dim=True),
    "stopped": Style(dim=True),
    "closed": Style(dim=True),
}
PLAIN = Style()
CURSOR = Style(reverse=True)


def heading(columns: int, *, by: str, is_turned: bool) -> str:
    """Return the line above the rows; an arrow marks the sort column."""
    cells = []
    for name, width, sort in _fit_columns(columns):
        mark = ("^" if is_turned else "v") if sort == by else ""
        cells.append(_render_cell(f"{name}{mark}", width, is_right=name in RIGHT))
    return fit_width(" ".join(cells), columns)


def row_text(row: CachedConversation, columns: int, now: float) -> str:
    """Return a row as a line of exactly this width."""
    waits = f" ({row.wait_reason.replace('_', ' ')})" if row.wait_reason else ""
    values = {
        "STATE": row.state.replace("_", " ") + waits,
        "STEPS": str(row.steps),
        "TOKENS": format_short_number(row.tokens),
        "COST": _format_cost(row),
        "UPDATED": _format_age(now - row.updated),
        "AGE": _format_age(now - row.created),
        "CONVERSATION": row.conversation_id,
        "TITLE": row.title,
    }
    cells = [_render_cell(values[name], width, is_right=name in RIGHT) for name, width, _ in _fit_columns(columns)]
    line = fit_width(" ".join(cells), columns)
    return line + " " * (columns - measure_width(line))


def _format_cost(row: CachedConversation) -> str:
    """Return the cost as `ls` does, in few characters."""
    if not row.has_unknown_cost:
        return f"${row.cost_usd:.4f}"
    return f">=${row.cost_usd:.4f}" if row.cost_usd else "unknown"


def _fit_columns(columns: int) -> list[tuple[str, int, str]]:
    return [column for column in COLUMNS if columns >= NARROW or column[0] not in SPARE]


def _render_cell(text: str, width: int, *, is_right: bool) -> str:
    if not width:
        return text
    shown = fit_width(text, width)
    blank = " " * (width - measure_width(shown))
    return blank + shown if is_right else shown + blank


def _format_age(seconds: float) -> str:
    if seconds < 86_400:
        return format_duration(seconds)
    return f"{seconds / 86_400:.0f} d"


class ConversationList(ScrollView, can_focus=True):
    """Rows of conversations with a cursor, which stays on its conversation while rows move."""

    BINDINGS = [  # noqa: RUF012  (textual reads it so)
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "jump(0)", "First", show=False),
        Binding("end", "jump(-1)", "Last", show=False),
        Binding("enter", "open", "Open"),
    ]

    class Opened(Message):
        """The user opened a conversation."""

        def __init__(self, conversation_id: str) -> None:
            super().__init__()
            self.conversation_id = conversation_id

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[CachedConversation] = []
        self._cursor = 0

    @property
    def chosen(self) -> CachedConversation | None:
        """The row under the cursor."""
        return self.rows[self._cursor] if self.rows else None

    @property
    def seen(self) -> list[str]:
        """The conversations on the screen."""
        top = self.scroll_offset.y
        return [row.conversation_id for row in self.rows[top : top + self.size.height]]

    def put(self, rows: list[CachedConversation]) -> None:
        """Replace the rows; the cursor stays on its conversation, unless it is on the first row."""
        before = self.chosen
        self.rows = rows
        self._cursor = min(self._cursor, max(0, len(rows) - 1))
        if before is not None and self._cursor > 0:
            wanted = before.conversation_id
            found = next((at for at, row in enumerate(rows) if row.conversation_id == wanted), self._cursor)
            moved = found - self._cursor
            self._cursor = found
            if moved:
                self._show_cursor()
        self.virtual_size = Size(self.size.width, len(rows))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Draw one line of the screen."""
        at = y + self.scroll_offset.y
        columns = self.size.width
        if at >= len(self.rows):
            return Strip.blank(columns)
        row = self.rows[at]
        style = STYLES.get(row.state, PLAIN)
        if at == self._cursor:
            style += CURSOR
        return Strip([Segment(row_text(row, columns, SYSTEM_CLOCK.now().timestamp()), style)], columns)

    def action_move(self, by: int) -> None:
        """Move the cursor by a number of rows."""
        self._move_cursor(self._cursor + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by a number of screens."""
        self._move_cursor(self._cursor + by * max(1, self.size.height - 1))

    def action_jump(self, at: int) -> None:
        """Move the cursor to a row; negative ones count from the end."""
        self._move_cursor(at if at >= 0 else len(self.rows) + at)

    def action_open(self) -> None:
        """Open the conversation under the cursor."""
        if self.chosen is not None:
            self.post_message(self.Opened(self.chosen.conversation_id))

    def on_click(self, event: Click) -> None:
        """Move the cursor to the clicked row; a click on the cursor's row opens it."""
        at = event.y + self.scroll_offset.y
        if at == self._cursor:
            self.action_open()
        elif at < len(self.rows):
            self._move_cursor(at)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Move the cursor with the wheel."""
        event.stop()
        self.action_move(3)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Move the cursor with the wheel."""
        event.stop()
        self.action_move(-3)

    def _move_cursor(self, at: int) -> None:
        self._cursor = max(0, min(at, len(self.rows) - 1))
        self._show_cursor()
        self.refresh()

    def _show_cursor(self) -> None:
        self.scroll_to_region(Region(0, self._cursor, 1, 1), animate=False, force=True)
