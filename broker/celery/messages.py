"""Filters the messages that Celery reads: unusable data in its broker is dropped with a line in the log.

Celery and kombu trust the broker. A list instead of a message, a header of another type or an entry that is not JSON
raises in the worker's main thread and ends the worker; the message is delivered again, and ends the next one.

A worker reads the login of its broker and its result backend from a file, again at each connection.

Holds: no message ends a worker, and none stays unacknowledged for ever; an unusable one is acknowledged. Content is
JSON, uncompressed, of bounded size and depth.
Does not: keep dropped messages; follow a change of host or port in the file; restart the worker for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from queue import Empty
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import kombu
import kombu.connection as kombu_connection
from celery.app.amqp import AMQP
from celery.worker.consumer import Consumer
from kombu.transport import redis as kombu_redis
from pydantic import BaseModel, Field, RootModel, StrictInt, StrictStr, ValidationError
from redis import exceptions as redis_errors
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

from broker.runtime import SYSTEM_CLOCK, Clock, UrlInFile, UsageError


class UrlCredentials(CredentialProvider):
    """User and password of a URL in a file, read when needed."""

    def __init__(self, url: UrlInFile) -> None:
        self._url = url

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return user and password, or the password alone, in redis-py's format.

        Raises:
            AuthenticationError: the file cannot be read or has no password. redis-py's own class, so that it retries.
        """
        try:
            parts = urlsplit(self._url.read())
        except UsageError as error:
            raise AuthenticationError(str(error)) from error
        if not parts.password:
            raise AuthenticationError(f"The URL in {self._url.path} no longer has a password.")
        password = unquote(parts.password)
        return (unquote(parts.username), password) if parts.username else (password,)


def split_login(url: str) -> tuple[str, UrlCredentials | None]:
    """Return a URL without its login, and the provider of the login.

    A URL that has no login, or is not from a file, stays unchanged and has no provider.
    """
    login = urlsplit(url).netloc.rpartition("@")[0]
    if not isinstance(url, UrlInFile) or not login:
        return str(url), None
    return url.replace(f"{login}@", "", 1), UrlCredentials(url)


def redis_url(broker_url: str) -> str:
    """Return the address of Celery's broker as redis-py writes it."""
    if isinstance(broker_url, UrlInFile):
        return broker_url.derive(redis_url)
    if not broker_url.startswith("redis+socket://"):
        return broker_url
    parts = urlsplit(broker_url)
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0]
    return f"unix://{parts.netloc}{parts.path}?db={database}"


BLOCK_SECONDS = 10
"""How long a read of a queue blocks. An arriving message ends it, and so does the end of the worker."""
MAX_BODY_CHARS = 1 << 20
"""For answers to remote control, which list a worker's requests."""
MAX_TASK_CHARS = 1 << 16
MAX_NAME_CHARS = 256
MAX_DEPTH = 32
MAX_ETA = timedelta(hours=1)
"""The visibility timeout: the broker delivers messages again that are held for longer."""
MAX_SHOWN_CHARS = 300
BROKER_ERRORS = (OSError, redis_errors.ConnectionError, redis_errors.TimeoutError, redis_errors.ResponseError)
"""Errors of a failing broker. kombu includes KeyError, which a message can cause too."""

_log = logging.getLogger(__name__)

Name = Field(max_length=MAX_NAME_CHARS)


class _DeliveryInfo(BaseModel):
    exchange: StrictStr = Name
    routing_key: StrictStr = Name


class _Properties(BaseModel):
    delivery_tag: StrictStr = Name
    delivery_info: _DeliveryInfo
    body_encoding: Literal["base64", "utf-8"] | None = None
    correlation_id: StrictStr | None = None
    reply_to: StrictStr | None = None
    priority: StrictInt | None = None


class _Headers(BaseModel):
    compression: None = None
    """A few compressed bytes could expand to all available memory."""


class _Envelope(BaseModel):
    """kombu's envelope of a message, in a list or a channel."""

    body: StrictStr
    content_type: Literal["application/json"] = Field(alias="content-type")
    content_encoding: Literal["utf-8"] = Field(alias="content-encoding")
    headers: _Headers
    properties: _Properties


class _TaskHeaders(BaseModel):
    """The headers of Celery's protocol 2 that a worker computes with."""

    task: StrictStr = Name
    id: StrictStr = Name
    root_id: StrictStr | None = None
    parent_id: StrictStr | None = None
    group: StrictStr | None = None
    shadow: StrictStr | None = None
    origin: StrictStr | None = None
    argsrepr: StrictStr | None = None
    kwargsrepr: StrictStr | None = None
    retries: StrictInt | None = None
    eta: datetime | None = None
    expires: datetime | None = None
    timelimit: tuple[float | None, float | None] | None = None
    stamps: dict[str, Any] | None = None
    stamped_headers: list[StrictStr] | None = None
    group_index: StrictInt | None = None


class _Embedded(BaseModel):
    callbacks: list[dict[str, Any]] | None = None
    errbacks: list[dict[str, Any]] | None = None
    chain: list[dict[str, Any]] | None = None
    chord: dict[str, Any] | None = None


class _TaskBody(RootModel[tuple[list[Any], dict[str, Any], _Embedded | None]]):
    """Positional arguments, keyword arguments, and followers."""


class MessageRefused(ValueError):
    """A message that cannot be used."""


def log_dropped(what: str, error: Exception) -> None:
    """Log that something was dropped, and why, in one line of bounded length."""
    is_ours = isinstance(error, ValidationError | MessageRefused)
    reason = explain(error) if is_ours else f"{type(error).__name__}: {error}"
    _log.warning("%s was dropped: %s", what, repr(reason[:MAX_SHOWN_CHARS]))


def explain(error: Exception) -> str:
    """Return why a message cannot be used, in one sentence of bounded length."""
    if not isinstance(error, ValidationError):
        return str(error)[:MAX_SHOWN_CHARS]
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'the whole'}: {first['msg']}"[:MAX_SHOWN_CHARS]


class QoS(kombu_redis.QoS):  # type: ignore[misc]
    """The unacknowledged messages."""

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:
        """Restore a message to its queue. Delete one that cannot be restored, because it would block all others."""
        try:
            super().restore_by_tag(tag, client=client, leftmost=leftmost)
        except BROKER_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001  (the outer edge: whatever is wrong with it)
            log_dropped("a Celery message that was not acknowledged", error)
            with self.channel.conn_or_acquire(client) as connected:
                self._remove_from_indices(tag, connected.pipeline()).execute()


class Channel(kombu_redis.Channel):  # type: ignore[misc]
    """Reads lists and channels. Data that is not a message is dropped."""

    QoS = QoS
    _kept_client: Any = None

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """Return the channel's client.

        It is kept, because creating one costs more than a command and opens a connection.
        """
        if client is None and getattr(self._kept_client, "connection_pool", None) is not self.pool:
            self._kept_client = self._create_client()
        yield client or self._kept_client

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        """Return the connection parameters. A login in a file is read each time."""
        found: dict[str, Any] = super()._connparams(asynchronous)
        url = getattr(self.connection.client, "own_url", "")
        if isinstance(url, UrlInFile) and found.get("password"):
            for name in ("username", "password"):
                found.pop(name, None)
            found["credential_provider"] = UrlCredentials(url)
        return found

    def _brpop_read(self, **options: Any) -> Any:
        return self._drop_invalid("an entry of a Celery queue", lambda: super(Channel, self)._brpop_read(**options))

    def _receive_one(self, client: Any) -> Any:
        return self._drop_invalid("a Celery broadcast", lambda: super(Channel, self)._receive_one(client))

    def _drop_invalid(self, what: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (Empty, *BROKER_ERRORS):
            raise
        except Exception as error:  # noqa: BLE001  (the outer edge: whatever is wrong with it)
            log_dropped(what, error)
            return True


class FilteringTransport(kombu_redis.Transport):  # type: ignore[misc]
    """kombu's transport over Redis, with a check of each message."""

    Channel = Channel
    brpop_timeout = BLOCK_SECONDS
    max_body_chars = MAX_BODY_CHARS

    def _deliver(self, message: Any, queue: str) -> None:
        try:
            self._check(message)
        except (ValidationError, MessageRefused) as error:
            message = self.replace_unusable(message, queue, error)
        super()._deliver(message, queue)

    def _check(self, message: Any) -> None:
        _Envelope.model_validate(message)
        if len(message["body"]) > self.max_body_chars:
            raise MessageRefused(f"its body has {len(message['body'])} characters; the limit is {self.max_body_chars}")

    def replace_unusable(self, message: Any, queue: str, error: Exception) -> Any:  # noqa: ARG002
        """Return a message to deliver instead of an unusable one. There is none by default, so the error is raised."""
        raise error


class FilteringConnection(kombu.Connection):  # type: ignore[misc]
    """A connection with our transport in place of kombu's."""

    own_transport: type[FilteringTransport] = FilteringTransport

    def __init__(self, hostname: Any = "localhost", *arguments: Any, own_url: str = "", **options: Any) -> None:
        self.own_url = own_url or hostname
        super().__init__(hostname, *arguments, **options)

    def clone(self, **options: Any) -> Any:
        """Return a copy, for a pool of connections."""
        return super().clone(own_url=self.own_url, **options)

    def Pool(self, limit: int | None = None, **options: Any) -> Any:  # noqa: N802  (kombu's)
        """Return a pool of such connections, because kombu's own would keep the first login for ever."""
        return _Pool(self, limit, **options)

    def get_transport_cls(self) -> Any:
        """Return the class of the transport."""
        found = super().get_transport_cls()
        if found is kombu_redis.SentinelTransport:
            return _with_sentinels(self.own_transport)
        return self.own_transport if found is kombu_redis.Transport else found


def _with_sentinels(transport: type[FilteringTransport]) -> type[FilteringTransport]:
    """Return a transport whose channels ask Sentinels for the broker."""
    channel = type(transport.Channel.__name__, (transport.Channel, kombu_redis.SentinelChannel), {})
    return type(transport.__name__, (transport, kombu_redis.SentinelTransport), {"Channel": channel})


class _PooledConnection(kombu_connection.PooledConnection, FilteringConnection):  # type: ignore[misc]
    """A connection that only sends."""


class _Pool(kombu_connection.ConnectionPool):  # type: ignore[misc]
    def new(self) -> Any:
        """Make a connection."""
        known = self.connection._info(resolve=False)  # noqa: SLF001  (as kombu does)
        return _PooledConnection(self, own_url=self.connection.own_url, **dict(known))


class Messages(AMQP):  # type: ignore[misc]
    """The classes of an application's connections."""

    Connection = FilteringConnection


class WorkerConsumer(Consumer):  # type: ignore[misc]
    """A worker's consumer without gossip and mingle, also if `celery worker` started the worker."""

    def __init__(self, *arguments: Any, worker_options: dict[str, Any] | None = None, **options: Any) -> None:
        quiet = {**(worker_options or {}), "without_gossip": True, "without_mingle": True}
        super().__init__(*arguments, worker_options=quiet, **options)
        # An unexpected error costs a new connection, not the worker.
        self.channel_errors = (Exception,)

    def register_with_event_loop(self, hub: Any) -> None:
        """Also end a wait of Celery's event loop when the worker is asked to stop, see `add_loop`."""
        super().register_with_event_loop(hub)
        if (stopping := getattr(self.app, "stopping", None)) is not None:
            hub.add_reader(stopping, lambda: None)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Log the broker's refusal, such as reading a key of another type, before connecting again."""
        if isinstance(exc, redis_errors.ResponseError):
            _log.error("Celery's broker refuses a command of this worker: %s", exc)
        super().on_connection_error_after_connected(exc)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Drop a message with an unreadable body."""
        log_dropped("a Celery message", exc)
        message.ack()

    def take(self, message: Any) -> bool:
        """Check that a task message can run; any error refuses it. Return True to keep it from Celery."""
        check_task(message, self.strategies)
        return False

    def create_task_handler(self, *arguments: Any, **options: Any) -> Callable[[Any], None]:
        """Return the handler of task messages, which drops unusable ones."""
        take_up = super().create_task_handler(*arguments, **options)

        def take_up_or_drop(message: Any) -> None:
            try:
                if not self.take(message):
                    take_up(message)
            except BROKER_ERRORS:
                raise
            except Exception as error:  # noqa: BLE001  (the outer edge: whatever is wrong with it)
                log_dropped("a Celery task message", error)
                self.answer_dropped(message, error)
                if not message.acknowledged:
                    message.reject()

        return take_up_or_drop

    def answer_dropped(self, message: Any, error: Exception) -> None:
        """Tell the sender of a task message why it was dropped. Does nothing here, because no results are kept."""


def check_task(
    message: Any,
    known: Container[str],
    *,
    max_chars: int = MAX_TASK_CHARS,
    longest_eta: timedelta | None = MAX_ETA,
    clock: Clock = SYSTEM_CLOCK,
) -> Any:
    """Refuse a message that would raise in the worker's main thread or pool, where it would never be acknowledged.

    Args:
        longest_eta: maximum time until the eta; None for a worker that ignores it.

    Returns:
        The body: positional arguments, keyword arguments, and followers.
    """
    found = _TaskHeaders.model_validate(message.headers)
    if found.task not in known:
        raise MessageRefused(f"this worker has no task {found.task!r}")
    if longest_eta and found.eta is not None:
        eta = found.eta if found.eta.tzinfo is not None else found.eta.replace(tzinfo=UTC)
        if eta > clock.now() + longest_eta:
            raise MessageRefused(
                f"its eta is more than {longest_eta.total_seconds():g} s away, so it would be delivered twice"
            )
    if len(message.body) > max_chars:
        raise MessageRefused(f"its body has {len(message.body)} bytes; the limit is {max_chars}")
    body = message.decode()
    _TaskBody.model_validate(body)
    if is_deeper(body, MAX_DEPTH) or is_deeper(message.headers, MAX_DEPTH):
        raise MessageRefused(f"it is nested more than {MAX_DEPTH} levels deep")
    return body


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and mappings are nested more deeply than `depth`."""
    level = [value]
    for _ in range(depth):
        level = [child for parent in level for child in _list_children(parent)]
    return any(isinstance(value, list | dict) for value in level)


def _list_children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
