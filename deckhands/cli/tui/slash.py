"""The slash commands of `deckhands chat`: their names, a line about each, and how a typed line is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.runtime import UsageError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "help": ("", "lists these commands"),
    "status": ("", "shows the state, the model, tokens, cost and the workspace"),
    "cost": ("", "shows tokens and cost, by model"),
    "why": ("", "says why the conversation makes no progress"),
    "model": ("[NAME]", "shows the model, or continues with another one"),
    "image": ("PATH", "adds a picture to the next message"),
    "diff": ("", "shows the changes in the workspace"),
    "exec": ("COMMAND", "runs a command in the workspace, which the agent does not see; `!COMMAND` does the same"),
    "pause": ("", "starts nothing new"),
    "interrupt": ("", "stops what is running, and pauses; Ctrl-C does the same"),
    "resume": ("[ID]", "continues after a pause, or moves to another conversation"),
    "confirm": ("never|risky|always", "which actions you are asked about from now on"),
    "recover": ("wait|go-on|stop", "gets the agent out of a loop"),
    "fork": ("[EVENT]", "continues in a copy of the conversation up to an event"),
    "new": ("", "starts over with the next message"),
    "quit": ("", "leaves; the conversation stays, and `deckhands chat ID` continues it. Ctrl-D does the same"),
}
"""By name: the argument, and a description."""
OTHER_NAMES = {"exit": "quit", "q": "quit", "?": "help", "stop": "interrupt", "h": "help"}


@dataclass(frozen=True, slots=True)
class SlashInput:
    """A parsed input line.

    Attributes:
        command: one of `COMMANDS`; empty if the line is a message or an answer.
        text: the rest after the command, or the whole line.
    """

    command: str
    text: str


def parse_line(line: str) -> SlashInput:
    """Parse a line. A message may start with a slash if it is a path: `/etc/hosts`.

    Raises:
        UsageError: there is no such command.
    """
    text = line.strip()
    if text.startswith("!"):
        return SlashInput("exec", text[1:].strip())
    head, _, rest = text.partition(" ")
    name = head[1:].lower()
    if not text.startswith("/") or "/" in name or "\n" in head:
        return SlashInput("", text)
    name = OTHER_NAMES.get(name, name)
    if name not in COMMANDS:
        raise UsageError(f"There is no command {ascii(head)[1:-1][:60]}.", remedy="/help lists them.")
    return SlashInput(name, rest.strip())


def help_lines() -> list[str]:
    """Return the help: a line for each command, and the keys."""
    width = max(len(f"/{name} {follows}") for name, (follows, _) in COMMANDS.items())
    lines = [f"  {f'/{name} {follows}'.ljust(width)}  {what}" for name, (follows, what) in COMMANDS.items()]
    return [
        *lines,
        "  Enter sends, Alt-Enter starts another line, Up shows earlier input. Messages sent while the",
        "  agent works are read at its next step.",
    ]


YES = frozenset(("y", "yes", "ok"))
NO = frozenset(("n", "no"))


def parse_answer(text: str) -> tuple[bool, str]:
    """Parse an answer: whether an action may run, and the reason if not.

    Answers are `y`, `n`, `n because …`, or any other words, which reject the action with that reason.

    Raises:
        UsageError: the line is empty.
    """
    words = text.strip()
    if not words:
        raise UsageError("The answer is empty.", remedy="y runs it, n rejects it; other words reject it with a reason.")
    if words.lower() in YES:
        return True, ""
    if words.lower() in NO:
        return False, ""
    head, _, rest = words.partition(" ")
    return False, rest.strip() if head.lower().rstrip(",:") in NO else words
