"""The screen of one conversation in `top`: its facts, why it waits, its question, and its latest events, live."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Footer, RichLog, Static

from broker.contract import Event, RiskyAction, asks_for_server
from broker.runtime import SYSTEM_CLOCK, CorruptEntry, DeckhandsError, StoreError
from deckhands.cli.commands.why import lines_of
from deckhands.cli.tui.actions import run_action, run_with_notice
from deckhands.cli.tui.dialogs import ConfirmDialog, LineDialog
from deckhands.client import Client, ScreenRenderer, StatusLine, clean_line

EVENTS_SHOWN = 200
LOOK_SECONDS = 1.0
WHY_EVERY = 3
WHY_LINES = 8


class OneConversation(Screen[None]):
    """The screen of one conversation."""

    DEFAULT_CSS = """
    OneConversation #facts { height: auto; max-height: 3; color: $text; background: $panel; padding: 0 1; }
    OneConversation #why { height: auto; max-height: 10; padding: 0 1; }
    OneConversation #asked { height: auto; max-height: 12; padding: 0 1; color: $warning; }
    OneConversation RichLog { height: 1fr; padding: 0 1; }
    """
    BINDINGS = [  # noqa: RUF012
        Binding("escape,q,left", "app.pop_screen", "Back"),
        Binding("p", "do('pause')", "Pause"),
        Binding("i", "do('interrupt')", "Interrupt"),
        Binding("r", "do('resume')", "Resume"),
        Binding("x", "cancel", "Cancel"),
        Binding("y", "confirm", "Confirm"),
        Binding("n", "reject", "Reject"),
        Binding("m", "message", "Message"),
        Binding("R", "do('requeue')", "Requeue"),
    ]

    def __init__(self, client: Client, conversation_id: str) -> None:
        super().__init__()
        self._client = client
        self._conversation_id = conversation_id
        self._standing = StatusLine()
        self._renderer = ScreenRenderer()
        self._looks = 0
        self._asked: RiskyAction | None = None
        self._last_actions: dict[int, RiskyAction] = {}

    def compose(self) -> ComposeResult:
        """Lay out facts, reasons, the question and the events."""
        yield Static(id="facts", markup=False)
        yield Static(id="why", markup=False)
        yield Static(id="asked", markup=False)
        yield RichLog(wrap=True, max_lines=10_000)
        yield Footer()

    def on_mount(self) -> None:
        """Read the conversation now, and then periodically."""
        self.query_one(RichLog).focus()
        self.set_interval(LOOK_SECONDS, self._poll)
        self._poll()

    def _poll(self) -> None:
        self.run_worker(self._refresh(), exclusive=True, group="look", exit_on_error=False)

    async def _refresh(self) -> None:
        try:
            after = self._standing.tally.last_event_id
            events = await self._client.events(self._conversation_id, after=after, is_lenient=True)
            if not after and len(events) > EVENTS_SHOWN:
                notice = (
                    f"… {len(events) - EVENTS_SHOWN:,} earlier events; "
                    f"`deckhands logs {self._conversation_id}` shows them …"
                )
                self.query_one(RichLog).write(Text(clean_line(notice, limit=500), style="dim"))
            for number, event in enumerate(events):
                self._fold(event, is_shown=after > 0 or number >= len(events) - EVENTS_SHOWN)
            self._show_facts()
            self._show_question()
            if events or self._looks % WHY_EVERY == 0:
                found = await self._client.why(self._conversation_id)
                lines = lines_of(found)
                more = [f"… `deckhands why {self._conversation_id}` says more"] if len(lines) > WHY_LINES else []
                self.query_one("#why", Static).update("\n".join([*lines[:WHY_LINES], *more]))
            self._looks += 1
        except (StoreError, CorruptEntry, DeckhandsError) as error:
            self.query_one("#facts", Static).update(clean_line(error.message, limit=500))

    def _fold(self, event: Event, *, is_shown: bool) -> None:
        self._standing.add(event)
        if isinstance(event, RiskyAction):
            self._last_actions = {event.id: event, **dict(list(self._last_actions.items())[:20])}
        lines = self._renderer.lines(event) if is_shown else []
        if lines:
            self.query_one(RichLog).write(Text.from_ansi("\n".join(lines)))

    def _show_facts(self) -> None:
        summary = self._standing.summary
        if summary is None:
            return
        parts = [self._conversation_id, summary.model, summary.agent, summary.workspace or "", summary.title]
        first = "  ".join(clean_line(part) for part in parts if part)
        self.query_one("#facts", Static).update(f"{first}\n{self._standing.line(SYSTEM_CLOCK.now(), turn=self._looks)}")

    def _show_question(self) -> None:
        asked_id = self._standing.tally.status.confirmation_id
        self._asked = self._last_actions.get(asked_id) if asked_id is not None else None
        lines = self._renderer.render_question(self._asked) if self._asked is not None else []
        hint = ["y runs it, n refuses it"] if lines else []
        self.query_one("#asked", Static).update(Text.from_ansi("\n".join([*lines, *hint])))

    async def action_do(self, name: str) -> None:
        """Perform an action on the conversation."""
        self.notify(clean_line(await run_action(self._client, name, self._conversation_id), limit=500), markup=False)

    def action_cancel(self) -> None:
        """Stop the conversation after a confirmation."""
        self._ask_to_cancel()

    def _ask_to_cancel(self) -> None:
        async def answer(is_sure: bool | None) -> None:
            if is_sure:
                await self.action_do("cancel")

        self.app.push_screen(ConfirmDialog(f"Stop {self._conversation_id} and its running work?"), answer)

    async def action_confirm(self) -> None:
        """Run the displayed action."""
        if self._asked is None:
            self.notify("No action awaits confirmation.", markup=False)
            return
        if asks_for_server(self._asked):
            text = f"Answer the server by `deckhands confirm {self._conversation_id} --edit answers=...`, or reject."
            self.notify(clean_line(text, limit=500), markup=False)
            return
        work = self._client.confirm(self._conversation_id, action_id=self._asked.id)
        self.notify(clean_line(await run_with_notice(work, "The action runs."), limit=500), markup=False)

    def action_reject(self) -> None:
        """Reject the displayed action, with a reason."""
        asked = self._asked
        if asked is None:
            self.notify("No action awaits confirmation.", markup=False)
            return

        async def answer(reason: str | None) -> None:
            if reason is not None:
                work = self._client.reject(self._conversation_id, reason=reason, action_id=asked.id)
                self.notify(
                    clean_line(await run_with_notice(work, "The action was rejected."), limit=500), markup=False
                )

        question = "Why not? The agent reads it and continues; without a reason it waits for a message."
        self.app.push_screen(LineDialog(question), answer)

    def action_message(self) -> None:
        """Send a message."""

        async def answer(text: str | None) -> None:
            if text:
                work = self._client.send_message(self._conversation_id, text)
                self.notify(clean_line(await run_with_notice(work, "The message was sent."), limit=500), markup=False)

        self.app.push_screen(LineDialog(f"Message to {self._conversation_id}:"), answer)
