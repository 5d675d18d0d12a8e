"""How commands are sent to a shell, and how the shell reports their start and end on its terminal.

A command goes to bash as one quoted word, so `eval` parses it and it can contain anything but NUL. Before and after it,
the shell prints marks with a secret number:

    RS nonce `<` RS                                                     start
    RS nonce `>` exit code US pid of the last background job US cwd US PATH RS    end

Holds: a program cannot fake the end of a command by its output; bytes that only resemble a mark are output.
"""

from __future__ import annotations

NONCE_BYTES = 32
FIELD_LIMIT = 4096
"""Maximum characters of the directory and of PATH in a mark."""

_RS = b"\x1e"


class CommandMark:
    """One mark; `fields` is None for the start of a command."""

    __slots__ = ("fields", "nonce")

    def __init__(self, nonce: bytes, fields: list[str] | None) -> None:
        self.nonce = nonce
        self.fields = fields


_MARK_LIMIT_BYTES = 16 * FIELD_LIMIT


class CommandEnd:
    """The end of a command; `background_pid` is -1 if the shell has no background job."""

    __slots__ = ("background_pid", "exit_code", "search_path", "working_dir")

    def __init__(self, fields: list[str]) -> None:
        # A directory name that contains our separators is reported wrongly, without other effects.
        exit_code, background_pid, self.working_dir, self.search_path = [*fields, "", ""][:4]
        self.exit_code = int(exit_code)
        self.background_pid = int(background_pid or -1)


class MarkScanner:
    """Splits terminal output into output and marks, wherever the chunks are cut."""

    def __init__(self) -> None:
        # Earlier nonces stay known, because a mark that was requested twice must not appear as output.
        self._nonces: list[bytes] = []
        self._held = b""

    def expect(self, nonce: bytes) -> None:
        """Register the nonce of the next command: 32 hexadecimal bytes."""
        self._nonces = [*self._nonces[-7:], nonce]

    def feed(self, chunk: bytes) -> list[bytes | CommandMark]:
        """Return the pieces that this chunk completes, in order; the start of a possible mark is held back."""
        stream = self._held + chunk
        self._held = b""
        pieces: list[bytes | CommandMark] = []
        output_from = 0
        position = stream.find(_RS)
        while position >= 0:
            nonce = stream[position + 1 : position + 1 + NONCE_BYTES]
            if not any(known.startswith(nonce) for known in self._nonces):
                position = stream.find(_RS, position + 1)
                continue
            end = stream.find(_RS, position + 1)
            if end < 0 and len(stream) - position > _MARK_LIMIT_BYTES:
                position = -1
                break
            if end < 0:
                self._held = stream[position:]
                break
            pieces.append(stream[output_from:position])
            rest = stream[position + 1 + NONCE_BYTES : end]
            is_start = rest == b"<"
            fields = None if is_start else rest[1:].decode("utf-8", "surrogateescape").split("\x1f")
            pieces.append(CommandMark(nonce, fields))
            output_from = end + 1
            position = stream.find(_RS, output_from)
        pieces.append(stream[output_from : position if position >= 0 else len(stream)])
        return [piece for piece in pieces if piece]


def start_line(
    nonce: str, command: str, terminal: str, *, previous_exit_code: int, environment: dict[str, str], cwd: str | None
) -> bytes:
    """Return the line that makes bash print the start mark and run the command; bash exits if it cannot print the mark.

    Bash reads these lines from a socket. Only the command uses the terminal, and its redirections of the standard
    descriptors end with it.
    """
    mark = f"\\builtin printf '\\036{nonce}<\\036' >{terminal} 2>/dev/null"
    variables = "".join(f"{name}={quote(value)} " for name, value in environment.items())
    # Both bypass functions of these names; `builtin` alone would not export the preceding variables.
    run = f"{variables}\\builtin command eval {quote(command)} <{terminal} >{terminal} 2>&1"
    if cwd is not None:
        run = f"{{ \\builtin cd -- {quote(cwd)} && {run}; }} >{terminal} 2>&1"
    # Printing the mark has reset `$?`. This list restores it without triggering `set -e`.
    restore = f"(\\builtin exit {previous_exit_code}) || " if previous_exit_code else ""
    return f"{mark} || \\exit; {restore}{run}\n".encode("utf-8", "replace")


def end_line(nonce: str, terminal: str) -> bytes:
    """Return the line that makes bash print the end mark; it survives an interrupt that discards the line before it.

    If the shell can no longer write the mark (its terminal, descriptors or rights are gone), it exits.
    """
    fields = '"$?" "${!-}" "${PWD-}" "${PATH-}"'
    form = f"\\036{nonce}>%s\\037%s\\037%.{FIELD_LIMIT}s\\037%.{FIELD_LIMIT}s\\036"
    return f"\\builtin printf '{form}' {fields} >{terminal} 2>/dev/null || \\exit\n".encode()


def quote(text: str) -> str:
    """Return the text as one quoted word of the shell."""
    return "'" + text.replace("'", "'\\''") + "'"
