"""The scheduler of the beat: celery-redbeat's, but it trusts only the time of a job's last run in Celery's broker.

Holds: the application alone decides which jobs are sent, and how often. A client that can write to the broker cannot
make the beat send anything else; an unreadable entry counts as never sent. A key of another type is removed, and so is
a lock that would never expire. A beat that has lost the lock sends nothing until it holds it again.
Keys, in Celery's broker: see `celery_app`.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

from redbeat.schedulers import RedBeatConfig, RedBeatScheduler, RedBeatSchedulerEntry, get_redis
from redis.exceptions import ConnectionError, LockNotOwnedError, ResponseError, TimeoutError  # noqa: A004

from broker.celery import redis_url, split_login
from broker.runtime import UrlInFile

MAX_CLOCK_DIFFERENCE = timedelta(minutes=10)
"""Tolerated difference between the clocks of two beats; a later last run is not believed."""

_log = logging.getLogger(__name__)


class BeatConfig(RedBeatConfig):  # type: ignore[misc]
    """The settings of celery-redbeat, with the URL of the application's broker.

    As a setting of the application, the URL with its password would be shown by remote control.
    """

    def either_or(self, name: str, default: Any = None) -> Any:
        """Return a setting."""
        broker_url = self.app.conf.broker_url
        is_behind_sentinels = broker_url.startswith("sentinel://")
        if name == "redbeat_redis_url":
            return "redis-sentinel://" if is_behind_sentinels else redis_url(split_login(broker_url)[0])
        found = super().either_or(name, default)
        return (
            found | self._find_sentinels(broker_url)
            if name == "redbeat_redis_options" and is_behind_sentinels
            else found
        )

    def _find_sentinels(self, broker_url: str) -> dict[str, Any]:
        """Return the options for the Sentinels of the broker, with the login of its servers."""
        places = [urlsplit(url) for url in broker_url.split(";")]
        options = self.app.conf.broker_transport_options
        found = {
            "sentinels": [(place.hostname, place.port) for place in places],
            "service_name": options["master_name"],
            "sentinel_kwargs": options["sentinel_kwargs"],
            "db": int(places[0].path.strip("/") or 0),
        }
        if isinstance(broker_url, UrlInFile):  # its login comes from the file, each time
            return found
        login = {"username": places[0].username, "password": places[0].password}
        return found | {name: unquote(text) for name, text in login.items() if text}

    def is_key_in_conf(self, name: str) -> bool:
        """Return whether a setting is given."""
        return name == "redbeat_redis_url" or bool(super().is_key_in_conf(name))


class JobEntry(RedBeatSchedulerEntry):  # type: ignore[misc]
    """A periodic job and the time of its last run."""

    @classmethod
    def from_key(cls, key: str, app: Any = None) -> JobEntry:
        """Return the entry of a key.

        Raises:
            KeyError: the entry does not exist yet, or the application has no such job.
        """
        if not get_redis(app).exists(key):
            raise KeyError(key)
        return cls.load_job(key.removeprefix(app.redbeat_conf.key_prefix), app)

    @classmethod
    def load_job(cls, name: str, app: Any) -> JobEntry:
        """Return the entry of a job. A lost or damaged entry counts as never sent."""
        entry = cls(**app.conf.beat_schedule[name], name=name, app=app)
        entry.last_run_at = _find_last_run(cls.generate_key(app, name), app, entry.default_now())
        return entry


def _find_last_run(key: str, app: Any, now: datetime) -> datetime | None:
    try:
        found = RedBeatSchedulerEntry.load_meta(key, app)["last_run_at"]
        if found is None or (isinstance(found, datetime) and found <= now + MAX_CLOCK_DIFFERENCE):
            return found
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, ResponseError):
        _log.exception("the time of the last run of %s cannot be read", key)
    return None


class JobScheduler(RedBeatScheduler):  # type: ignore[misc]
    """Sends the jobs of the application when they are due, while it holds the lock."""

    Entry = JobEntry

    def __init__(self, app: Any, **options: Any) -> None:
        app.redbeat_conf = BeatConfig(app)
        super().__init__(app, **options)

    def setup_schedule(self) -> None:
        """Write the known jobs to the broker."""
        get_redis(self.app).ping()  # waits for the broker
        self._remove_unusable_keys()
        super().setup_schedule()

    @property
    def schedule(self) -> dict[str, JobEntry]:
        """All jobs by name."""
        return {name: JobEntry.load_job(name, self.app) for name in self.app.conf.beat_schedule}

    def tick(self, *arguments: Any, **options: Any) -> float:
        """Send the due jobs, and return the number of seconds until the next tick."""
        try:
            if self._remove_unusable_keys() and self.lock is not None:
                self.lock.acquire(blocking=False)  # if another beat held it, that beat finds out in the same way
            seconds: float = super().tick(*arguments, **options)
        except LockNotOwnedError:
            _log.warning("this beat was stopped for longer than its lock lasts; it waits for the lock")
            self.lock.acquire()
            return 0.0
        except (ConnectionError, TimeoutError) as error:
            _log.warning("Celery's broker does not answer: %s", error)
            return float(self.max_interval)
        return seconds

    def _remove_unusable_keys(self) -> bool:
        """Remove unusable keys, and return whether the lock was among them."""
        conf, client = self.app.redbeat_conf, get_redis(self.app)
        kinds = {conf.schedule_key: "zset", conf.statics_key: "set"}
        kinds |= {JobEntry.generate_key(self.app, name): "hash" for name in self.app.conf.beat_schedule}
        with client.pipeline(transaction=False) as pipe:
            for key in (*kinds, conf.lock_key):
                pipe.type(key)
            pipe.pttl(conf.lock_key)
            *found, kind_of_lock, left = pipe.execute()
        for (key, kind), there in zip(kinds.items(), found, strict=True):
            if there not in (kind, "none"):
                _log.error("%s is not a %s and is removed", key, kind)
                client.delete(key)
        try:
            client.smembers(conf.statics_key)
        except UnicodeDecodeError:
            client.delete(conf.statics_key)
        if kind_of_lock in ("string", "none") and left != -1 and left <= 1000 * conf.lock_timeout:
            return False
        _log.error("the lock %s would never expire and is removed", conf.lock_key)
        client.delete(conf.lock_key)
        return True
