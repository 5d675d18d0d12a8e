"""Remote control looks at workers and drains them; it steers them only where the broker has a password."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from celery import Celery
from celery.utils.collections import AttributeDict

from broker.celery.app import make_app
from broker.celery.remote_control import PASSWORD_COMMANDS, READ_ONLY_COMMANDS
from tests.faults.harness import FaultCluster
from tests.polling import until
from tests.security.hostile_messages import COMMANDS, plain_command
from tests.stores import RealServer, emptied

REFUSED = sorted(name for name in set(COMMANDS) - READ_ONLY_COMMANDS - {"drain", "conversations"} if name)


async def test_broker_without_a_password_controls_no_worker(tmp_path: Path, valkey_server: RealServer) -> None:
    await emptied(valkey_server.url)
    broker = f"redis+socket://{valkey_server.socket}"
    async with FaultCluster(tmp_path).running() as cluster:
        named = {"DECKHANDS_CELERY_URL": broker}
        workers = [cluster.start_controller(**named), cluster.start_tool(**named)]
        asking = Celery("asking", broker=broker, set_as_current=False).control
        await until(lambda: len(asking.ping(timeout=2.0, limit=2)) == 2, what="both workers")
        for command in REFUSED:
            answers = asking.broadcast(command, reply=True, timeout=10.0, limit=2)
            assert len(answers) == 2, command
            for answer in answers:
                (refusal,) = answer.values()
                assert refusal["error"].startswith(f"The command {command!r} is refused: "), refusal
        assert [worker.poll() for worker in workers] == [None, None]
        assert len(asking.inspect(timeout=5.0, limit=2).stats() or {}) == 2


@pytest.mark.parametrize(
    ("url", "may_steer"),
    [
        ("redis://127.0.0.1:1/0", False),
        ("redis+socket:///tmp/s?virtual_host=1", False),
        ("redis://user@127.0.0.1:1/0", False),
        ("redis://:secret@127.0.0.1:1/0", True),
        ("rediss://user:secret@127.0.0.1:1/0", True),
    ],
)
def test_a_password_of_the_broker_opens_what_stops_and_steers(url: str, *, may_steer: bool) -> None:
    app = make_app("controller", url)
    allowed = app.control.mailbox.Node("worker", state=AttributeDict(app=app)).allowed
    assert PASSWORD_COMMANDS.isdisjoint(allowed) is not may_steer
    assert {"ping", "stats", "conversations", "drain"} <= allowed
    assert {"pool_restart", "add_consumer", "cancel_consumer", "revoke", "rate_limit"}.isdisjoint(allowed)


async def test_an_answer_goes_nowhere_but_to_the_queue_of_answers(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_tool()
        broker = redis.Redis.from_url(cluster.store.url, db=1)
        asking = Celery("asking", broker=cluster.store.celery_url, set_as_current=False).control
        await until(lambda: asking.ping(timeout=2.0, limit=1), what="the worker")
        for exchange in ("", "celery.pidbox", "celeryev"):
            reply_to = {"exchange": exchange, "routing_key": "somebody's list"}
            broker.publish("/1.celery.pidbox", plain_command("ping", reply_to=reply_to, ticket="t"))
        assert asking.ping(timeout=10.0, limit=1)  # those before it have been read
        assert not broker.exists("somebody's list")
        assert "its reply queue is invalid: 'celeryev'" in cluster.log_of("t1")
        broker.close()


def test_the_workers_take_json_alone_and_neither_gossip_nor_mingle() -> None:
    app = make_app("tool", "redis://127.0.0.1:1/0")
    assert app.conf.accept_content == ["json"]
    worker = app.WorkController(hostname="tool@test", pool_cls="threads", concurrency=1)  # as `celery worker` makes it
    names = {step.name for step in worker.consumer.steps}
    assert {"Tasks", "Control"} <= {name.rpartition(".")[2] for name in names}, names
    assert not {"Gossip", "Mingle"} & {name.rpartition(".")[2] for name in names}
