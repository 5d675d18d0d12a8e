"""A worker's own secrets, the passwords that it shows to no one, and its report of the sandbox in force."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from celery import Celery
from redis import Redis

from broker.celery import redis_url
from broker.celery.remote_control import READ_ONLY_COMMANDS
from broker.coordination.membership import list_members
from deckhands.operations.jobs.celery_app import BEAT_KEYS
from tests.faults.harness import FaultCluster, make_due
from tests.ingress_parts import all_present
from tests.polling import until
from tests.programs import command_of

NO_CAPABILITIES = ("setpriv", "--inh-caps=-all", "--bounding-set=-all") if os.getuid() == 0 else ()
LOOK = """
import os, sys
for name, look in (("environ", open), ("mem", open), ("fd/0", os.readlink), ("cwd", os.readlink)):
    try:
        look(f"/proc/{sys.argv[1]}/{name}")
        print("open", end=" ")
    except PermissionError:
        print("closed", end=" ")
"""


def seen_by_a_program_of_the_same_user(pid: int) -> list[str]:
    look = [*NO_CAPABILITIES, sys.executable, "-I", "-S", "-c", LOOK, str(pid)]
    return subprocess.run(look, check=True, capture_output=True, text=True).stdout.split()


async def until_at_work(cluster: FaultCluster) -> None:
    async def all_beat() -> bool:
        return len(await list_members(cluster.client.store)) == len(cluster.workers)

    await cluster.until(all_beat)


async def test_workers_are_closed_to_programs_of_their_user(cluster: FaultCluster) -> None:
    cluster.started_by = NO_CAPABILITIES
    started = [cluster.start_controller(), cluster.start_tool()]
    await until_at_work(cluster)
    assert [seen_by_a_program_of_the_same_user(worker.pid) for worker in started] == [["closed"] * 4] * 2
    with subprocess.Popen([*NO_CAPABILITIES, "cat"], stdin=subprocess.PIPE) as ordinary:
        assert seen_by_a_program_of_the_same_user(ordinary.pid) == ["open"] * 4
        ordinary.communicate()


async def test_unsandboxed_command_cannot_find_worker_secrets(cluster: FaultCluster) -> None:
    secret, sign = secrets.token_hex(16), secrets.token_hex(16)
    cluster.started_by = NO_CAPABILITIES
    cluster.start_controller(GUARDED=secret)
    cluster.start_tool(GUARDED=secret, SANDBOX_ENV_SIGN=sign)
    await until_at_work(cluster)
    # In two halves, or the search would find itself.
    halves = [f"{value[:16]}''{value[16:]}" for value in (secret, sign)]
    search = "; ".join(f"cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c {half}" for half in halves)
    command = f"env | grep -c {halves[0]}; {search}"
    finish = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
    turns = [{"tool_calls": [{"name": "execute_bash", "arguments": {"command": command}}]}, finish]
    ids = await cluster.submit(turns)
    await cluster.settle(ids)
    (found,) = [event.content for event in await cluster.client.events(ids[0]) if event.kind == "observation.run"]
    in_own, in_others, sign_in_others = (int(line) for line in found.split())
    assert (in_own, in_others) == (0, 0)
    assert sign_in_others > 0  # the search does find what can be found


@pytest.mark.parametrize(
    ("sandbox", "line"),
    [
        (
            "bwrap",
            "INFO tool_worker.worker.consumer: the sandbox is bwrap; commands of agents reach their own workspace, and ",
        ),
        (
            "none",
            "INFO tool_worker.worker.consumer: the sandbox is none; commands of agents reach all that this worker's ",
        ),
        (
            "chroot",
            "ERROR tool_worker.worker.consumer: no sandbox is in force, so commands of agents are refused: There is no ",
        ),
    ],
)
async def test_tool_worker_reports_its_sandbox_at_once(cluster: FaultCluster, sandbox: str, line: str) -> None:
    cluster.start_tool(DECKHANDS_SANDBOX=sandbox)
    await cluster.until(lambda: line in cluster.log_of("t1"))
    await until_at_work(cluster)


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
        with Redis.from_url(redis_url(cluster.store.celery_url)) as broker:
            await until(lambda: broker.exists(f"{BEAT_KEYS}:schedule"), what="a beat that knows its jobs")
            make_due(broker, "retire")
        await until(lambda: "Sending due task" in cluster.log_of("b1"), limit=120.0, what="a job that is sent")
        assert not [worker for worker in cluster.workers if password in cluster.log_of(worker)]
        commands = [*filter(None, map(command_of, psutil.Process().children(recursive=True)))]
        assert len(commands) > len(workers)
        assert not [command for command in commands if password in " ".join(command)]
