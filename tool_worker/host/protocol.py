r"""The protocol between a tool worker and a workspace host: one JSON object per line, over a unix socket.

Every request has a `request` number, which its reply repeats; replies come in any order. The reply to a refused request
is `{"request", "error": {"code", "message", "retryable"}}`; a refused request has started nothing.

    {"op": "run", "request", "action_id", "fingerprint", "tool", "arguments", "may_repeat"}
        Runs the action, attaches to it if it is running, or returns its recorded result. `may_repeat` (default false):
        start an action again if its outcome is unknown.
        → {"state": "recorded", "is_replayed", "result"} when it has ended
        → {"state": "unknown"} if an earlier host started it and died, and `may_repeat` is false
        → {"state": "other"} if an action with another fingerprint was started under this number; nothing is started
    {"op": "status", "request", "action_id", "fingerprint"}
        → {"state": "recorded" | "running" | "unknown" | "never_started" | "other", "is_certain", "result"?};
        `is_certain` is false if the machine was rebooted since the start of the journal: then "never_started" proves
        nothing
    {"op": "interrupt", "request", "action_id"}
        Stops the action within a second; null: the command in the shell. Its `run` requests get the result as usual.
        → {"was_running"}
    {"op": "ping", "request"}
        → {"protocol", "workspace", "running": [action ids], "newest", "is_shell_busy", "has_egress"}; a shell
        is also busy with a command whose call was answered on a timeout; `newest` is null, or the highest number of an
        action that was ever started, and its fingerprint
    {"op": "terminal", "request", "what": "open", "columns", "rows"}
        Starts a shell for an operator, on a separate pseudo-terminal. It ends with the connection.
        → {"terminal"}, its number
    {"op": "terminal", "request", "what": "read", "terminal"}
        → {"output", "exit_code"} once there is output, in base64; `exit_code` is null until the shell has ended
    {"op": "terminal", "request", "what": "write" | "resize" | "close", "terminal", "input"?, "columns"?, "rows"?}
        Sends input (in base64), sets the size, or ends the shell.
        → {}
    {"op": "egress", "request"}
        Lends the listening socket for the workspace's programs to the egress proxy that sends this request.
        → {}, with the listening socket beside it
    {"op": "refused", "why"}
        Adds a refusal of the proxy to the next result; there is no reply.
    {"op": "close", "request"}
        → {"closing": true}; then the host ends, with everything it started
    {"op": "retire", "request", "may_kill"}
        Ends the host if no action is in progress and nothing runs but an idle shell; with `may_kill` also if background
        jobs run.
        → {"closing"}

Tools and their `arguments`:
    bash    command, is_input=false, timeout=null (seconds; the hard limit), blocking=false (no limit on silence),
            no_change_timeout=30 (seconds of silence), cwd=null, is_static=false (a separate shell, in cwd),
            env={} (variables of this command only), terminal="" (another shell, by name), is_background=false (answer
            soon; creates a terminal if none is named), control="" (list, kill, reset; instead of a command)
            → content, command, state (completed, running, no_change_timeout, hard_timeout, cancelled, refused),
              omitted_bytes, metadata (exit_code, pid, username, hostname, working_dir, py_interpreter_path, prefix,
              suffix)
    edit    see `FileEditor.run`
    patch   see `Patching.apply`; `cwd` is added
    read, write
            see `FileLines.read` and `FileLines.write`; `cwd` (where the shell is) is added
    code    question, arguments, timeout; see `code_questions`
            → content, is_error
    others  run by a session program, see `session_program`; `cwd` (where the shell is) is added

Holds: a peer that breaks the protocol loses its connection and nothing else.
"""

from __future__ import annotations

from tool_worker.host.json_text import dumps, loads

PROTOCOL_VERSION = 1
FRAME_LIMIT_BYTES = 64 * 2**20
FINGERPRINT_LIMIT_CHARS = 64

RECORDED = "recorded"
RUNNING = "running"
UNKNOWN = "unknown"
NEVER_STARTED = "never_started"
OTHER = "other"


class ProtocolError(Exception):
    """The peer sent something that violates the protocol."""


def encode(message: dict[str, object]) -> bytes:
    """Return a message as a line; ASCII only, so that lone surrogates survive as escapes."""
    return dumps(message).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, object]:
    """Return the message of a line.

    Raises:
        ProtocolError: the line is not a JSON object.
    """
    try:
        message = loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError("not a JSON object")
    return message


class HostRequestRefused(Exception):
    """A request is refused; it has started nothing."""

    def __init__(self, code: str, message: str, *, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.answer: dict[str, object] = {"code": code, "message": message, "retryable": is_retryable}


def action_id_of(message: dict[str, object]) -> int:
    """Return the action id of a request.

    Raises:
        Refused: the request has no valid action id.
    """
    action_id = message.get("action_id")
    if not isinstance(action_id, int) or isinstance(action_id, bool) or action_id < 0:
        raise HostRequestRefused("bad_arguments", "`action_id` is not a number from 0 on")
    return action_id


def fingerprint_in(message: dict[str, object]) -> str:
    """Return the fingerprint of a request's action; empty if an older tool worker sends none.

    Raises:
        Refused: the fingerprint is invalid, and so cannot be written to the journal.
    """
    found = message.get("fingerprint", "")
    if not isinstance(found, str) or len(found) > FINGERPRINT_LIMIT_CHARS or (found and not found.isalnum()):
        raise HostRequestRefused("bad_arguments", "`fingerprint` is not made of up to 64 letters and digits")
    if not found.isascii():
        raise HostRequestRefused("bad_arguments", "`fingerprint` is not in ASCII")
    return found


class Lines:
    """Splits a byte stream into lines."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that this chunk completes.

        Raises:
            ProtocolError: a line is longer than `FRAME_LIMIT_BYTES`.
        """
        if b"\n" not in chunk:
            self._partial += chunk
            if len(self._partial) > FRAME_LIMIT_BYTES:
                raise ProtocolError(f"a line is longer than {FRAME_LIMIT_BYTES} bytes")
            return []
        *lines, rest = (bytes(self._partial) + chunk).split(b"\n")
        self._partial = bytearray(rest)
        return lines
