"""A compose project of compose.yaml on a real engine, for tests that look at its containers.

Holds: every command has a limit, and one that fails shows its output.
Does not: install an engine, nor keep images.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.test_compose import COMPOSE, made_env

LIMIT_SECONDS = 120.0
DOWN_LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Project:
    """A compose project in a folder that has its `.env`, with ports on this machine."""

    folder: Path
    passwords: Mapping[str, str]
    flower_port: int
    queue_port: int
    gateway_port: int
    overrides: tuple[Path, ...]

    def compose(self, *arguments: str, limit: float = LIMIT_SECONDS, **options: Any) -> str:
        """Run `docker compose` and return its output."""
        command = ["docker", "compose", "-p", self.folder.name, "--env-file", str(self.folder / ".env")]
        command += ["--profile", "gateway"]
        for file in (COMPOSE, *self.overrides, self.folder / "scripts.yaml"):
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
        return [(row["conversation_id"], row["state"]) for row in rows]

    def events(self, conversation_id: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.deckhands("export", conversation_id).splitlines()]

    def down(self) -> None:
        """Remove it with its volumes, and keep its containers' logs."""
        (self.folder / "containers.log").write_text(self.compose("logs", "--no-color", "--timestamps"))
        self.compose("--profile", "*", "down", "--volumes", "--timeout", "20", limit=DOWN_LIMIT_SECONDS)


def project_in(folder: Path, *overrides: Path, **settings: object) -> Project:
    """Write the files of a project into a folder, and return it; nothing is started.

    Args:
        overrides: files for compose beside compose.yaml.
        settings: further lines of `.env`.
    """
    env = made_env(folder)
    passwords = dict(re.findall(r"(\w+)_PASSWORD=(\w+)", env.read_text()))
    flower, queue, gateway, store = (free_port() for _ in range(4))
    ports = {"FLOWER_PORT": flower, "QUEUE_PORT": queue, "GATEWAY_PORT": gateway, "STORE_PORT": store}
    with env.open("a") as file:
        file.writelines(f"{name}={value}\n" for name, value in (ports | settings).items())
    write_scripts(folder)
    return Project(folder, passwords, flower, queue, gateway, overrides)


def image_is_there(image: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", image], check=False, capture_output=True).returncode == 0


def engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = (["docker", "info"], ["docker", "compose", "version"])
    return all(subprocess.run(command, check=False, capture_output=True).returncode == 0 for command in asked)


def write_scripts(folder: Path) -> None:
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
    controller = {"volumes": [mount], "environment": {"LLM_SCRIPTS_DIR": "/scripts"}}
    (folder / "scripts.yaml").write_text(json.dumps({"services": {"controller": controller}}))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def outputs(events: list[dict[str, Any]]) -> list[str]:
    return [event["content"].strip() for event in events if event["kind"] == "observation.run"]


def docker(*arguments: str) -> str:
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


async def until_health(container: str, wanted: str) -> None:
    """Wait for the container's health that the engine reports on each change."""
    events = await asyncio.create_subprocess_exec(
        *("docker", "events", "--filter", f"container={container}", "--filter", "event=health_status", "--since", "1m"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert events.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            while docker("inspect", "-f", "{{.State.Health.Status}}", container) != wanted:
                assert await events.stdout.readline()
    finally:
        events.terminate()
        await events.wait()
