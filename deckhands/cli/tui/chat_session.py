"""A conversation in which a user and an agent take turns at a terminal.

Holds: a message is sent as soon as it is typed, even while the agent works; an answer applies only to the displayed
action.
Does not: end the conversation with the chat.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from broker.contract import ConfirmationPolicy, Event, ModelReply, RiskyAction, asks_for_server
from broker.coordination import TransferFailed
from broker.log import LivePiece, LiveText
from broker.runtime import SYSTEM_CLOCK, DeckhandsError, EventsLost, StoreError, UsageError, new_conversation_id
from deckhands.cli.commands.control import WAYS
from deckhands.cli.commands.why import lines_of
from deckhands.cli.screen_printer import ScreenPrinter
from deckhands.cli.tui.places import ChatPlace
from deckhands.cli.tui.prompt import InputPrompt
from deckhands.cli.tui.slash import SlashInput, help_lines, parse_answer, parse_line
from deckhands.client import Change, ScreenRenderer, Summary, clean, clean_line, render_summary

OLD_EVENTS_SHOWN = 60
NEW_EVENTS = 2
"""How many events a new conversation has."""
QUESTION = "Run it? [y/n, or why not]"
REST_LIMIT_SECONDS = 15.0
LOOK_SECONDS = 0.05
OWN_DIFF = "git --no-pager diff HEAD --"
MODES = ("never", "risky", "always")
COST_FACTS = ("Model", "Iterations", "Tokens", "Cost", "Delegates", "Latency")
STATUS_FACTS = ("State", "Conversation", "Title", "Workspace", "Sandbox", "Duration", *COST_FACTS)


class Chat:
    """One chat at a place."""

    def __init__(self, place: ChatPlace, prompt: InputPrompt, printer: ScreenPrinter) -> None:
        self._place = place
        self._prompt = prompt
        self._printer = printer
        self._following: list[asyncio.Task[None]] = []
        self._live = LiveText(place.client.store, place.conversation_id or new_conversation_id())
        self._actions: dict[int, RiskyAction] = {}
        self._shown_question = 0
        self._is_leaving = self._is_warned = False
        self._commands: Mapping[str, Callable[[str], Awaitable[None]]] = {
            "help": self._help,
            "status": self._status,
            "cost": self._cost,
            "why": self._why,
            "model": self._model,
            "image": self._image,
            "diff": self._diff,
            "exec": self._exec,
            "pause": self._pause,
            "interrupt": self._interrupt,
            "resume": self._resume,
            "confirm": self._confirm,
            "recover": self._recover,
            "fork": self._fork,
            "new": self._new,
            "quit": self._quit,
        }

    @property
    def asked(self) -> RiskyAction | None:
        """The displayed action that the user is asked to confirm; None if there is none."""
        asked_id = self._printer.status.tally.status.confirmation_id
        return self._actions.get(asked_id) if asked_id is not None and asked_id == self._shown_question else None

    @property
    def is_working(self) -> bool:
        """Whether the agent is working."""
        tally = self._printer.status.tally
        return bool(self._place.conversation_id) and not (tally.last_event_id and tally.status.is_settled)

    async def run(self) -> Summary | None:
        """Take turns until the user leaves. Returns the summary, or None if no conversation was started."""
        if self._place.conversation_id:
            self._follow()
        try:
            while not self._is_leaving:
                await self._turn()
            await self._rest()
        finally:
            await self._unfollow()
        return self._printer.status.summary

    async def _rest(self) -> None:
        """Stop a private agent gracefully before its workers end, and read the events that follow."""
        name, client = self._place.conversation_id, self._place.client
        if not (self._place.is_private and name):
            return
        with contextlib.suppress(DeckhandsError, TimeoutError):
            async with asyncio.timeout(REST_LIMIT_SECONDS):
                if self.is_working:
                    await client.pause(name)
                    await client.wait_until_settled(name)
                while self._printer.status.tally.last_event_id < await client.log.load_last_id(name):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)

    async def _turn(self) -> None:
        try:
            line = await self._prompt.line()
        except EOFError:
            self._is_leaving = True
            return
        except KeyboardInterrupt:
            await self._stop_or_warn()
            return
        self._is_warned = False
        try:
            typed = parse_line(line)
            if typed.command:
                await self._commands[typed.command](typed.text)
            else:
                await self._say(typed)
        except DeckhandsError as error:
            self._notify(error.message, error.remedy)

    async def _stop_or_warn(self) -> None:
        """Stop the running work; if there is none, leave at the second Ctrl-C."""
        if self.is_working and not self._is_warned:
            with contextlib.suppress(DeckhandsError):
                await self._place.client.interrupt(self._place.conversation_id)
                self._notify("Interrupted. Say what to do instead, or /resume.")
        elif self._is_warned:
            self._is_leaving = True
        else:
            self._notify("Press Ctrl-C again to leave, or type /quit.")
        self._is_warned = True

    async def _say(self, typed: SlashInput) -> None:
        if (asked := self.asked) is not None:
            agrees, reason = parse_answer(typed.text)
            client, name = self._place.client, self._place.conversation_id
            if agrees and asks_for_server(asked):
                self._notify(
                    "A bare y does not answer an MCP server.",
                    f"Run `deckhands confirm {name} --edit answers='{{}}'` with the values of its fields, or type n.",
                )
            elif agrees:
                await client.confirm(name, action_id=asked.id)
            else:
                await client.reject(name, reason=reason, action_id=asked.id)
        elif not typed.text:
            return
        elif self._place.conversation_id:
            await self._place.send(typed.text)
        else:
            await self._place.start(typed.text)
            self._notify(f"Conversation {self._place.conversation_id}")
            self._follow()

    # Updates from the conversation.

    def _follow(self) -> None:
        self._live = LiveText(self._place.client.store, self._place.conversation_id)
        self._following = [asyncio.ensure_future(self._events())]

    async def _unfollow(self) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        self._following = []

    async def _events(self) -> None:
        name = self._place.conversation_id
        after = 0
        try:
            last = await self._place.client.log.load_last_id(name)
            if last > NEW_EVENTS:
                await self._live.read_rest()  # earlier pieces are skipped: their replies arrive as events
            self._following.append(asyncio.ensure_future(self._pieces()))
            while True:
                try:
                    tail = self._place.client.tail(name, after=after, is_whole=True, is_endless=True)
                    async with contextlib.aclosing(tail) as events:
                        async for event in events:
                            after = event.id
                            await self._fold(event, is_old=event.id <= last - OLD_EVENTS_SHOWN)
                except EventsLost as lost:
                    after = lost.last_id
        except DeckhandsError as error:
            self._notify(error.message, error.remedy)

    async def _fold(self, event: Event, *, is_old: bool) -> None:
        self._place.record(event)
        if isinstance(event, ModelReply):  # all pieces of a reply arrive before the events that follow from it
            with contextlib.suppress(StoreError):
                for piece in await self._live.read_rest():
                    self._write(piece)
        if isinstance(event, RiskyAction):
            self._actions = {event.id: event, **dict(list(self._actions.items())[:20])}
        if is_old:
            self._printer.status.add(event)
            return
        self._printer.event(event)
        asked_id = self._printer.status.tally.status.confirmation_id
        if asked_id is not None and asked_id != self._shown_question and (action := self._actions.get(asked_id)):
            self._prompt.above(["", *ScreenRenderer().render_question(action)])
            self._shown_question = asked_id
            self._prompt.show([])

    async def _pieces(self) -> None:
        with contextlib.suppress(StoreError):
            async with contextlib.aclosing(self._live.watch()) as pieces:
                async for piece in pieces:
                    self._write(piece)

    def _write(self, piece: LivePiece) -> None:
        if piece.kind != "call":  # which the event of its action shows
            self._printer.piece(piece)

    # The commands.

    def _notify(self, *texts: str) -> None:
        self._prompt.above([f"\x1b[2m{clean_line(text, limit=1_000)}\x1b[0m" for text in texts if text])

    def _name(self) -> str:
        if not self._place.conversation_id:
            raise UsageError("There is no conversation yet.", remedy="Your first message starts one.")
        return self._place.conversation_id

    async def _help(self, _: str) -> None:
        self._prompt.above(help_lines())

    async def _facts(self, wanted: tuple[str, ...]) -> None:
        self._name()
        summary = self._printer.status.summary
        lines = render_summary(summary) if summary is not None else []
        self._prompt.above([line for line in lines if line.partition(":")[0] in wanted])

    async def _status(self, _: str) -> None:
        await self._facts(STATUS_FACTS)

    async def _cost(self, _: str) -> None:
        await self._facts(("Models", *COST_FACTS))

    async def _why(self, _: str) -> None:
        self._prompt.above(clean(line) for line in lines_of(await self._place.client.why(self._name())))

    async def _model(self, name: str) -> None:
        if not name:
            await self._facts(("Model", "Models"))
            return
        await self._place.client.change(self._name(), Change(), model=name)
        self._notify(f"The next step uses {name}.")

    async def _image(self, path: str) -> None:
        if not path:
            raise UsageError("No picture is named.", remedy="Type /image PATH.")
        from deckhands.client import to_image_urls

        # refuses anything that is not a picture before the user types on
        await asyncio.to_thread(to_image_urls, [path])
        self._place.images.append(path)
        self._notify(f"{path} goes with the next message.")

    async def _diff(self, _: str) -> None:
        name = self._name()
        client = self._place.client
        try:
            patch = await client.files.diff(name)
        except TransferFailed:  # the user's own directory: only its version control knows its original state
            await client.execute(name, OWN_DIFF)
            return
        text = patch.decode("utf-8", "backslashreplace")
        self._prompt.above(ScreenRenderer().diff(text) if text else ["Nothing was changed."])

    async def _exec(self, command: str) -> None:
        if not command:
            raise UsageError("No command is given.", remedy="Type !COMMAND.")
        await self._place.client.execute(self._name(), command)  # its events are printed like all others

    async def _pause(self, _: str) -> None:
        await self._place.client.pause(self._name())

    async def _interrupt(self, _: str) -> None:
        await self._place.client.interrupt(self._name())

    async def _resume(self, other: str) -> None:
        if not other:
            await self._place.client.resume(self._name())
            return
        if self._place.is_private:
            raise UsageError("This chat has a private store.", remedy=f"`deckhands chat {other}` opens another one.")
        await self._place.client.log.load_last_id(other)
        await self._move_to(other)

    async def _confirm(self, mode: str) -> None:
        if mode not in MODES:
            raise UsageError(f"There is no confirmation mode {ascii(mode)[:60]}.", remedy=f"Known: {', '.join(MODES)}.")
        policy = ConfirmationPolicy.model_validate({"mode": mode})
        await self._place.client.change(self._name(), Change(confirmation=policy))
        self._notify(f"You are asked about actions: {mode}.")

    async def _recover(self, way: str) -> None:
        if way not in WAYS:
            raise UsageError(f"{ascii(way)[:60]} is not a way out of a loop.", remedy=f"Known: {', '.join(WAYS)}.")
        await self._place.client.recover(self._name(), option=WAYS[way])

    async def _fork(self, text: str) -> None:
        name = self._name()
        if self._place.is_private:
            raise UsageError("A private store has one conversation.", remedy="Use `deckhands chat --cluster` to fork.")
        if text and not text.isdigit():
            raise UsageError(f"{ascii(text)[:60]} is not an event.", remedy="Type /fork 12.")
        await self._move_to(await self._place.client.fork(name, at=int(text) if text else None))

    async def _new(self, _: str) -> None:
        if self._place.is_private and self._place.conversation_id:
            raise UsageError("A private store has one conversation.", remedy="Leave by /quit, and start another chat.")
        await self._move_to("")

    async def _move_to(self, name: str) -> None:
        await self._unfollow()
        self._printer.forget()
        self._actions = {}
        self._shown_question = 0
        self._place.conversation_id = name
        if name:
            self._notify(f"Conversation {name}")
            self._follow()
        else:
            self._notify("The next message starts another conversation.")

    async def _quit(self, _: str) -> None:
        self._is_leaving = True

    def status(self) -> str:
        """Return the status line."""
        if not self._place.conversation_id:
            return "type a task · /help"
        pictures = f"{len(self._place.images)} pictures · " if self._place.images else ""
        return pictures + self._printer.status.line(SYSTEM_CLOCK.now(), turn=int(SYSTEM_CLOCK.monotonic() * 2))

    def question(self) -> str:
        """Return the question that the line answers; empty if the line is a message."""
        return QUESTION if self.asked is not None else ""
