"""The containers, tried with a real engine: up, at work, killed, hung, and watched.

The image is built unless there is one; `IMAGE` names another one, `BASE_IMAGE` another base to build it from. What the
containers logged is kept beside the test's other files, in `containers.log`. Run by `pytest -m docker`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from tests.integration.test_compose import COMPOSE, PRODUCERS, STAYING, made_env
from tests.polling import until

BUILD_LIMIT_SECONDS = 900
UP_LIMIT_SECONDS = 300
LIMIT_SECONDS = 120.0
OWNER = """
import asyncio, os, sys
from broker.store.connection import MultiplexedConnection
async def main():
    connection = MultiplexedConnection(os.environ["DECKHANDS_URL"])
    print((await connection.call("HGET", "deck:{0}:c:%s:meta" % sys.argv[1], "owner")).decode())
asyncio.run(main())
"""

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(BUILD_LIMIT_SECONDS + UP_LIMIT_SECONDS)]


@dataclass(frozen=True)
class Project:
    """A compose project of the trial."""

    folder: Path
    flower_port: int
    queue_port: int
    passwords: Mapping[str, str]

    def compose(self, *arguments: str, limit: float = LIMIT_SECONDS, **options: Any) -> str:
        """Run `docker compose` and return what it prints."""
        command = ["docker", "compose", "-p", self.folder.name, "--env-file", str(self.folder / ".env")]
        for file in (COMPOSE, PRODUCERS, self.folder / "scripts.yaml"):
            command += ["-f", str(file)]
        command += arguments
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit, **options)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers."""
        return self.compose("ps", "-q", service).split()

    def deckhands(self, *arguments: str) -> str:
        """Run the command line in a container."""
        return self.compose("run", "--rm", "-T", "cli", *arguments)

    def submit(self, script: str, *options: str) -> str:
        model = f"scripted//scripts/{script}.json"
        return self.deckhands("submit", "-t", "do it", "--model", model, *options).split()[-1]

    def listed(self, label: str) -> list[tuple[str, str]]:
        """Return the conversations of the store that have a label: their ids and states."""
        rows = map(json.loads, self.deckhands("ls", "--label", label, "--json").splitlines())
        return [(row["id"], row["state"]) for row in rows]

    def events(self, conversation_id: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.deckhands("export", conversation_id).splitlines()]


def _engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = (["docker", "info"], ["docker", "compose", "version"])
    return all(subprocess.run(command, check=False, capture_output=True).returncode == 0 for command in asked)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The whole cluster, up and healthy, with two controllers and two tool workers."""
    if not _engine_answers():
        pytest.skip("no docker engine with compose answers here")
    folder = tmp_path_factory.mktemp("deckhands-trial")
    env = made_env(folder)
    passwords = dict(re.findall(r"(\w+)_PASSWORD=(\w+)", env.read_text()))
    project = Project(folder, _free_port(), _free_port(), passwords)
    image = os.environ.get("IMAGE", "deckhands:latest")
    rules = folder / "retention.toml"
    rules.write_text('[[rule]]\nlabels = {stays = "no"}\nage = "1s"\n')
    with env.open("a") as file:
        file.write(f"FLOWER_PORT={project.flower_port}\nIMAGE={image}\n")
        file.write(f"QUEUE_PORT={project.queue_port}\nSTORE_PORT={_free_port()}\nRETENTION_FILE={rules}\n")
    _write_scripts(folder)
    if subprocess.run(["docker", "image", "inspect", image], check=False, capture_output=True).returncode != 0:
        project.compose("build", "controller", limit=BUILD_LIMIT_SECONDS)
    try:
        project.compose(
            *("up", "-d", "--no-build", "--wait", "--scale", "controller=2", "--scale", "tools=2"),
            *STAYING,
            limit=UP_LIMIT_SECONDS,
        )
        yield project
    finally:
        (folder / "containers.log").write_text(project.compose("logs", "--no-color", "--timestamps"))
        project.compose("down", "--volumes", "--timeout", "20", limit=UP_LIMIT_SECONDS)


def _write_scripts(folder: Path) -> None:
    """Scripts of models, where containers of another user can read them."""
    scripts = folder / "scripts"
    scripts.mkdir()
    finish = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
    commands = {
        "short": ["echo one > a.txt", "cat a.txt"],
        "long": ["echo began >> a.txt", "sleep 600; echo never >> a.txt", "cat a.txt"],
        "prying": [
            "id -u",
            "cat /proc/[0-9]*/environ 2>/dev/null | grep -c redis://",
            "ls /var/lib/deckhands",
            "(echo >/dev/tcp/store/6379) 2>/dev/null || echo no way to the store",
            "unshare --map-root-user true 2>/dev/null || echo no namespaces",
            "echo x 2>/dev/null >/proc/sys/kernel/core_pattern || echo no kernel settings",
        ],
        "secret": ["echo the token is $API_TOKEN", "echo -n $API_TOKEN | wc -c", "env | grep -c API_ || true"],
    }
    for name, lines in commands.items():
        calls = [{"name": "execute_bash", "arguments": {"command": line, "timeout": 900}} for line in lines]
        script = {"turns": [*({"tool_calls": [call]} for call in calls), finish]}
        (scripts / f"{name}.json").write_text(json.dumps(script))
    for path in (folder, *folder.parents[:2], scripts):
        path.chmod(path.stat().st_mode | 0o055)
    mount = {"type": "bind", "source": str(scripts), "target": "/scripts", "read_only": True}
    (folder / "scripts.yaml").write_text(json.dumps({"services": {"controller": {"volumes": [mount]}}}))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _outputs(events: list[dict[str, Any]]) -> list[str]:
    return [event["content"].strip() for event in events if event["kind"] == "observation.run"]


def _docker(*arguments: str) -> str:
    ended = subprocess.run(
        ["docker", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_every_service_is_healthy_and_nobody_is_root(project: Project) -> None:
    counts = {name: len(project.containers(name)) for name in STAYING}
    assert counts == {"store": 1, "queue": 1, "controller": 2, "tools": 2, "door": 1, "jobs": 1, "beat": 1, "flower": 1}
    for name in STAYING:
        for container in project.containers(name):
            assert _docker("inspect", "-f", "{{.State.Health.Status}}", container) == "healthy"
            assert _docker("exec", container, "id", "-u") == "10001"
            written = subprocess.run(["docker", "exec", container, "touch", "/opt/x"], check=False, capture_output=True)
            assert b"Read-only file system" in written.stderr


def test_a_conversation_is_carried_out(project: Project) -> None:
    conversation_id = project.submit("short")
    project.deckhands("logs", "-f", conversation_id)
    observations = [
        (event["kind"], event["content"].strip())
        for event in project.events(conversation_id)
        if event["kind"] in ("observation.run", "observation.error", "observation.outcome_unknown")
    ]
    assert observations == [("observation.run", ""), ("observation.run", "one")]


def test_a_conversation_reaches_nothing_but_its_workspace(project: Project) -> None:
    conversation_id = project.submit("prying")
    project.deckhands("logs", "-f", conversation_id)
    assert _outputs(project.events(conversation_id)) == [
        "1000",
        "0",
        "ls: cannot access '/var/lib/deckhands': No such file or directory",
        "no way to the store",
        "no namespaces",
        "no kernel settings",
    ]
    held = "the sandbox is bwrap; commands of agents reach their own workspace"
    assert project.compose("logs", "tools").count(held) == 2


def test_a_secret_is_for_the_commands_that_name_it(project: Project) -> None:
    run = ("run", "--rm", "-T", "-e", "API_TOKEN=correct-horse-battery", "cli")
    model = ("--model", "scripted//scripts/secret.json")
    conversation_id = project.compose(*run, "submit", "-t", "do it", *model, "--secret", "API_TOKEN").split()[-1]
    project.deckhands("logs", "-f", conversation_id)
    assert _outputs(project.events(conversation_id)) == ["the token is <secret_hidden>", "21", "0"]


async def test_killed_containers_lose_nothing(project: Project) -> None:
    conversation_id = project.submit("long")

    def at_work() -> list[str]:
        return [one for one in project.containers("tools") if "sleep 600" in _docker("top", one, "-eo", "pid,cmd")]

    await until(at_work, limit=LIMIT_SECONDS, what="tool worker that sleeps")
    (tools,) = at_work()
    store = project.containers("store")[0]
    owner = _docker("exec", store, "python", "-c", OWNER, conversation_id).split("-")[1]
    (controller,) = [one for one in project.containers("controller") if one.startswith(owner)]
    _docker("kill", "-s", "KILL", tools, controller)
    try:
        project.deckhands("logs", "-f", conversation_id)
        events = project.events(conversation_id)
        assert _outputs(events) == ["", "began"]
        assert [event["kind"] for event in events].count("observation.outcome_unknown") == 1
        assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    finally:
        _docker("start", tools, controller)
        for container in (tools, controller):
            await _until_health(container, "healthy")


async def test_a_worker_that_hangs_is_unhealthy(project: Project) -> None:
    container = project.containers("tools")[0]
    # The worker itself, not the init before it, nor the workspace hosts, nor this shell.
    worker = r"""for p in /proc/[0-9]*; do case $(tr '\0' ' ' <$p/cmdline) in /opt/*' -m tool_worker '*) echo ${p#/proc/}; esac; done"""
    pid = _docker("exec", container, "sh", "-c", worker)
    _docker("exec", container, "sh", "-c", f"kill -STOP {pid}")
    try:
        await _until_health(container, "unhealthy")
    finally:
        _docker("exec", container, "sh", "-c", f"kill -CONT {pid}")
    await _until_health(container, "healthy")


async def test_flower_wants_the_password_and_lists_every_kind_of_worker(project: Project) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{project.flower_port}", timeout=LIMIT_SECONDS) as flower:
        for login in (None, ("deckhands", "wrong")):
            assert (await flower.get("/api/workers", auth=login)).status_code == 401

        async def roles() -> list[str]:
            login = ("deckhands", project.passwords["FLOWER"])
            answer = await flower.get("/api/workers", params={"refresh": "1"}, auth=login)
            return sorted(name.partition("-")[0] for name, about in answer.json().items() if "stats" in about)

        async def all_are_listed() -> bool:
            found = await roles()
            return all(
                found.count(role) >= count for role, count in (("controller", 2), ("tool", 2), ("door", 1), ("jobs", 1))
            )

        await until(all_are_listed, limit=LIMIT_SECONDS, what="all workers in Flower")


async def test_an_agent_is_a_celery_task_of_an_application_outside(project: Project) -> None:
    address = f"127.0.0.1:{project.queue_port}/0"
    nobody = Celery("shop", broker=f"redis://:wrong@{address}", set_as_current=False)
    with pytest.raises(OperationalError, match="username-password pair"):
        nobody.send_task("deckhands.run", ["do it"], queue="deckhands", retry=False)
    url = f"redis://producer:{project.passwords['PRODUCER']}@{address}"
    app = Celery("shop", broker=url, backend=url, set_as_current=False)
    sent = app.send_task("deckhands.run", ["do it"], {"model": "scripted//scripts/short.json"}, queue="deckhands")
    summary = await asyncio.to_thread(sent.get, timeout=LIMIT_SECONDS)
    assert (summary["state"], summary["message"]) == ("finished", "done")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{project.flower_port}", timeout=LIMIT_SECONDS) as flower:

        async def is_shown() -> bool:
            answer = await flower.get("/api/tasks", auth=("deckhands", project.passwords["FLOWER"]))
            shown = answer.json().get(sent.id, {})
            return (shown.get("name"), shown.get("state")) == ("deckhands.run", "SUCCESS")

        await until(is_shown, limit=LIMIT_SECONDS, what="the agent's task in Flower")


async def test_a_conversation_leaves_for_the_archive_by_a_rule(project: Project) -> None:
    conversation_id = project.submit("short", "--label", "stays=no")
    await until(
        lambda: not project.listed("stays=no"), limit=LIMIT_SECONDS, what="conversation that has left the store"
    )
    assert _outputs(project.events(conversation_id)) == ["", "one"]  # read in the archive


async def test_a_schedule_begins_conversations(project: Project) -> None:
    task = ("--cron", "* * * * *", "-t", "do it", "--model", "scripted//scripts/short.json")
    project.deckhands("schedule", "add", "each-minute", *task)

    def finished() -> list[str]:
        return [one for one, state in project.listed("schedule=each-minute") if state == "finished"]

    await until(finished, limit=LIMIT_SECONDS, what="conversation of the schedule")
    project.deckhands("schedule", "rm", "each-minute")
    assert _outputs(project.events(finished()[0])) == ["", "one"]


async def _until_health(container: str, wanted: str) -> None:
    """Wait for what the engine says of a container's health; the engine tells of each change."""
    events = await asyncio.create_subprocess_exec(
        *("docker", "events", "--filter", f"container={container}", "--filter", "event=health_status", "--since", "1m"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert events.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            while _docker("inspect", "-f", "{{.State.Health.Status}}", container) != wanted:
                assert await events.stdout.readline()
    finally:
        events.terminate()
        await events.wait()
