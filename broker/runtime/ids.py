"""Makes ids. The only place that draws random numbers for them.

The id of a delegate is derived from the parent's id and the action that starts the delegate.

Holds: conversation ids are unguessable, URL-safe and sort by creation time. A worker id names one worker session, so a
process that was swept and comes back is a new worker.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from uuid import NAMESPACE_OID, uuid5

from broker.runtime.clock import SYSTEM_CLOCK, Clock
from broker.runtime.errors import UsageError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CONNECTION_NAME = "deckhands"
_CONVERSATION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{2,63}")


def new_conversation_id(clock: Clock = SYSTEM_CLOCK) -> str:
    """Make an id of 26 characters: 10 of time (milliseconds, base 32), 2 of microseconds, 14 random (70 bits)."""
    millis, micros = divmod((clock.now() - EPOCH) // timedelta(microseconds=1), 1_000)
    return _encode_base32((millis << 10 | micros) << 70 | secrets.randbits(70), 26)


def is_conversation_id(text: str) -> bool:
    """Return whether a text is a valid conversation id."""
    return _CONVERSATION_ID.fullmatch(text) is not None


def check_conversation_id(conversation_id: str) -> str:
    """Return the id if it is a valid conversation id.

    Raises:
        UsageError: not 3 to 64 letters, digits, `-` or `_`.
    """
    if not is_conversation_id(conversation_id):
        raise UsageError(
            f"The conversation id {conversation_id!r} cannot be used.",
            remedy="Use 3 to 64 letters, digits, '-' or '_', starting with a letter or digit.",
        )
    return conversation_id


def new_worker_id(role: str) -> str:
    """Make an id for a worker session of this process: `<role>-<host>-<pid>-<random>`."""
    return f"{make_worker_id_prefix(role)}{os.getpid()}-{secrets.token_hex(4)}"


def make_worker_id_prefix(role: str) -> str:
    """Return the prefix of the ids of a role's workers on this host: `<role>-<host>-`."""
    return f"{role}-{_host()}-"


def make_connection_name(worker_id: str = "") -> str:
    """Return the name that a process gives its connections to the store, `deckhands-<host>-<pid>`.

    Args:
        worker_id: one of the process's workers; empty: this process.

    Raises:
        ValueError: the id names no process.
    """
    if not worker_id:
        return f"{CONNECTION_NAME}-{_host()}-{os.getpid()}"
    _, host, pid, _ = worker_id.split("-")
    return f"{CONNECTION_NAME}-{host}-{pid}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())[:24] or "host"


def new_token() -> str:
    """Make an unguessable token."""
    return secrets.token_urlsafe(32)


def new_key() -> str:
    """Make an idempotency key for a caller that gave none."""
    return secrets.token_hex(12)


def new_trace_id() -> str:
    """Make the id of a trace, 32 hexadecimal digits, as in W3C Trace Context."""
    return secrets.token_hex(16)


def new_span_id() -> str:
    """Make the id of a span, 16 hexadecimal digits, as in W3C Trace Context."""
    return secrets.token_hex(8)


def derive_task_id(place: str) -> str:
    """Derive a task id in Celery's format from a name. Always the same for the same name."""
    return str(uuid5(NAMESPACE_OID, place))


def draw_jitter() -> float:
    """Draw a factor between 0.5 and 1.5 for a pause, so that many waiting clients do not return at once."""
    return 0.5 + secrets.randbelow(1_000_000) / 1_000_000


def shorten_randomly() -> float:
    """Draw a factor between 2/3 and 1 for a bounded wait, so that clients that started together drift apart."""
    return (draw_jitter() + 1.5) / 3


_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def _encode_base32(value: int, length: int) -> str:
    digits = []
    for _ in range(length):
        digits.append(_ALPHABET[value & 31])
        value >>= 5
    return "".join(reversed(digits))


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: `1 file`, `1,234 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


ID_CHARS = 24


def make_delegate_id(parent_id: str, delegate_id: int) -> str:
    """Return the id of the delegate that an action starts. Always the same for the same action."""
    return "d" + sha256(f"{parent_id}:{delegate_id}".encode()).hexdigest()[:ID_CHARS]
