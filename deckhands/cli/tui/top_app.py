"""`deckhands top` as a textual app: the cluster in the head, the conversations below, keys for actions.

Holds: the store is read once a second, for a bounded number of conversations; see `conversation_cache`.
"""

from __future__ import annotations

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, HelpPanel, Input, Static

from broker.runtime import SYSTEM_CLOCK, DeckhandsError, StoreError, format_count
from deckhands.cli.tui.actions import run_action
from deckhands.cli.tui.conversation_cache import SORTS, ConversationCache, arrange
from deckhands.cli.tui.conversation_list import ConversationList, heading
from deckhands.cli.tui.dialogs import ConfirmDialog
from deckhands.cli.tui.one_conversation import OneConversation
from deckhands.cli.tui.overview import ClusterOverview, cluster_lines, conversation_line, queue_line, worker_line
from deckhands.client import Client, clean_line

LOOK_SECONDS = 1.0
OVERVIEW_EVERY = 2
"""Workers and queues are read once in this many refreshes."""


class ClusterScreen(Screen[None]):
    """Every worker and every queue."""

    BINDINGS = [Binding("escape,q,c,left", "app.pop_screen", "Back")]  # noqa: RUF012

    def __init__(self, overview: ClusterOverview) -> None:
        super().__init__()
        self._overview = overview

    def compose(self) -> ComposeResult:
        """Lay out the lines."""
        with VerticalScroll():
            yield Static(id="cluster", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Show the last reading of the list's head."""
        self.set_interval(LOOK_SECONDS, self._show)
        self._show()

    def _show(self) -> None:
        self.query_one("#cluster", Static).update("\n".join(cluster_lines(self._overview.facts)))


class Top(App[None]):
    """The app."""

    CSS = """
    #head { height: auto; background: $panel; padding: 0 1; }
    #heading { height: 1; text-style: bold; }
    #filter { display: none; height: 3; }
    ConversationList { height: 1fr; }
    """
    BINDINGS = [  # noqa: RUF012
        Binding("question_mark", "toggle_help", "Keys"),
        Binding("q", "quit", "Quit"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "unfilter", "All", show=False),
        Binding("s", "sort", "Sort"),
        Binding("S", "turn", "Turn round"),
        Binding("c", "cluster", "Cluster"),
        Binding("p", "do('pause')", "Pause"),
        Binding("r", "do('resume')", "Resume"),
        Binding("x", "cancel", "Cancel"),
        Binding("R", "do('requeue')", "Requeue"),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "deckhands top"

    def __init__(self, client: Client, *, words: str = "", by: str = "updated") -> None:
        super().__init__()
        self.animation_level = "none"
        self._client = client
        self._cache = ConversationCache(client.store)
        self._overview = ClusterOverview(client.store)
        self._words = words
        self._by = by
        self._is_turned = False
        self._looks = 0
        self._is_loaded = False
        self._trouble = ""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Return whether a key works here: the keys of the list work only on the list."""
        if action == "toggle_help":
            return not isinstance(self.screen, ModalScreen)
        is_ours = any(isinstance(key, Binding) and key.action.partition("(")[0] == action for key in self.BINDINGS)
        return not is_ours or len(self.screen_stack) == 1

    def action_toggle_help(self) -> None:
        """Show all keys of this screen beside it, or hide them."""
        if self.screen.query(HelpPanel):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()

    def compose(self) -> ComposeResult:
        """Lay out the head, the filter and the list."""
        yield Static(id="head", markup=False)
        yield Input(id="filter", placeholder="words that must all match; -word excludes")
        yield Static(id="heading", markup=False)
        yield ConversationList()
        yield Footer()

    def on_mount(self) -> None:
        """Read everything once, then refresh periodically."""
        self.query_one(ConversationList).focus()
        self.run_worker(self._load(), group="load", exit_on_error=False)
        self.set_interval(LOOK_SECONDS, self._poll)

    async def _load(self) -> None:
        try:
            await self._overview.refresh()
            async for _ in self._cache.load():
                self._arrange()
        except StoreError as error:
            self._trouble = error.message
        self._is_loaded = True
        self._arrange()

    def _poll(self) -> None:
        if (self._is_loaded and isinstance(self.screen, ClusterScreen)) or len(self.screen_stack) == 1:
            self.run_worker(self._refresh(), exclusive=True, group="look", exit_on_error=False)

    async def _refresh(self) -> None:
        if not self._is_loaded:
            return
        self._looks += 1
        try:
            if self._looks % OVERVIEW_EVERY == 0:
                await self._overview.refresh()
            has_changed = await self._cache.refresh(self._list.seen, self._overview.facts.controllers)
            self._trouble = ""
        except DeckhandsError as error:
            has_changed = False
            self._trouble = error.message
        if has_changed:
            self._arrange()
        else:
            self._show_head()
            self._list.refresh()

    @property
    def _list(self) -> ConversationList:
        return self.screen_stack[0].query_one(ConversationList)

    def _arrange(self) -> None:
        rows = arrange(self._cache.rows.values(), by=self._by, is_turned=self._is_turned, words=self._words)
        self._list.put(rows)
        self._show_head()

    def _show_head(self) -> None:
        facts = self._overview.facts
        found = self._list.rows
        now = f"{SYSTEM_CLOCK.now():%H:%M:%S} UTC"
        lines = [conversation_line(self._cache.rows.values(), facts), worker_line(facts), queue_line(facts)]
        if self._words:
            lines.append(
                f"Filter: {clean_line(self._words)} · {format_count(len(found), 'conversation')} · Esc shows all"
            )
        state = "" if self._is_loaded else "reading … · "
        trouble = f" · {clean_line(self._trouble, limit=300)}" if self._trouble else ""
        main = self.screen_stack[0]
        main.query_one("#head", Static).update("\n".join([f"{state}{now}{trouble}", *lines]))
        columns = self._list.size.width or self.size.width
        main.query_one("#heading", Static).update(heading(columns, by=self._by, is_turned=self._is_turned))

    def on_resize(self) -> None:
        """Fit the heading to the new width."""
        self._show_head()

    def on_conversation_list_opened(self, event: ConversationList.Opened) -> None:
        """Open the screen of a conversation."""
        self.push_screen(OneConversation(self._client, event.conversation_id))

    def action_filter(self) -> None:
        """Ask for the words of a filter."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.value = self._words
        self.screen.set_focus(field)  # at once: the next key belongs there

    def action_unfilter(self) -> None:
        """Show all conversations again."""
        self._words = ""
        self._hide_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the words are typed."""
        if event.input.id == "filter":  # other screens have input lines too
            self._words = event.value
            self._arrange()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter and return to the list."""
        if event.input.id == "filter":
            self._hide_filter()

    def _hide_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.screen.set_focus(self._list)
        self._arrange()

    def action_sort(self) -> None:
        """Sort by the next column."""
        names = list(SORTS)
        self._by = names[(names.index(self._by) + 1) % len(names)]
        self._arrange()

    def action_turn(self) -> None:
        """Reverse the order."""
        self._is_turned = not self._is_turned
        self._arrange()

    def action_cluster(self) -> None:
        """Show every worker and every queue."""
        self.push_screen(ClusterScreen(self._overview))

    async def action_do(self, name: str) -> None:
        """Perform an action on the conversation under the cursor."""
        if (row := self._list.chosen) is not None:
            self.notify(clean_line(await run_action(self._client, name, row.conversation_id), limit=500), markup=False)

    def action_cancel(self) -> None:
        """Stop the conversation under the cursor after a confirmation."""
        row = self._list.chosen
        if row is None:
            return

        async def answer(is_sure: bool | None) -> None:
            if is_sure:
                said = await run_action(self._client, "cancel", row.conversation_id)
                self.notify(clean_line(said, limit=500), markup=False)

        self.push_screen(ConfirmDialog(f"Stop {row.conversation_id} ({row.title}) and its running work?"), answer)
