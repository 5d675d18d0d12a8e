"""AG-UI with its own client from npm, which checks every event; connections break, and servers and workers are killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.harness import FaultCluster
from tests.faults.server_process import free_port
from tests.faults.server_process import server as server_process
from tests.ingress_parts import saying
from tests.integration.command_line import run_command
from tests.npm_packages import install_packages
from tests.page_blocks import blocks_of
from tests.polling import until
from tests.server_parts import Served, add_key, served_with_model
from tests.turns import finish, script

BUSY_SECONDS, SOAK_SECONDS = 900, 7_200
"""How long a test may take on a busy machine."""
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(BUSY_SECONDS)]
PROJECT = Path(__file__).parent / "ag_ui"
LIMIT_SECONDS = 120.0
WORDS = ["a", "bee", "sees", "the", "old", "harbour", "and", "waits", "for", "rain,", "naïve", "—", "港"]
CONFIRMED = {"agent": {"confirmation": {"mode": "always"}}}


def programs_of_page() -> dict[str, str]:
    """The JavaScript of the page, by the names in its first lines."""
    blocks = [block.text for block in blocks_of("docs/protocols.md") if block.language == "javascript"]
    return {block.split()[1].rstrip(":"): block for block in blocks}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with AG-UI's client and the programs of the page."""
    folder = install_packages(PROJECT, tmp_path_factory.mktemp("ag_ui") / "project")
    for name, text in programs_of_page().items():
        (folder / name).write_text(text)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served_with_model(tmp_path_factory.mktemp("ag-ui"), saying("three files")) as found:
        yield found


def turns_of(chosen: random.Random) -> list[dict[str, Any]]:
    """The turns of a scripted model until the agent waits for its user: texts, commands, questions, failures."""

    def say() -> str:
        return " ".join(chosen.choices(WORDS, k=chosen.randint(1, 60)))

    turns: list[dict[str, Any]] = []
    for number in range(chosen.randint(0, 3)):
        turn = run_command(f"echo {number} {chosen.choice(WORDS)}")
        turns.append(turn | ({"text": say()} if chosen.random() < 0.5 else {}))
    ends = [finish(say()), {"text": say()}, finish(say()) | {"text": say()}]
    return [*turns, chosen.choice(ends)]


def jobs(folder: Path, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Conversations of one to three messages, some with confirmations, some whose model fails at the end."""
    for number in range(count):
        chosen = random.Random(f"{seed}-{number}")
        said = [f"message {n}" for n in range(chosen.randint(1, 3))]
        turns = [turn for _ in said for turn in turns_of(chosen)]
        fails = chosen.random() < 0.1
        turns += [{"error": {"code": "authentication", "times": None}}] if fails else [finish("no more")] * 4
        model = script(folder / f"m{number}.json", *turns)
        job = {"thread": f"thread-{seed}-{number}", "model": model, "seed": chosen.getrandbits(31), "cut": True}
        yield job | {"said": [*said, *(["and more"] if fails else [])], "fields": CONFIRMED if number % 4 == 0 else {}}


async def record(
    project: Path, url: str, key: str, asked: list[dict[str, Any]], at_once: int, limit: float = 0.8 * BUSY_SECONDS
) -> list[dict[str, Any]]:
    """Hold conversations through AG-UI's client, for so many seconds at most."""
    command = ("node", "recorder.mjs", f"{url}/ag-ui", key, str(at_once))
    pipe = subprocess.PIPE
    running = await asyncio.create_subprocess_exec(
        *command, cwd=project, stdin=pipe, stdout=pipe, stderr=pipe, limit=64 * 1024 * 1024
    )
    lines = "".join(f"{json.dumps(job)}\n" for job in asked).encode()
    try:
        printed, errors = await asyncio.wait_for(running.communicate(lines), limit)
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    assert running.returncode == 0, errors.decode()[-2_000:]
    return [json.loads(line) for line in printed.splitlines()]


def check(found: list[dict[str, Any]], asked: list[dict[str, Any]]) -> Counter[str]:
    """Make sure that no record has a violation or a missing event, and count what the records have."""
    counted: Counter[str] = Counter()
    assert sorted(each["thread"] for each in found) == sorted(job["thread"] for job in asked)
    for each in found:
        assert not each["problems"], (each["thread"], each["problems"][0][:3_000])
        counted.update(conversations=1, cuts=each["cuts"], runs=len(each["runs"]))
        counted.update(events=sum(run["events"] for run in each["runs"]))
        counted.update(str(run.get("outcome") or run["end"]) for run in each["runs"])
    return counted


async def test_broken_connections_lose_and_double_no_event(server: Served, project: Path, tmp_path: Path) -> None:
    asked = [*jobs(tmp_path, 24, seed=1)]
    counted = check(await record(project, server.url, await server.token(), asked, 4), asked)
    assert counted["cuts"] > len(asked)
    assert min(counted[outcome] for outcome in ("success", "interrupt", "RUN_ERROR")) > 0


async def test_killed_servers_and_controllers_lose_and_double_no_event(tmp_path: Path, project: Path) -> None:
    port = free_port()
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start()
        store = cluster.client.store
        key = await add_key(store)
        asked = [job | {"cut": False} for job in jobs(tmp_path, 5, seed=3)]

        async def grows(count: int) -> bool:
            rows = await cluster.client.recent()
            return recording.done() or sum(row.last_event_id for row in rows) >= count

        recording = asyncio.create_task(record(project, f"http://127.0.0.1:{port}", key, asked, 4))
        try:
            for number in range(3):
                async with server_process(cluster.store.url, tmp_path / "home", port):
                    if number == 2:
                        await recording
                    else:
                        await until(lambda: grows(30 * (number + 1)), limit=LIMIT_SECONDS, what="events")  # noqa: B023
                        cluster.kill("c1")
                        cluster.start_controller("c1")
        finally:
            recording.cancel()
            await asyncio.wait([recording])
        counted = check(recording.result(), asked)
    assert counted["conversations"] == len(asked)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_SECONDS)
async def test_a_thousand_conversations_have_no_violation(server: Served, project: Path, tmp_path: Path) -> None:
    asked = [*jobs(tmp_path, int(os.environ.get("AG_UI_CONVERSATIONS", "1000")), seed=2)]
    found = await record(project, server.url, await server.token(), asked, 8, limit=0.9 * SOAK_SECONDS)
    print(f"\n{dict(check(found, asked))}")


async def test_the_program_of_the_page_runs_as_it_stands(server: Served, project: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "SERVER": server.url, "KEY": await server.token()}
    running = await asyncio.create_subprocess_exec(
        "node", "main.mjs", cwd=project, env=environment, stdout=subprocess.PIPE
    )
    try:
        printed, _ = await asyncio.wait_for(running.communicate(), 0.8 * BUSY_SECONDS)
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    assert (running.returncode, printed.decode().split()) == (0, ["three", "files"])
