"""The Celery application of the door: the tasks `deckhands.*` on the queue `deckhands`, with results and events.

Holds: a message is acknowledged when its task has been carried out, and one whose worker died comes back after
`VISIBILITY_SECONDS`; at no moment is it nowhere, see `taken_entries`. Whether a message has expired is for its task
to say, which knows what an earlier delivery has begun. What is under way is kept under separate keys,
so that this short time concerns no other application on the same broker. No message is held until its time: one with an
eta is carried out at once, and says so in `BEGINS`. Callbacks go where the caller's own defaults would send them. What
Flower and remote control show of arguments is cut, and no secret is in it. Before anything is done with a message, what
follows its task is checked, see `canvas`; no task but the door's own is carried out, since those of Celery send others.
A message that cannot be used counts as a failed part of its chord.
Does not: keep what the broker loses; read a pickle, so a chord of nothing else has no end.
"""

from __future__ import annotations

import base64
import bz2
import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgpack
from celery import Celery
from celery._state import _set_task_join_will_block
from celery.app.task import Context
from celery.exceptions import NotRegistered
from celery.states import FAILURE, READY_STATES
from celery.worker.request import ExceptionWithTraceback, Request
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps
from redis.exceptions import ConnectionError, TimeoutError  # noqa: A004

from broker.celery import (
    MAX_DEPTH,
    MAX_NAME_CHARS,
    TRANSPORT_OPTIONS,
    KeptConnection,
    KeptMessages,
    KeptTransport,
    Refused,
    WorkerConsumer,
    check_task,
    explain,
    is_deeper,
    make_app,
    note_dropped,
    split_login,
)
from broker.runtime import UsageError, new_key
from broker.secrets import MASK
from deckhands.ingress.canvas import FOLLOWERS, followers

QUEUE = "deckhands"
OWN_TASKS = "deckhands."
CELERYS_TASKS = frozenset({"celery.map", "celery.starmap", "celery.chunks"})
"""They would call a task as a function."""
CALLERS_QUEUE = "celery"
"""Where a callback goes that names no queue: the default of Celery's applications."""
CONCURRENCY = 8
VISIBILITY_SECONDS = 10
"""The two halves of a task take milliseconds; one that comes back while it runs does no harm."""
MAX_BODY_CHARS = 16 << 20
"""Of a message: the task that summarises a chord is given what all others returned."""
MAX_CHORD_BYTES = 1 << 20
"""Of the signatures at the end of a body that cannot be used otherwise."""
EMBEDDED = b'{"callbacks":'
"""How what follows a task begins, at the end of a body of JSON."""
MAX_PLACES = 16
"""How many places are tried where it may begin; its own arguments may look so too."""
SHOWN_CHARS = 200
SENDABLE = f"Send JSON, without compression, of at most {MAX_BODY_CHARS >> 20} MiB after base64."
UNREADABLE = "deckhands.unreadable"
"""The name of a chord's body that cannot be read."""
UNUSABLE = "deckhands_unusable"
"""The header that says why a message cannot be used, in the short one that takes its place."""
BEGINS = "deckhands_eta"
"""The header that has the eta of a message."""
EXPIRES = "deckhands_expires"
"""The header that has the time by which a message must be taken up, unless an earlier delivery was."""
LIMITS = "deckhands_timelimit"
"""The header that has the time limits of a message, the hard one and the soft one; they are no limits of the door."""
REFUSED = "deckhands_refused"
"""The header that says why what follows the task cannot be used: a message and a remedy; None: it can."""
AWAY = (OSError, OperationalError, ConnectionError, TimeoutError)
"""What the result backend raises while it cannot be reached, after it has tried for some twenty seconds."""
PLACES = {name: f"deckhands:{name}" for name in ("unacked", "unacked_index", "unacked_mutex")}


class DoorTransport(KeptTransport):
    """Takes larger messages, and lets the consumer answer those that cannot be used."""

    max_body_chars = MAX_BODY_CHARS

    def replace_unusable(self, message: Any, queue: str, error: Exception) -> Any:
        """Return a short message of the same task that says why the one which arrived cannot be used."""
        task_id = task_id_of(message)
        if queue != QUEUE or not task_id:
            raise error
        headers = message.get("headers")
        headers, chord = headers if isinstance(headers, dict) else {}, chord_in(message)
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
                UNUSABLE: f"{explain(error)}. {SENDABLE}",
            },
            "properties": {"delivery_tag": new_key(), "delivery_info": {"exchange": "", "routing_key": QUEUE}},
        }


class DoorConnection(KeptConnection):
    """A connection of the door."""

    own_transport = DoorTransport


class DoorMessages(KeptMessages):
    """How the door connects."""

    Connection = DoorConnection


class DoorConsumer(WorkerConsumer):
    """Takes up tasks at once, whatever their eta."""

    def update_strategies(self) -> None:
        """Prepare what takes up the messages of each task."""
        # The fast way lets an error of the result backend out, before anybody has acknowledged the message: it would
        # keep its place among those under way for ever, and after eight of them no other would be taken.
        self.app.use_fast_trace_task = False
        super().update_strategies()
        for name in [name for name in self.strategies if not name.startswith(OWN_TASKS)]:
            del self.strategies[name]

    def check(self, message: Any) -> None:
        """Refuse what cannot be carried out; prepare the rest."""
        if isinstance(message.headers, dict) and UNUSABLE in message.headers:
            raise Refused(str(message.headers[UNUSABLE]))
        arguments, options, embedded = check_task(message, self.strategies, max_chars=MAX_BODY_CHARS, longest_eta=None)
        headers = message.headers
        headers[REFUSED] = _bound(message, arguments, options, embedded or {})
        for own, celerys in ((BEGINS, "eta"), (EXPIRES, "expires"), (LIMITS, "timelimit")):
            headers[own], headers[celerys] = headers.get(celerys), None
        shown_arguments, shown_options = shown(tuple(arguments), options), shown(options, options)
        headers.update(argsrepr=shown_arguments, kwargsrepr=shown_options)

    def answer_dropped(self, message: Any, error: Exception) -> None:
        """Record the failure of a task whose message cannot be used, if the message says which one it is."""
        headers = message.headers if isinstance(message.headers, dict) else {}
        task_id, name = task_id_of({"headers": headers, "properties": message.properties}), headers.get("task")
        self.note_unusable(task_id, str(name)[:MAX_NAME_CHARS], explain(error))
        if not task_id:
            return
        is_known = name in self.strategies or UNUSABLE in headers
        failure = ValueError(explain(error)) if is_known else NotRegistered(str(name)[:MAX_NAME_CHARS])
        if isinstance(name, str) and name in CELERYS_TASKS:
            failure = ValueError(f"The ingress carries out no {name}: send a group of {OWN_TASKS}run instead.")
        try:
            backend, is_kept = self.app.backend, not headers.get("ignore_result")
            request = _request_in_chord(message, task_id, backend)
            if backend.get_state(task_id) not in READY_STATES:  # the id may be that of another task, which has ended
                backend.mark_as_failure(task_id, failure, request=request, store_result=is_kept)
            elif request is not None:  # an earlier delivery may have stored the result, and died before it was counted
                backend.on_chord_part_return(request, FAILURE, failure)
        except Exception as unwritten:  # noqa: BLE001  (the outer edge: the result backend may be away)
            note_dropped("the failure of a Celery task message", unwritten)

    def note_unusable(self, task_id: str, name: str, reason: str) -> None:
        """Keep a note of a message that cannot be used, where the application has a place for it."""
        note = getattr(self.app, "note_unusable", None)
        if note is not None:
            note(task_id, name, reason)


def task_id_of(message: Any) -> str:
    """Return the task id that a message names in its headers or its properties; empty: none that can be used."""
    for part, name in (("headers", "id"), ("properties", "correlation_id")):
        fields = message.get(part) if isinstance(message, dict) else None
        found = fields.get(name) if isinstance(fields, dict) else None
        if isinstance(found, str) and 0 < len(found) <= MAX_NAME_CHARS:
            return found
    return ""


class DoorRequest(Request):  # type: ignore[misc]
    """A task message that shows its arguments to nobody but the task, and comes back while no result can be kept."""

    def on_failure(self, exc_info: Any, *arguments: Any, **options: Any) -> Any:
        """Take note of a failure. While the result backend is away, nobody would ever hear of it."""
        error = exc_info.exception
        error = error.exc if isinstance(error, ExceptionWithTraceback) else error
        if exc_info.internal and isinstance(error, AWAY):
            note_dropped("a result", error)
            return self.reject(requeue=True)
        return super().on_failure(exc_info, *arguments, **options)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  (Celery's)
        """Send an event; a task that says itself when it has started leaves only its refusal to its message."""
        if self.task.send_events:
            super().send_event(type, **fields)
        elif type != "task-started" and self._eventer and self._eventer.enabled:
            self._eventer.send(type, uuid=self.id, **fields)

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002  (Celery's)
        """Return what remote control shows."""
        found: dict[str, Any] = super().info(safe=True)
        return found


def _bound(message: Any, arguments: Any, options: Any, embedded: Mapping[str, Any]) -> list[str] | None:
    """Let a message say of what follows its task only what may follow, and return why it may not; None: it may.

    Celery carries that out in many places: at the end of the task, if it fails before it begins, if it has expired.
    """
    headers, refused = message.headers, None
    in_headers = {name: headers.pop(name, None) for name in FOLLOWERS}  # Celery reads them there, too
    found = {name: embedded.get(name, in_headers[name]) for name in FOLLOWERS}
    try:
        following = followers(headers["id"], found)
    except UsageError as error:
        following, refused = _chord_alone(headers["id"], found), [error.message, error.remedy]
    if following != embedded:  # what else stands there would change the headers
        message.body = dumps([arguments, options, following])
        message._decoded_cache = None  # noqa: SLF001  (kombu keeps what it has read of the body)
    return refused


def _request_in_chord(message: Any, task_id: str, backend: Any) -> Context | None:
    """Return what counts an unusable message as a part of its chord; None: it is in none."""
    headers = message.headers
    group, index = headers.get("group"), headers.get("group_index")
    if not group or not isinstance(group, str) or not isinstance(index, int | None):
        return None
    chord = headers.get("chord")
    if not chord and UNUSABLE not in headers:
        with suppress(Exception):  # the body is anything
            chord = message.decode()[2].get("chord")
    chord = _chord_alone(task_id, {"chord": chord})["chord"]
    if not chord and backend.client.get(backend.get_key_for_group(group, ".s")):
        # The part that ends last says what the chord's body is, unless that is this one.
        chord = {"task": UNREADABLE, "options": {"task_id": new_key()}}
    return Context(id=task_id, group=group, group_index=index, chord=chord) if chord else None


def chord_in(message: Any) -> Any:
    """Return the chord of a message that cannot be used, from its headers or from its body; None: none can be read.

    Of JSON only the end is read, where what follows the task stands, and no more than the limits of a usable message
    are ever unpacked.
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
        for _ in range(MAX_PLACES):
            at = content.rfind(EMBEDDED, 0, at)
            if at < 0:
                return None
            with suppress(ValueError):
                (embedded,) = json.loads(b"[" + content[at:])
                return embedded["chord"]
    except Exception:  # noqa: BLE001  (the message is anything)
        return None
    return None


def _chord_alone(task_id: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return of what follows a task only its chord, which waits for the count; nothing if that cannot be used."""
    with suppress(UsageError):
        return followers(task_id, {"chord": found["chord"]})
    return dict.fromkeys(FOLLOWERS)


def shown(arguments: Any, options: Mapping[str, Any]) -> str:
    """Return arguments as people may see them: the values of secrets masked, and cut."""
    secrets = options.get("secrets")
    values = [str(value) for value in secrets.values()] if isinstance(secrets, Mapping) else []
    if isinstance(arguments, Mapping):
        arguments = {name: MASK if name == "secrets" else value for name, value in arguments.items()}
    text = repr(arguments)
    for value in sorted(filter(None, values), key=len, reverse=True):
        text = text.replace(value, MASK).replace(repr(value)[1:-1], MASK)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def make_door_app(broker_url: str, result_url: str) -> Celery:
    """Make the Celery application of the door.

    Args:
        broker_url: see `make_app`.
        result_url: where results are kept, as kombu writes it.
    """
    # Or each callback that is sent would be listened for, by a worker that never asks.
    _set_task_join_will_block(True)
    result_backend, login = split_login(result_url)
    app = make_app(
        "door",
        broker_url,
        DoorMessages,
        result_backend=result_backend,
        redis_backend_credential_provider=login,
        result_serializer="json",
        result_accept_content=["json"],
        result_backend_thread_safe=True,
        task_ignore_result=False,
        task_default_queue=CALLERS_QUEUE,
        task_routes={"deckhands.*": {"queue": QUEUE}},
        worker_consumer=DoorConsumer,
        worker_send_task_events=True,
        worker_enable_remote_control=True,
        broker_connection_timeout=2.0,
        broker_transport_options=TRANSPORT_OPTIONS
        # A door that dies while it looks for what others have left holds the mutex of these looks.
        | {"visibility_timeout": VISIBILITY_SECONDS, "unacked_mutex_expire": VISIBILITY_SECONDS}
        | {f"{name}_key": key for name, key in PLACES.items()},
    )
    # Celery calls an errback that is registered here, with the door's rights; any other it sends.
    app.finalize(auto=True)
    for name in [name for name in app.tasks if not name.startswith(OWN_TASKS)]:
        app.tasks.unregister(name)
    return app
