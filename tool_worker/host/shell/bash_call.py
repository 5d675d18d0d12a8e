"""The validated arguments of the tool `bash`."""

from __future__ import annotations

COMMAND_LIMIT_BYTES = 4 * 2**20
NAME_LIMIT_CHARS = 32
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
LIST, KILL, RESET = "list", "kill", "reset"
CONTROLS = ("", LIST, KILL, RESET)


class BashCallError(Exception):
    """Arguments are not valid; nothing was started."""


class BashCall:
    """One call.

    Args:
        command: The command to run. With `is_input`, the text to type for the running program, followed by Enter; a
            single line break is Enter alone, and `C-c` and similar texts are keys. Empty: wait for more output.
        timeout: Maximum seconds until the call is answered; None: no limit.
        blocking: Whether to ignore `no_change_timeout`.
        no_change_timeout: Seconds of silence after which the call is answered.
        cwd: The directory of the command; None: the shell's current one.
        is_static: Whether to run the command in a separate shell that ends with it.
        env: Variables for this command only.
        terminal: The name of the shell; empty: the conversation's main shell.
        is_background: Whether to answer soon, while the command runs.
        control: Instead of a command: `list` the terminals, `kill` this one, or `reset` it.

    Raises:
        BashCallError: a value has the wrong type, or bash cannot process it.
    """

    def __init__(
        self,
        command: object,
        *,
        is_input: object = False,
        timeout: object = None,
        blocking: object = False,
        no_change_timeout: object,
        cwd: object = None,
        is_static: object = False,
        env: object = None,
        terminal: object = "",
        is_background: object = False,
        control: object = "",
    ) -> None:
        self.terminal = _text("terminal", terminal)
        if self.terminal and not (len(self.terminal) <= NAME_LIMIT_CHARS and set(self.terminal) <= NAME_CHARS):
            raise BashCallError(f"`terminal` is a name of up to {NAME_LIMIT_CHARS} letters, digits, `-`, `_` and `.`")
        self.is_background = bool(is_background)
        self.control = _text("control", control)
        if self.control not in CONTROLS:
            raise BashCallError(f"`control` is one of {', '.join(CONTROLS[1:])}")
        # Differs: OpenHands strips input too, which destroys the indentation for a program that reads Python.
        self.command = _text("command", command) if is_input else _text("command", command).strip()
        if len(self.command.encode("utf-8", "replace")) > COMMAND_LIMIT_BYTES:
            raise BashCallError(f"`command` may have {COMMAND_LIMIT_BYTES} bytes")
        self.is_input = bool(is_input)
        self.timeout = None if timeout is None else _seconds("timeout", timeout)
        self.no_change_timeout = None if blocking else _seconds("no_change_timeout", no_change_timeout)
        self.cwd = None if cwd is None else _text("cwd", cwd)
        self.is_static = bool(is_static)
        self.is_brief = False
        self.env = _variables(env or {})

    def answer_within(self, seconds: float) -> None:
        """Answer the call after this time at the latest, with the output up to then."""
        self.no_change_timeout = None
        self.timeout = seconds
        self.is_brief = True

    @property
    def key(self) -> str | None:
        """The key of an input such as `C-c`; None for other input."""
        typed = self.command.strip()
        is_key = self.is_input and len(typed) == 3 and typed.startswith("C-")
        return typed[2].upper() if is_key else None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise BashCallError(f"`{name}` is not a text")
    if "\0" in value:
        raise BashCallError(f"`{name}` has a NUL character, which a shell cannot take")
    return value


def _seconds(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise BashCallError(f"`{name}` is not a number of seconds above 0")
    return value


def _variables(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise BashCallError("`env` is not an object")
    for name in value:
        if not (name.isascii() and name.isidentifier()):
            raise BashCallError(f"`env` has a name that no variable can have: {name!r}")
    return {name: _text(f"env.{name}", text) for name, text in value.items()}
