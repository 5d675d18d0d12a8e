"""Log lines as JSON objects, one per line, for log collectors.

Context variables hold the subject of a line: a worker sets its name, and each asyncio task sets its conversation and
action. So a library's log line during a model call has them too. A line from elsewhere names its conversation by
`extra=about(...)`.

Holds: an object is one line of ASCII, whatever its message contains. A record that cannot be formatted still gives a
line.
Does not: change which messages are logged. Text is the default format.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
WORKER: ContextVar[str] = ContextVar("deckhands_worker", default="")
CONVERSATION: ContextVar[str] = ContextVar("deckhands_conversation", default="")
ACTION: ContextVar[int | None] = ContextVar("deckhands_action", default=None)
UNREADABLE_TEXT = "a log line could not be formatted"

_log = logging.getLogger(__name__)


def make_extra(conversation_id: str, action_id: int | None = None) -> dict[str, Any]:
    """Return the `extra` argument of a logging call for a conversation."""
    found: dict[str, Any] = {"conversation_id": conversation_id}
    return found if action_id is None else found | {"action_id": action_id}


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects.

    Args:
        role: `controller`, `tool`, `ingress`, `jobs`, `beat`, …
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without the newline."""
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001  (the arguments may be anything)
            message = f"{UNREADABLE_TEXT}: {record.msg!r}: {error!r}"
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
            "role": self._role,
            "pid": os.getpid(),
        }
        context = (
            ("worker_id", WORKER.get()),
            ("conversation_id", getattr(record, "conversation_id", None) or CONVERSATION.get()),
            ("action_id", getattr(record, "action_id", None) or ACTION.get()),
        )
        found |= {name: value for name, value in context if value}
        if record.exc_info and record.exc_info[0] is not None:
            kind, raised, _ = record.exc_info
            found |= {"error": f"{kind.__name__}: {raised}", "traceback": self.formatException(record.exc_info)}
        if record.stack_info:
            found["stack"] = record.stack_info
        return json.dumps(found, default=repr)


def start_logging(role: str, *, is_json: bool) -> None:
    """Write this process's log to standard error, as text or as JSON. For the main function of a worker."""
    logging.basicConfig(level=logging.INFO, format=TEXT_FORMAT)
    if is_json:
        use_json(role, logging.getLogger())
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread


def use_json(role: str, logger: logging.Logger) -> None:
    """Make all handlers of a logger write JSON. A handler that already writes JSON keeps its role."""
    formatter = JsonFormatter(role)
    for handler in logger.handlers:
        if not isinstance(handler.formatter, JsonFormatter):
            handler.setFormatter(formatter)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    level = logging.INFO if issubclass(kind, KeyboardInterrupt) else logging.CRITICAL
    _log.log(level, "the program ends with %s", kind.__name__, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(uncaught: threading.ExceptHookArgs) -> None:
    name = uncaught.thread.name if uncaught.thread is not None else "?"
    error = uncaught.exc_value
    if error is not None and not isinstance(error, SystemExit):
        _log.critical(
            "the thread %s ends with %s",
            name,
            uncaught.exc_type.__name__,
            exc_info=(type(error), error, error.__traceback__),
        )
