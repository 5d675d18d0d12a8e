"""The dialogs of `top`: one asks for a line of text, the other for a confirmation."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static


class LineDialog(ModalScreen[str | None]):
    """Asks for a line of text; None if the user cancels."""

    DEFAULT_CSS = """
    LineDialog, ConfirmDialog { align: center middle; }
    LineDialog > Vertical, ConfirmDialog > Vertical { width: 80%; height: auto; border: round $accent; padding: 0 1; }
    """
    BINDINGS = [Binding("escape", "dismiss(None)", "Give up")]  # noqa: RUF012

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Lay out the question and the line."""
        with Vertical():
            yield Static(self._question, markup=False)
            yield Input()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Return the line."""
        event.stop()
        self.dismiss(event.value)


class ConfirmDialog(ModalScreen[bool]):
    """Asks for a confirmation."""

    BINDINGS = [  # noqa: RUF012
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,enter", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Lay out the question."""
        with Vertical():
            yield Static(f"{self._question} [y/N]", markup=False)
