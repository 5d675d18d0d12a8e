"""Passwords of the store and of Celery's broker stay out of what people and other programs are shown."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
from celery import Celery

from broker.celery.remote_control import READ_ONLY_COMMANDS
from tests.faults.harness import FaultCluster
from tests.ingress_parts import all_present
from tests.polling import until
from tests.programs import command_of


async def test_no_answer_log_or_command_line_holds_the_password(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        workers = [cluster.start_controller(), cluster.start_tool(), cluster.start_ingress(), cluster.start_jobs()]
        password = (tmp_path / "valkey" / "password").read_text()
        await all_present(cluster)
        asking = Celery("asking", broker=cluster.store.celery_url, set_as_current=False).control
        await until(lambda: len(asking.ping(timeout=2.0, limit=4)) == 4, what="all workers")
        for command in sorted(READ_ONLY_COMMANDS):
            arguments = {"with_defaults": True} if command == "conf" else None
            answers = asking.broadcast(command, arguments, reply=True, timeout=10.0, limit=len(workers))
            assert len(answers) == len(workers), command
            assert password not in json.dumps(answers), command
        cluster.start_beat()
        await until(lambda: "Sending due task" in cluster.log_of("b1"), what="a job that is sent")
        assert not [worker for worker in cluster.workers if password in cluster.log_of(worker)]
        commands = [*filter(None, map(command_of, psutil.Process().children(recursive=True)))]
        assert len(commands) > len(workers)
        assert not [command for command in commands if password in " ".join(command)]
