"""The Celery application of ingress workers: the tasks `deckhands.*` on the queue `deckhands`, with results and events.

Holds: a message is acknowledged when its task has run, the message of a run when its conversation is recorded. If its
worker dies, it is redelivered after `VISIBILITY_SECONDS`, and never lost in between, see `taken_entries`. The task
itself decides whether a message has expired, because it knows what an earlier delivery has started. Unacknowledged
messages have their own keys, so that this short time affects no other application on the same broker. No message is
held until its eta: it runs at once, with the eta in `ETA_HEADER`. Callbacks go to the queues that the caller's defaults
would choose. Arguments in Flower and remote control are truncated and contain no secret. The followers of a task are
checked before its message is processed, see `canvas`. Only our own tasks run, because Celery's built-in tasks could
send others. An unusable message counts as a failed part of its chord.
Does not: keep messages that the broker loses; read pickle, so a chord of pickled messages alone never ends.
"""

from __future__ import annotations

import base64
import bz2
import json
import logging
import zlib
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgpack
from celery import Celery
from celery._state import _set_task_join_will_block
from celery.app.task import Context
from celery.exceptions import NotRegistered
from celery.states import FAILURE, READY_STATES
from celery.worker import state
from celery.worker.request import ExceptionWithTraceback, Request
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps
from redis.exceptions import ConnectionError, TimeoutError  # noqa: A004

from broker.celery import (
    BROKER_ERRORS,
    MAX_DEPTH,
    MAX_NAME_CHARS,
    TRANSPORT_OPTIONS,
    CeleryWorker,
    MessageRefused,
    SafeConnection,
    SafeMessages,
    SafeTransport,
    WorkerConsumer,
    check_task,
    explain,
    is_deeper,
    log_dropped,
    make_app,
    split_login,
)
from broker.runtime import UsageError, new_key
from broker.secrets import MASK
from deckhands.ingress.canvas import FOLLOWERS, parse_followers

QUEUE = "deckhands"
RUN = "deckhands.run"
OWN_TASKS = "deckhands."
CELERY_TASKS = frozenset({"celery.map", "celery.starmap", "celery.chunks"})
"""Celery's tasks that would call another task as a function."""
DEFAULT_CALLER_QUEUE = "celery"
"""The queue of a callback that names none: the default of Celery's applications."""
CONCURRENCY = 8
INGRESS_WORKER = CeleryWorker(
    "deckhands.ingress.app", "ingress", {"queues": [QUEUE], "concurrency": CONCURRENCY, "task_events": True}
)
PREFETCHED = 8
"""How many messages are held for each task that runs at the same time: runs are taken together."""
VISIBILITY_SECONDS = 10
"""The two halves of a task take milliseconds. One that is delivered again while it runs does no harm."""
RESTORE_SECONDS = 4
"""The interval between two checks for messages of workers that have died."""
MAX_BODY_CHARS = 16 << 20
"""For a message: the body of a chord gets the results of all its parts."""
MAX_CHORD_BYTES = 1 << 20
"""For the signatures at the end of a body that is otherwise unusable."""
FOLLOWERS_START = b'{"callbacks":'
"""The start of the followers, at the end of a JSON body."""
MAX_START_CANDIDATES = 16
"""How many possible starts are tried; the task's arguments may look the same."""
MAX_SHOWN_CHARS = 200
SENDABLE = f"Send JSON, without compression, of at most {MAX_BODY_CHARS >> 20} MiB after base64."
UNREADABLE = "deckhands.unreadable"
"""The name for a chord's body that cannot be read."""
UNUSABLE_HEADER = "deckhands_unusable"
"""The header of a replacement message that says why the original cannot be used."""
ETA_HEADER = "deckhands_eta"
"""The header with the eta of a message."""
EXPIRES_HEADER = "deckhands_expires"
"""The header with the time at which a message expires, unless an earlier delivery was accepted."""
LIMITS_HEADER = "deckhands_timelimit"
"""The header with the hard and the soft time limit of a message. They do not limit the ingress worker."""
REFUSED_HEADER = "deckhands_refused"
"""The header that says why the followers of the task are refused: a message and a remedy; None if they are valid."""
BACKEND_UNAVAILABLE = (OSError, OperationalError, ConnectionError, TimeoutError)
"""The errors of the result backend while it is unavailable, after some twenty seconds of retries."""
_log = logging.getLogger(__name__)

BROKER_KEYS = {name: f"deckhands:{name}" for name in ("unacked", "unacked_index", "unacked_mutex")}


class IngressTransport(SafeTransport):
    """A transport for larger messages. The consumer can answer unusable ones."""

    max_body_chars = MAX_BODY_CHARS

    def replace_unusable(self, message: Any, queue: str, error: Exception) -> Any:
        """Return a short message of the same task that says why the original cannot be used."""
        task_id = find_task_id(message)
        if queue != QUEUE or not task_id:
            raise error
        headers = message.get("headers")
        headers = headers if isinstance(headers, dict) else {}
        chord = find_chord(message)
        return {
            "body": "",
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": {
                "id": task_id,
                "task": str(headers.get("task"))[:MAX_NAME_CHARS],
                "ignore_result": bool(headers.get("ignore_result")),
                "group": headers.get("group"),
                "group_index": headers.get("group_index"),
                "chord": None if is_deeper(chord, MAX_DEPTH) else chord,
                UNUSABLE_HEADER: f"{explain(error)}. {SENDABLE}",
            },
            "properties": {"delivery_tag": new_key(), "delivery_info": {"exchange": "", "routing_key": QUEUE}},
        }


class IngressConnection(SafeConnection):
    """A connection of an ingress worker."""

    own_transport = IngressTransport


class IngressMessages(SafeMessages):
    """The classes of an ingress worker's connections."""

    Connection = IngressConnection


class IngressConsumer(WorkerConsumer):
    """Runs tasks at once, whatever their eta."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._finished = deque[Any]()
        self._is_acknowledging = False

    def update_strategies(self) -> None:
        """Prepare the handlers for the messages of each task."""
        # The fast path raises an error of the result backend before the message is acknowledged. The message would stay
        # unacknowledged for ever, and after eight of them no other would be received.
        self.app.use_fast_trace_task = False
        super().update_strategies()
        for name in [name for name in self.strategies if not name.startswith(OWN_TASKS)]:
            del self.strategies[name]

    def take(self, message: Any) -> bool:
        """Check that a message can run, and prepare its headers. A run is taken by the worker's loop."""
        if isinstance(message.headers, dict) and UNUSABLE_HEADER in message.headers:
            raise MessageRefused(str(message.headers[UNUSABLE_HEADER]))
        arguments, options, embedded = check_task(message, self.strategies, max_chars=MAX_BODY_CHARS, longest_eta=None)
        headers = message.headers
        following, headers[REFUSED_HEADER] = _restrict_followers(headers, embedded or {})
        for own, celerys in ((ETA_HEADER, "eta"), (EXPIRES_HEADER, "expires"), (LIMITS_HEADER, "timelimit")):
            headers[own], headers[celerys] = headers.get(celerys), None
        headers["argsrepr"] = render_arguments(tuple(arguments), options)
        headers["kwargsrepr"] = render_arguments(options, options)
        if headers["task"] == RUN:
            state.total_count.update((RUN,))
            self.app.take_run(message, (arguments, options, following), partial(self._finish, message))
            return True
        if following != embedded:  # other entries there would change the headers
            message.body = dumps([arguments, options, following])
            message._decoded_cache = None  # noqa: SLF001  (kombu keeps what it has read of the body)
        return False

    def _finish(self, message: Any, must_requeue: bool) -> None:
        """Acknowledge a message that the worker's loop has taken, or requeue it. Called from another thread."""
        if must_requeue:
            self.call_soon(message.reject_log_error, _log, BROKER_ERRORS, requeue=True)
            return
        self._finished.append(message)
        if not self._is_acknowledging:
            self._is_acknowledging = True
            self.call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        """Acknowledge the messages that the loop has taken, together."""
        self._is_acknowledging = False
        finished = [self._finished.popleft() for _ in range(len(self._finished))]
        for channel in {message.channel for message in finished}:
            try:
                channel.qos.ack_all([message for message in finished if message.channel is channel])
            except BROKER_ERRORS as error:  # they come again, and change nothing
                log_dropped("the acknowledgement of Celery messages", error)

    def answer_dropped(self, message: Any, error: Exception) -> None:
        """Record the failure of a task with an unusable message, if the message has the task's id."""
        headers = message.headers if isinstance(message.headers, dict) else {}
        task_id = find_task_id({"headers": headers, "properties": message.properties})
        name = headers.get("task")
        self.note_unusable(task_id, str(name)[:MAX_NAME_CHARS], explain(error))
        if not task_id:
            return
        is_known = name in self.strategies or UNUSABLE_HEADER in headers
        failure = ValueError(explain(error)) if is_known else NotRegistered(str(name)[:MAX_NAME_CHARS])
        if isinstance(name, str) and name in CELERY_TASKS:
            failure = ValueError(f"The ingress does not run {name}: send a group of {OWN_TASKS}run instead.")
        try:
            backend = self.app.backend
            is_kept = not headers.get("ignore_result")
            request = _make_chord_request(message, task_id)
            if backend.get_state(task_id) not in READY_STATES:  # the id may be that of another task, which has ended
                backend.mark_as_failure(task_id, failure, request=request, store_result=is_kept)
            elif request is not None:  # an earlier delivery may have stored the result, and died before it was counted
                backend.on_chord_part_return(request, FAILURE, failure)
        except Exception as unwritten:  # noqa: BLE001  (the outer edge: the result backend may be away)
            log_dropped("the failure of a Celery task message", unwritten)

    def note_unusable(self, task_id: str, name: str, reason: str) -> None:
        """Report an unusable message to the application, if it has a hook for it."""
        note = getattr(self.app, "note_unusable", None)
        if note is not None:
            note(task_id, name, reason)


def find_task_id(message: Any) -> str:
    """Return the task id from a message's headers or properties; empty if there is no valid one."""
    for part, name in (("headers", "id"), ("properties", "correlation_id")):
        fields = message.get(part) if isinstance(message, dict) else None
        found = fields.get(name) if isinstance(fields, dict) else None
        if isinstance(found, str) and 0 < len(found) <= MAX_NAME_CHARS:
            return found
    return ""


class IngressRequest(Request):  # type: ignore[misc]
    """A task message that hides its arguments from all but the task, and is requeued while no result can be stored."""

    def on_failure(self, exc_info: Any, *arguments: Any, **options: Any) -> Any:
        """Handle a failure. Requeue the message while the result backend is unavailable, so that none is lost."""
        error = exc_info.exception
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        if exc_info.internal and isinstance(error, BACKEND_UNAVAILABLE):
            log_dropped("a result", error)
            return self.reject(requeue=True)
        return super().on_failure(exc_info, *arguments, **options)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  (Celery's)
        """Send an event. `task-started` is left out for a task that reports its own start."""
        if self.task.send_events:
            super().send_event(type, **fields)
        elif type != "task-started" and self._eventer and self._eventer.enabled:
            self._eventer.send(type, uuid=self.id, **fields)

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002  (Celery's)
        """Return the fields for remote control."""
        found: dict[str, Any] = super().info(safe=True)
        return found


def _restrict_followers(
    headers: dict[str, Any], embedded: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str] | None]:
    """Return the allowed followers of a message, and why the others were refused; None if all are allowed.

    This is done early because Celery runs followers in many places: at the end of the task, if it fails before its
    start, if it has expired.
    """
    in_headers = {name: headers.pop(name, None) for name in FOLLOWERS}  # Celery reads them there, too
    found = {name: embedded.get(name, in_headers[name]) for name in FOLLOWERS}
    try:
        return parse_followers(headers["id"], found), None
    except UsageError as error:
        return _parse_chord(headers["id"], found), [error.message, error.remedy]


def _make_chord_request(message: Any, task_id: str) -> Context | None:
    """Return the request that counts an unusable message as a part of its chord; None if it is in none."""
    headers = message.headers
    group, index = headers.get("group"), headers.get("group_index")
    if not group or not isinstance(group, str) or not isinstance(index, int | None):
        return None
    chord = headers.get("chord")
    if not chord and UNUSABLE_HEADER not in headers:
        with suppress(Exception):  # the body may be anything
            chord = message.decode()[2].get("chord")
    chord = _parse_chord(task_id, {"chord": chord})["chord"]
    # The last part to end provides the chord's body, unless that is this one. Nothing says yet whether the group is a
    # chord: its producer notes that when it sends the last part. In any other group, nobody counts.
    chord = chord or {"task": UNREADABLE, "options": {"task_id": new_key()}}
    return Context(id=task_id, group=group, group_index=index, chord=chord)


def find_chord(message: Any) -> Any:
    """Return the chord of an unusable message, from its headers or its body; None if there is no readable one.

    Only the end of the JSON, with the followers, is parsed. Decompression stops at the size limit of a usable message.
    """
    try:
        headers, body = message.get("headers") or {}, message["body"]
        if isinstance(headers.get("chord"), dict):
            return headers["chord"]
        is_packed = bool(headers.get("compression")) or "msgpack" in str(message.get("content-type"))
        if message["properties"].get("body_encoding") != "base64":
            content = body[-MAX_CHORD_BYTES:].encode()
        elif not is_packed:
            content = base64.b64decode(body[-MAX_CHORD_BYTES:])
        elif len(body) > MAX_BODY_CHARS:
            return None
        else:
            content = base64.b64decode(body)
        match headers.get("compression"):
            case "application/x-gzip":  # kombu's name for this format
                content = zlib.decompressobj().decompress(content, MAX_BODY_CHARS)
            case "application/x-bz2":
                content = bz2.BZ2Decompressor().decompress(content, MAX_BODY_CHARS)
        if "msgpack" in str(message.get("content-type")):
            return msgpack.unpackb(content, strict_map_key=False)[2]["chord"]
        at = len(content)
        for _ in range(MAX_START_CANDIDATES):
            at = content.rfind(FOLLOWERS_START, 0, at)
            if at < 0:
                return None
            with suppress(ValueError):
                (embedded,) = json.loads(b"[" + content[at:])
                return embedded["chord"]
    except Exception:  # noqa: BLE001  (the message is anything)
        return None
    return None


def _parse_chord(task_id: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the chord of the followers, because its other parts wait for the count; empty if it is invalid."""
    with suppress(UsageError):
        return parse_followers(task_id, {"chord": found["chord"]})
    return dict.fromkeys(FOLLOWERS)


def render_arguments(arguments: Any, options: Mapping[str, Any]) -> str:
    """Format arguments for display: secrets masked, and truncated."""
    secrets = options.get("secrets")
    values = [str(value) for value in secrets.values()] if isinstance(secrets, Mapping) else []
    if isinstance(arguments, Mapping):
        arguments = {name: MASK if name == "secrets" else value for name, value in arguments.items()}
    text = repr(arguments)
    for value in sorted(filter(None, values), key=len, reverse=True):
        text = text.replace(value, MASK).replace(repr(value)[1:-1], MASK)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def make_ingress_app(broker_url: str, result_url: str) -> Celery:
    """Make the Celery application of ingress workers.

    Args:
        broker_url: see `make_app`.
        result_url: the result backend, in kombu's format.
    """
    # Otherwise Celery would subscribe to the result of each callback that is sent, which no ingress worker reads.
    _set_task_join_will_block(True)
    result_backend, login = split_login(result_url)
    app = make_app(
        "ingress",
        broker_url,
        IngressMessages,
        result_backend=result_backend,
        redis_backend_credential_provider=login,
        result_serializer="json",
        result_accept_content=["json"],
        result_backend_thread_safe=True,
        task_ignore_result=False,
        task_default_queue=DEFAULT_CALLER_QUEUE,
        task_routes={"deckhands.*": {"queue": QUEUE}},
        worker_consumer=IngressConsumer,
        worker_send_task_events=True,
        worker_prefetch_multiplier=PREFETCHED,
        worker_enable_remote_control=True,
        broker_connection_timeout=2.0,
        broker_transport_options=TRANSPORT_OPTIONS
        # An ingress worker that dies while it restores unacknowledged messages holds the mutex of this check.
        | {"visibility_timeout": VISIBILITY_SECONDS, "unacked_mutex_expire": VISIBILITY_SECONDS}
        | {"unacked_restore_interval": RESTORE_SECONDS}
        | {f"{name}_key": key for name, key in BROKER_KEYS.items()},
    )
    # Celery runs an errback that is registered here with our rights; it sends any other one as a task.
    app.finalize(auto=True)
    for name in [name for name in app.tasks if not name.startswith(OWN_TASKS)]:
        app.tasks.unregister(name)
    return app
