r"""How a command is sent to a shell, and how the shell reports on its terminal that the command began and ended.

A command goes to bash as one quoted word, so it is parsed by `eval` and can contain anything but NUL. Around it the
shell prints marks that carry a number nobody else knows:

    RS nonce `<` RS                                                     it begins
    RS nonce `>` exit code US pid of the last background job US cwd US PATH RS    it has ended

Holds: a program cannot end a command by what it prints; bytes that only look like a mark are output.
"""

from __future__ import annotations

NONCE_BYTES = 32
FIELD_LIMIT = 4096
"""How much of the directory and of PATH a mark has at most."""

_RS = b"\x1e"


class Mark:
    """One mark: `fields` is None at the beginning of a command."""

    __slots__ = ("fields", "nonce")

    def __init__(self, nonce: bytes, fields: list[str] | None) -> None:
        self.nonce = nonce
        self.fields = fields


_MARK_LIMIT_BYTES = 16 * FIELD_LIMIT


class CommandEnd:
    """How a command ended: `background_pid` is -1 if the shell has none."""

    __slots__ = ("background_pid", "exit_code", "search_path", "working_dir")

    def __init__(self, fields: list[str]) -> None:
        # A directory's name may contain our separators; then its name is wrong and nothing else.
        exit_code, background_pid, self.working_dir, self.search_path = [*fields, "", ""][:4]
        self.exit_code = int(exit_code)
        self.background_pid = int(background_pid or -1)


class MarkScanner:
    """Splits terminal output into output and marks, however the chunks are cut."""

    def __init__(self) -> None:
        # Earlier numbers stay known: a mark that was asked for twice must not show up as output.
        self._nonces: list[bytes] = []
        self._held = b""

    def expect(self, nonce: bytes) -> None:
        """Know the number of the next command: 32 bytes, hexadecimal."""
        self._nonces = [*self._nonces[-7:], nonce]

    def feed(self, chunk: bytes) -> list[bytes | Mark]:
        """Return what this chunk brought, in order; the beginning of a possible mark is held back."""
        stream = self._held + chunk
        self._held = b""
        pieces: list[bytes | Mark] = []
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
            pieces.append(_mark(nonce, stream[position + 1 + NONCE_BYTES : end]))
            output_from = end + 1
            position = stream.find(_RS, output_from)
        pieces.append(stream[output_from : position if position >= 0 else len(stream)])
        return [piece for piece in pieces if piece]


def begin_line(
    nonce: str, command: str, terminal: str, *, previous_exit_code: int, environment: dict[str, str], cwd: str | None
) -> bytes:
    """Return the line that makes bash mark the beginning and run the command; it exits if it cannot mark it.

    Bash reads these lines from a socket; only the command has the terminal, and whatever the command does to its
    standard descriptors ends with it.
    """
    mark = f"\\builtin printf '\\036{nonce}<\\036' >{terminal} 2>/dev/null"
    variables = "".join(f"{name}={quoted(value)} " for name, value in environment.items())
    # Both keep functions of these names out of the way; `builtin` alone would not export the variables before it.
    run = f"{variables}\\builtin command eval {quoted(command)} <{terminal} >{terminal} 2>&1"
    if cwd is not None:
        run = f"{{ \\builtin cd -- {quoted(cwd)} && {run}; }} >{terminal} 2>&1"
    # The mark has reset $?. The list gives it back without tripping over `set -e`.
    restore = f"(\\builtin exit {previous_exit_code}) || " if previous_exit_code else ""
    return f"{mark} || \\exit; {restore}{run}\n".encode("utf-8", "replace")


def end_line(nonce: str, terminal: str) -> bytes:
    """Return the line that makes bash mark the end; it survives an interrupt that discards the line before it.

    A shell that cannot write there any more (its terminal, its descriptors or its rights are gone) exits instead.
    """
    fields = '"$?" "${!-}" "${PWD-}" "${PATH-}"'
    form = f"\\036{nonce}>%s\\037%s\\037%.{FIELD_LIMIT}s\\037%.{FIELD_LIMIT}s\\036"
    return f"\\builtin printf '{form}' {fields} >{terminal} 2>/dev/null || \\exit\n".encode()


def quoted(text: str) -> str:
    """Return the text as one word of the shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def _mark(nonce: bytes, rest: bytes) -> Mark:
    if rest == b"<":
        return Mark(nonce, None)
    return Mark(nonce, rest[1:].decode("utf-8", "surrogateescape").split("\x1f"))
