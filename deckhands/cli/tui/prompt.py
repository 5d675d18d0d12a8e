"""The input line of `deckhands chat`, with the output above it and the status below it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

from deckhands.cli.tui.slash import COMMANDS
from deckhands.client import clean_line, draw

REDRAW_SECONDS = 0.5
STYLE = Style.from_dict({"bottom-toolbar": "noreverse dim", "asked": "ansiyellow bold", "mark": "ansicyan bold"})
HISTORY = "chat_history"


class SlashCompleter(Completer):
    """Completes slash commands, and paths after commands that take one."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Yield the possible completions."""
        text = document.text_before_cursor
        if text.startswith("/image "):
            path = Document(text.removeprefix("/image "))
            yield from self._paths.get_completions(path, complete_event)
        elif text.startswith("/") and " " not in text:
            for name, (_, what) in COMMANDS.items():
                if name.startswith(text[1:].lower()):
                    yield Completion(f"/{name}", -len(text), display_meta=what)


class InputPrompt:
    """Reads one line after another.

    Args:
        home: the directory of the history file.

    Attributes:
        question: shown before the line: empty, or the question that the line answers.
        status: the status line.
    """

    def __init__(self, home: Path) -> None:
        self.question: Callable[[], str] = str
        self.status: Callable[[], str] = str
        self._writing = ""
        self._session: PromptSession[str] = PromptSession(
            history=_history(home),
            completer=SlashCompleter(),
            complete_while_typing=True,
            key_bindings=_keys(),
            bottom_toolbar=self._below,
            refresh_interval=REDRAW_SECONDS,
            style=STYLE,
            prompt_continuation="  ",
            enable_suspend=True,
        )

    async def line(self) -> str:
        """Return the next line.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C.
            EOFError: the user pressed Ctrl-D, or left.
        """
        return await self._session.prompt_async(self._before, handle_sigint=False)

    def leave(self) -> None:
        """Stop waiting for a line."""
        if self._session.app.is_running:
            self._session.app.exit(exception=EOFError)

    def show(self, lines: Sequence[str]) -> None:
        """Show the model's current output above the line; the last line is the status, shown below."""
        self._writing = clean_line(lines[0], limit=1_000) if len(lines) > 1 else ""
        if self._session.app.is_running:
            self._session.app.invalidate()

    def above(self, lines: Iterable[str]) -> None:
        """Print lines above; they are cleaned except for our own colours."""
        if text := "".join(f"{line}\n" for line in lines):
            draw(text)

    def hide(self) -> None:
        """Do nothing, because the input line never moves."""

    unhide = close = hide

    def _before(self) -> StyleAndTextTuples:
        columns = self._session.app.output.get_size().columns
        parts: StyleAndTextTuples = [("", f"{self._writing[-columns + 1 :]}\n")] if self._writing else []
        if question := self.question():
            parts.append(("class:asked", f"{question} "))
        parts.append(("class:mark", "> "))
        return parts

    def _below(self) -> StyleAndTextTuples:
        return [("", clean_line(self.status(), limit=max(1, self._session.app.output.get_size().columns - 1)))]


def _history(home: Path) -> History:
    path = home / HISTORY
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
