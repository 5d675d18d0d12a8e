"""`deckhands up`: its port, the remains of a killed one, workers that join it, and the speed of `--help`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from celery import Celery

from broker.store.store import open_store
from tests.integration.command_line import COMMAND, cluster, deckhands, environment, finished, read_until, started
from tests.polling import unhurried, until
from tests.programs import command_of
from tests.turns import bash, call, finish, script


def test_a_port_with_a_password_for_other_programs(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with cluster(tmp_path, "--port", str(port), "--sandbox", "none"):
        password = (tmp_path / "cluster" / "valkey" / "password").read_text()
        asyncio.run(check(f"redis://:{password}@127.0.0.1:{port}/0"))
        assert deckhands("ls", env=environment(tmp_path)).code == 0


async def check(url: str) -> None:
    await (await open_store(url)).aclose()


def test_remains_of_a_killed_up_block_nothing(tmp_path):
    env = environment(tmp_path)
    with started("up", "--controllers", "1", "--tools", "0", env=env) as first:
        read_until(first, "Ctrl-C stops it")
        cid = deckhands("submit", "-t", "Do it.", "--model", script(tmp_path / "x"), env=env).out.strip()
        below = psutil.Process(first.pid).children()
        first.kill()
    asyncio.run(until(lambda: not any(child.is_running() for child in below), what="end of its children"))
    gone = deckhands("submit", "-t", "x", env=env)
    assert (gone.code, gone.err.startswith("deckhands: No cluster is running here.")) == (1, True)
    for verb in ("show", "logs", "export"):
        unknown = deckhands(verb, cid, env=env)
        assert (unknown.code, unknown.err.startswith("deckhands: No cluster is running here.")) == (1, True)
    listed = deckhands("ls", env=env)
    assert (listed.code, listed.err) == (0, "The cluster is not up, so its conversations are not listed.\n")

    with started("up", "--controllers", "0", "--tools", "0", env=env) as second:
        read_until(second, "Ctrl-C stops it")
        assert deckhands("show", cid, "--json", env=env).json[0]["conversation_id"] == cid
        second.send_signal(signal.SIGTERM)
        done = finished(second)
    assert (done.code, done.err) == (0, "Stopped.\n")
    assert not (tmp_path / "cluster" / "url").exists()


def test_printed_command_lists_conversations_of_both_workers(tmp_path):
    env = environment(tmp_path)
    waiting = bash("sleep 300", timeout="300")
    model = script(tmp_path / "model.json", waiting)
    with started("up", "--sandbox", "none", "--ingresses", "2", env=env) as running:
        greeting = "".join(read_until(running, "Ctrl-C stops it"))
        assert "1 controller worker, 1 tool worker, 2 ingress workers, 1 jobs worker and 1 beat." in greeting
        assert "page:   not served: start with --web, or run `deckhands serve` in another terminal" in greeting
        assert (tmp_path / "cluster" / "valkey" / "password").read_text() not in greeting
        (command,) = re.findall(r"ask: +(.+)", greeting)
        cid = deckhands("submit", "-t", "Wait.", "--model", model, env=env).out.strip()

        def answers() -> dict[str, list[str]]:
            asked = subprocess.run(f"{command} --json -t 4", shell=True, capture_output=True, cwd=tmp_path, check=False)
            return json.loads(asked.stdout) if asked.returncode == 0 else {}

        def both_have_it_and_no_other() -> bool:
            return {name.partition("-")[0]: found for name, found in answers().items()} == {
                "controller": [cid],
                "tool": [cid],
                "ingress": [],
                "jobs": [],
            }

        asyncio.run(until(both_have_it_and_no_other, limit=120, what="all workers' answers"))
        assert task(greeting, "cancel", cid)["conversation_id"] == cid
        shown = partial(asyncio.to_thread, deckhands, "show", cid, "--json", env=env)

        async def is_stopped() -> bool:
            return (await shown()).json[0]["state"] == "stopped"

        asyncio.run(until(is_stopped, limit=60, what="the end of the agent"))
        refusing = command.replace("inspect conversations", "control drain --json -t 4")
        drained = subprocess.run(refusing, shell=True, capture_output=True, cwd=tmp_path, text=True, check=False).stdout
    assert "tool workers do not accept this command" in drained
    logs = "".join(log.read_text() for log in (tmp_path / "cluster" / "logs").glob("*.log"))
    assert "Traceback" not in logs


def test_foreground_ingress_serves_the_local_cluster(tmp_path):
    env = environment(tmp_path)
    with started(
        "up", "--controllers", "0", "--tools", "0", "--ingresses", "0", "--jobs", "0", "--beats", "0", env=env
    ) as running:
        greeting = "".join(read_until(running, "Ctrl-C stops it"))
        assert "0 ingress workers, 0 jobs workers and 0 beats." in greeting
        with started("ingress", env=env) as ingress:
            cid = task(greeting, "submit", "Do it.", model=script(tmp_path / "x"))
            assert deckhands("show", cid, "--json", env=env).json[0]["title"] == "Do it."
            ingress.send_signal(signal.SIGTERM)
            done = finished(ingress)
        assert done.code == 0
        assert "Traceback" not in done.err


def celery_address(greeting: str) -> str:
    """The address of Celery's broker that `up` has printed, with the password of the file that it names."""
    (address,), (file,) = re.findall(r"celery: (\S+)", greeting), re.findall(r"content of (\S+)", greeting)
    password = Path(file).read_text()
    assert password not in greeting
    return address.replace("PASSWORD", password)


def task(greeting: str, name: str, *arguments: str, **options: str) -> Any:
    """Send a task to the ingresses at the address that `up` has printed, and return its result."""
    address = celery_address(greeting)
    with Celery("shop", broker=address, backend=address, set_as_current=False) as app:
        return app.send_task(f"deckhands.{name}", arguments, options, queue="deckhands").get(timeout=60)


def test_a_worker_is_replaced_though_nobody_reads_of_it(tmp_path):
    env = environment(tmp_path, PYTHONUNBUFFERED="")
    with started("up", "--controllers", "1", "--tools", "0", env=env) as running:
        read_until(running, "Ctrl-C stops it")
        running.stderr.close()

        def workers() -> set[int]:
            below = psutil.Process(running.pid).children()
            return {child.pid for child in below if "controller_worker" in command_of(child)}

        (first,) = workers()
        os.kill(first, signal.SIGKILL)
        asyncio.run(until(lambda: bool(workers() - {first}), what="another worker"))
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=unhurried(60)) == 0


def test_cluster_started_by_nohup_survives_its_terminal(tmp_path):
    with started("up", "--controllers", "0", "--tools", "0", env=environment(tmp_path), before="nohup") as running:
        read_until(running, "Ctrl-C stops it")
        running.send_signal(signal.SIGHUP)
        assert deckhands("submit", "-t", "x", "--model", script(tmp_path / "x"), env=environment(tmp_path)).code == 0
        running.send_signal(signal.SIGTERM)
        assert finished(running).code == 0


def test_help_uses_less_than_a_third_second_of_cpu():
    with subprocess.Popen([*COMMAND, "--help"], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        text = running.stdout.read().decode()
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    assert running.returncode == 0
    assert "  submit " in text
    assert usage.ru_utime + usage.ru_stime < 0.3


def is_offered(env: dict[str, str]) -> bool:
    return "add " in deckhands("tools", "--list", env=env).out


def test_a_tool_worker_joins_the_cluster_that_runs_here(tmp_path: Path) -> None:
    env = environment(tmp_path, DECKHANDS_SANDBOX="none")
    with started("up", "--tools", "0", "--sandbox", "none", env=environment(tmp_path)) as running:
        read_until(running, "Ctrl-C stops it")
        worker = {**env, "DECKHANDS_TOOLS": "tests.example_tools:add", "EXAMPLE_TOOLS_TRACE": str(tmp_path / "trace")}
        worker |= {"DECKHANDS_NODE": "joining", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        with started("tools", env=worker):
            asyncio.run(until(lambda: asyncio.to_thread(is_offered, env), limit=60, what="the tool"))
            adding = call("add", first=2)
            model = script(tmp_path / "m.json", adding, finish("Done."))
            cid = deckhands("submit", "-t", "x", "--tool", "add", "--model", model, env=env).out.strip()
            followed = deckhands("logs", "-f", cid, env=env)
    assert followed.code == 0, followed
    assert "3" in followed.out.splitlines()[-2], followed


def test_a_worker_without_a_cluster_says_so(tmp_path: Path) -> None:
    for verb in ("tools", "controller"):
        done = deckhands(verb, env=environment(tmp_path))
        assert (done.code, "DECKHANDS_URL is not set, and no cluster is running here." in done.err) == (2, True), done


def test_a_cluster_beside_another_store_says_which_one_is_used(tmp_path: Path) -> None:
    env = environment(tmp_path, DECKHANDS_URL="unix:///nowhere/s")
    with started("up", "--tools", "0", "--controllers", "0", env=env) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("DECKHANDS_URL names another store: ")
