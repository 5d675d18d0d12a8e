"""Failpoints: named places in the code where a test can make a process die, stop, fail or wait.

`DECKHANDS_FAILPOINTS="controller.before_append:kill@3:/run/once,tool.after_result:pause:/run/gate"` arms them. Actions:
`kill` (SIGKILL), `stop` (SIGSTOP), `raise`, `exit`, `pause` (the whole thread waits until the marker is removed). `@n`
means only the n-th hit. A path after a second colon is a marker: the failpoint acts only if it can create that file, so
that a restarted process does not die again.

Holds: an unarmed failpoint costs one lookup in an empty dict.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from broker.runtime.errors import DeckhandsError, UsageError
from broker.runtime.settings import BrokerSettings

ACTIONS = ("kill", "stop", "raise", "exit", "pause")
LOOK_SECONDS = 0.02


class FailpointReached(DeckhandsError):
    """A failpoint with the action `raise` was reached."""

    code = "failpoint"


@dataclass(slots=True)
class _Armed:
    action: str
    at_hit: int
    marker: str
    hits: int = 0


def parse_failpoints(text: str) -> dict[str, _Armed]:
    """Parse the list of armed failpoints.

    Raises:
        UsageError: it is invalid.
    """
    armed = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = item.partition(":")
        order, _, marker = rest.partition(":")
        action, _, at_hit = order.partition("@")
        can_hit = (at_hit or "1").isdigit() and int(at_hit or 1) > 0
        if not name or name in armed or action not in ACTIONS or not can_hit or (action == "pause" and not marker):
            raise UsageError(
                f"The failpoint {item!r} cannot be used.", remedy="Write name:kill@1:/path/of/marker, each name once."
            )
        armed[name] = _Armed(action, int(at_hit or 1), marker)
    return armed


_ARMED: dict[str, _Armed] = {}
_LOG: list[str] = []


def arm(settings: BrokerSettings) -> None:
    """Arm the failpoints in the settings. Called once, when a worker process starts."""
    _ARMED.update(parse_failpoints(settings.failpoints))
    _LOG[:] = [settings.failpoint_log] if settings.failpoint_log else []


def failpoint(name: str) -> None:
    """Run the action that a test has armed here; usually nothing."""
    if not _ARMED:
        return
    armed = _ARMED.get(name)
    if armed is None:
        return
    armed.hits += 1
    if armed.hits != armed.at_hit or not _is_first(armed.marker):
        return
    for path in _LOG:
        with Path(path).open("a", encoding="utf-8") as log:
            log.write(f"{name} {os.getpid()}\n")
    # To this thread: a signal to the process may reach another thread first, while this one continues for a moment.
    if armed.action == "kill":
        signal.pthread_kill(threading.get_ident(), signal.SIGKILL)
    elif armed.action == "stop":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif armed.action == "exit":
        os._exit(1)
    elif armed.action == "pause":
        while Path(armed.marker).exists():
            threading.Event().wait(LOOK_SECONDS)
    else:
        raise FailpointReached(f"The failpoint {name} was reached.")


def _is_first(marker: str) -> bool:
    if not marker:
        return True
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
