"""Celery is configured here and nowhere else.

Celery is the chassis of both kinds of worker: their life cycle, remote control, Flower. It carries no work of
Deckhands: conversations and actions travel on streams, and its broker may be emptied at any time.

Holds: no result backend, JSON only, no gossip, no mingle; nothing whose only copy is in a Celery queue; no message ends
a worker, see `celery_messages`; what may be asked of a worker, see `remote_control`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery
from celery.utils.nodenames import host_format

from broker.celery.messages import Messages, WorkerConsumer
from broker.celery.remote_control import RemoteControl

LOADER = "celery.loaders.app:AppLoader"
SOCKET_TIMEOUT_SECONDS = 5.0
WORKER_OPTIONS = {
    "pool_cls": "threads",
    "concurrency": 2,
    "without_gossip": True,
    "without_mingle": True,
    "loglevel": "WARNING",
}


def run_until_told(app: Celery, name: str) -> int:
    """Run a worker of an application in the main thread and return its exit status.

    Without Celery's own command line, whose start loads every command there is, Flower too: a third of what a worker's
    start costs.

    Args:
        name: of the worker in Flower and `celery inspect`; `%h` stands for the host's name.
    """
    _keep_to_own_broker(app)
    worker = app.Worker(hostname=host_format(name), **WORKER_OPTIONS)
    worker.start()
    return int(worker.exitcode or 0)


def make_app(role: str, broker_url: str) -> Celery:
    """Make the Celery application of one kind of worker.

    Args:
        role: `controller` or `tool`; names its queue.
        broker_url: as kombu writes it: `redis://…`, or `redis+socket://:password@/path?virtual_host=1`.
    """
    configuration = {
        "broker_url": broker_url,
        "accept_content": ["json"],
        "task_serializer": "json",
        "worker_consumer": WorkerConsumer,
        "task_ignore_result": True,
        "task_acks_late": True,
        "task_default_queue": f"deckhands.{role}",
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_channel_error_retry": True,
        # The broker may be another process's restart away: coming back fast costs nothing here.
        "broker_transport_options": {
            "visibility_timeout": 3600,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
            "socket_keepalive": True,
            # Without these a broker that is gone without a word holds the worker's main thread for minutes.
            "socket_connect_timeout": SOCKET_TIMEOUT_SECONDS,
            "socket_timeout": SOCKET_TIMEOUT_SECONDS,
        },
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_prefetch_multiplier": 1,
        "control_queue_expires": 60.0,
    }
    # Named here, or the environment would name them: CELERY_LOADER and CELERY_CONFIG_MODULE of another application.
    return Celery(
        f"deckhands.{role}",
        loader=LOADER,
        config_source=configuration,
        set_as_current=True,
        amqp=Messages,
        control=RemoteControl,
    )


def _keep_to_own_broker(app: Celery) -> None:
    """Connect to the broker it was made with, though CELERY_BROKER_URL may name that of another application."""
    url = app.conf["broker_url"]
    for name in ("connection_for_read", "connection_for_write"):
        setattr(app, name, partial(_connected, getattr(app, name), url))


def _connected(connect: Callable[..., Any], own_url: str, url: str | None = None, **options: Any) -> Any:
    return connect(url or own_url, **options)
