"""The only place that configures Celery.

Celery provides every worker's life cycle, remote control and monitoring. Inside Deckhands, work travels on streams:
controller and tool workers have no Celery task, and for them the broker may be emptied at any time. Clients may also
use Celery: ingress workers serve the tasks `deckhands.*` and store their results in a result backend, see
`deckhands.ingress`. Jobs workers serve the tasks `deckhands.jobs.*`, which a beat or an operator sends, see
`deckhands.operations`.

Holds: JSON only, no gossip, no mingle. No message ends a worker, see `messages`. Remote control is restricted, see
`remote_control`. Over `rediss://` the server's certificate is verified unless the URL disables it. No setting that
Celery shows holds a password.
Does not: keep accepted work in a Celery queue. An ingress worker acknowledges a task once it is in the store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from celery import Celery, signals
from celery.utils.log import get_multiprocessing_logger
from celery.utils.nodenames import host_format
from redis.asyncio.connection import parse_url

from broker.celery.messages import Messages, WorkerConsumer
from broker.celery.remote_control import RemoteControl
from broker.runtime import UrlInFile, UsageError, hide_password, logs_json, read_tls, use_json
from broker.store import SentinelUrl, is_cluster_url, is_sentinel_url

LOADER = "celery.loaders.app:AppLoader"
SOCKET_TIMEOUT_SECONDS = 5.0
SENTINEL_SECONDS = 0.5
"""How long one Sentinel may take for an answer before the next one is asked."""
STANDARD_ERROR = 2
RESTORE_SECONDS = 60
"""The interval between two checks for unacknowledged messages, for workers whose queue is always empty."""
EVENT_HEARTBEAT_SECONDS = 10.0
"""The interval of the heartbeats that monitors of Celery read. Each one names it, so that a monitor knows it."""
TRANSPORT_OPTIONS = {
    "visibility_timeout": 3600,
    "unacked_restore_interval": RESTORE_SECONDS,
    "unacked_restore_throttle": 1,
    "socket_keepalive": True,
    # Without these, a broker that vanishes silently blocks the worker's main thread for minutes.
    "socket_connect_timeout": SOCKET_TIMEOUT_SECONDS,
    "socket_timeout": SOCKET_TIMEOUT_SECONDS,
}
TAKEN = ("unacked", "unacked_index", "unacked_mutex")
"""The keys in which Celery's transport notes what workers have taken."""
WORKER_OPTIONS = {
    "pool_cls": "threads",
    "concurrency": 2,
    "without_gossip": True,
    "without_mingle": True,
    "heartbeat_interval": EVENT_HEARTBEAT_SECONDS,
    "loglevel": "WARNING",
}


def make_worker(app: Celery, name: str, **options: Any) -> Any:
    """Make a worker of an application; its `start` runs it until it is asked to stop.

    Celery's own command line is not used: it imports every command, including Flower's, which takes a third of a
    worker's start time.

    Args:
        name: name of the worker in Flower and `celery inspect`; `%h` stands for the host name.
        options: options of Celery's worker, in addition to those of all our workers.
    """
    _use_own_broker(app)
    if logs_json():
        from celery.apps import worker as celery_worker

        celery_worker.safe_say = _write_as_log
    # Celery's banner is text and would break a log of JSON objects.
    return app.Worker(hostname=host_format(name), quiet=logs_json(), **WORKER_OPTIONS | options)


def make_app(role: str, broker_url: str, messages: type[Messages] = Messages, **further: Any) -> Celery:
    """Make the Celery application of one kind of worker.

    Args:
        role: `controller`, `tool`, `ingress` or `jobs`; also the name of its queue.
        broker_url: `redis://…`, `redis+sentinel://…`, or `redis+socket://:password@/path?virtual_host=1`.
        messages: the classes of its connections.
        further: settings that replace the common ones.

    Raises:
        UsageError: a TLS option of a URL is invalid.
    """
    if logs_json():
        _log_as_json(role)
    connections = make_connection_settings(broker_url, further.pop("result_backend", ""))
    # After a short restart the broker is back soon, and fast retries cost nothing here.
    transport = further.pop("broker_transport_options", TRANSPORT_OPTIONS)
    configuration: dict[str, Any] = {
        "accept_content": ["json"],
        "task_serializer": "json",
        "worker_consumer": WorkerConsumer,
        "task_ignore_result": True,
        "task_acks_late": True,
        "task_default_queue": f"deckhands.{role}",
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_channel_error_retry": True,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_prefetch_multiplier": 1,
        "control_queue_expires": 60.0,
        **further,
        **connections,
        # Of each role, so that its user of the broker needs no keys of another one.
        "broker_transport_options": {f"{name}_key": f"deckhands.{role}:{name}" for name in TAKEN}
        | transport
        | connections.get("broker_transport_options", {}),
    }
    # Set explicitly; otherwise CELERY_LOADER and CELERY_CONFIG_MODULE of another application would apply.
    return Celery(
        f"deckhands.{role}",
        loader=LOADER,
        config_source=configuration,
        set_as_current=True,
        amqp=messages,
        control=RemoteControl,
    )


def make_connection_settings(broker_url: str, result_url: str = "") -> dict[str, Any]:
    """Return Celery's settings for its broker and, unless that URL is empty, its result backend.

    kombu verifies no certificate unless the URL asks for it, and Celery's result backend refuses a `rediss://` URL
    without TLS options. Here, as with the store, the certificate is verified unless the URL has `ssl_cert_reqs=none`.

    Raises:
        UsageError: there is no broker, a URL names a cluster, or a TLS option of a URL is invalid.
    """
    for name, url in (("DECKHANDS_CELERY_URL", broker_url), ("DECKHANDS_CELERY_RESULT_URL", result_url)):
        if is_cluster_url(url) or (url == "" and url is broker_url):
            what = f"{name} names a Redis Cluster" if url else f"{name} is not set, and the store is a Redis Cluster"
            raise UsageError(
                f"{what}, which Celery's transport does not support.",
                remedy=f"Set {name} to a single server, or to one with Sentinels: redis://host:6379/0.",
            )
    address, tls = _split_tls_options(broker_url)
    found: dict[str, Any] = {"broker_url": address} | ({"broker_use_ssl": tls} if tls else {})
    if is_sentinel_url(broker_url):
        found["broker_transport_options"] = _name_primary(broker_url)
    if result_url:
        address, tls = _split_tls_options(result_url)
        found |= {"result_backend": address} | ({"redis_backend_use_ssl": tls} if tls else {})
        if is_sentinel_url(result_url):
            found["result_backend_transport_options"] = _name_primary(result_url)
    return found


def _split_tls_options(url: str) -> tuple[str, dict[str, Any]]:
    """Return kombu's URL without TLS options, and these options in redis-py's format; empty if it does not use TLS."""
    if is_sentinel_url(url):
        _, tls = _split_tls_options(_parse_sentinels(url).servers)
        return url.derive(_make_sentinel_url) if isinstance(url, UrlInFile) else _make_sentinel_url(url), tls
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        return url, {}
    shown = f"rediss://{parts.netloc.rpartition('@')[2]}"
    try:
        tls, _ = read_tls(dict(parse_url(url)))
    except ValueError as error:
        raise UsageError(
            f"The TLS options of the Celery URL {shown} cannot be used: {error}.",
            remedy="Name PEM files by ssl_ca_certs, ssl_certfile and ssl_keyfile in DECKHANDS_CELERY_URL.",
        ) from error
    return url.derive(_drop_tls_options) if isinstance(url, UrlInFile) else _drop_tls_options(url), tls


def _name_primary(url: str) -> dict[str, Any]:
    sentinels = _parse_sentinels(url)
    names = ("password",) if len(sentinels.login) == 1 else ("username", "password")
    login = dict(zip(names, sentinels.login, strict=False))
    return {
        "master_name": sentinels.service,
        "sentinel_kwargs": {"socket_timeout": SENTINEL_SECONDS, "socket_connect_timeout": SENTINEL_SECONDS, **login},
    }


def _make_sentinel_url(url: str) -> str:
    """Return kombu's form of a URL: one for each Sentinel, with the login and database of the servers."""
    sentinels = _parse_sentinels(url)
    servers = urlsplit(sentinels.servers)
    login = f"{servers.netloc.rpartition('@')[0]}@" if "@" in servers.netloc else ""
    hosts = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in sentinels.sentinels)
    return ";".join(f"sentinel://{login}{host}{servers.path}" for host in hosts)


def _parse_sentinels(url: str) -> SentinelUrl:
    try:
        return SentinelUrl.parse(url)
    except ValueError as error:
        raise UsageError(
            f"The Celery URL {hide_password(url)} cannot be used: {error}.",
            remedy="Use redis+sentinel://user:password@host:26379,host:26379/name/1.",
        ) from error


def _drop_tls_options(url: str) -> str:
    parts = urlsplit(url)
    others = [(name, value) for name, value in parse_qsl(parts.query) if not name.startswith("ssl_")]
    return urlunsplit(parts._replace(query=urlencode(others)))


def _write_as_log(message: str, _: Any = None) -> None:
    """Write Celery's message at once. It comes from a signal handler, where a logger in use cannot be called."""
    record = logging.LogRecord("celery.worker", logging.INFO, "", 0, "%s", (message,), None)
    for handler in logging.getLogger().handlers[:1]:
        with suppress(OSError):
            os.write(STANDARD_ERROR, f"{handler.format(record)}\n".encode())


def _log_as_json(role: str) -> None:
    """Make the log handlers that Celery adds, also those for tasks, write JSON."""

    def format_lines(logger: logging.Logger, **_: Any) -> None:
        use_json(role, logger)
        use_json(role, get_multiprocessing_logger())

    signals.after_setup_logger.connect(format_lines, weak=False)
    signals.after_setup_task_logger.connect(format_lines, weak=False)


def _use_own_broker(app: Celery) -> None:
    """Always connect to the application's own broker, even if CELERY_BROKER_URL names another one."""
    url = app.conf["broker_url"]
    for name in ("connection_for_read", "connection_for_write"):
        setattr(app, name, partial(_connect, getattr(app, name), url))


def _connect(connect: Callable[..., Any], own_url: str, url: str | None = None, **options: Any) -> Any:
    if isinstance(own_url, UrlInFile):
        with suppress(UsageError):  # the login is read again at each attempt, see `logins`
            own_url = own_url.derive(str)
    return connect(url or own_url, **options)
