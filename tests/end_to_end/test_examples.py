"""The examples of conversations and producers: each is run as a stranger would run it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker.store import keys
from tests.faults.harness import FaultCluster
from tests.ingress_parts import Producer, all_present, saying
from tests.integration.command_line import run_command
from tests.polling import until
from tests.source_code import ROOT
from tests.turns import call, finish, script

CONVERSATIONS, PRODUCERS = ROOT / "examples" / "conversations", ROOT / "examples" / "producers"
LIMIT_SECONDS = 120.0


def printed(*command: str | Path, folder: Path, **variables: str) -> list[str]:
    """Run a Python program, or another one, and return the lines that it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DECKHANDS_", "LLM_"))}
    home = {"DECKHANDS_HOME": str(folder / "home"), "DECKHANDS_SANDBOX": "none"}
    done = subprocess.run(
        [sys.executable, *command] if str(command[0]).endswith(".py") else command,
        check=False,
        cwd=folder,
        env=kept | home | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_minimal_example(tmp_path: Path) -> None:
    model = script(tmp_path / "model.json", run_command("echo 2 3 5 > primes.txt"), finish("Written."))
    assert printed(CONVERSATIONS / "minimal.py", model, folder=tmp_path) == ["Written.", "2 3 5"]


def test_local_to_remote(tmp_path: Path) -> None:
    model = script(tmp_path / "model.json", finish("An agent."))
    assert printed(CONVERSATIONS / "local_to_remote.py", model, folder=tmp_path) == ["An agent."]


def test_the_router(tmp_path: Path) -> None:
    first = script(tmp_path / "first.json", finish("By the first."))
    second = script(tmp_path / "second.json", finish("By the second."))
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(
        f'[llm.second]\nmodel = "{second}"\n[llm.auto]\nmodel = "{first}"\n'
        'router = {kind = "rules", rules = [{use = "second", service = "agent"}]}\n'
    )
    assert printed(CONVERSATIONS / "router.py", str(profiles), folder=tmp_path)[0] == "By the second."


def test_a_tool_of_the_program(tmp_path: Path) -> None:
    asking = call("stock", item="lamp")
    model = script(tmp_path / "model.json", asking, finish("Four."))
    assert printed(CONVERSATIONS / "own_tool.py", model, folder=tmp_path) == ["Four.", "4 lamps"]


def test_secrets(tmp_path: Path) -> None:
    model = script(tmp_path / "model.json", run_command("echo the token is $API_TOKEN"), finish("Used."))
    assert printed(CONVERSATIONS / "with_secrets.py", model, folder=tmp_path) == [
        "Used.",
        "the token is <secret_hidden>",
    ]


def test_a_policy_of_a_package(tmp_path: Path) -> None:
    described = tmp_path / "site" / "deployments-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: deployments\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[deckhands.confirmation_policies]\ndeployments = deployments:Deployments\n"
    )
    path = os.pathsep.join((str(tmp_path / "site"), str(CONVERSATIONS / "own_policy")))
    model = script(tmp_path / "model.json", run_command("true"), run_command("deploy now"), finish("On Monday, then."))
    shown = printed(CONVERSATIONS / "own_policy/ask_first.py", model, folder=tmp_path, PYTHONPATH=path)
    assert shown == ["asked about: deploy now", "On Monday, then."]


def test_sub_agents(tmp_path: Path) -> None:
    handing = call("delegate", agent="helper", task="Count the files.")
    chief = script(tmp_path / "chief.json", handing, finish("There are none."))
    helper = script(tmp_path / "helper.json", finish("None."))
    assert printed(CONVERSATIONS / "sub_agents.py", chief, helper, folder=tmp_path) == [
        "There are none.",
        "delegates: 1",
    ]


def test_long_work(tmp_path: Path) -> None:
    model = f"scripted/{CONVERSATIONS / 'long_work.json'}"
    shown = printed(CONVERSATIONS / "long_work.py", model, folder=tmp_path)
    assert shown[0] == "All three features work."
    assert shown[1:-3] == [f"{passing} of 3 features pass." for passing in (0, 1, 1, 2, 3)]
    assert [line.split()[:2] for line in shown[-3:]] == [
        ["greeting", "passes"],
        ["by-name", "passes"],
        ["german", "passes"],
    ]


NODE_CLIENT = "redis@5"


@pytest.fixture
async def reached(tmp_path: Path) -> AsyncIterator[Producer]:
    """A cluster whose store has a port, as that of `deckhands up --port` has."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    async with FaultCluster(tmp_path, port=port).running() as cluster:
        cluster.start_controller()
        cluster.start_ingress()
        await all_present(cluster)
        found = Producer(cluster)
        yield found
        found.close()


async def printed_by(
    producer: Producer, *command: str | Path, folder: Path | None = None, **variables: str
) -> list[str]:
    """Run a program beside this one's loop, which results come to."""
    return await asyncio.to_thread(printed, *command, folder=folder or producer.cluster.root, **variables)


def address_of(producer: Producer) -> str:
    address = producer.cluster.store.port_url
    assert address is not None
    return address


async def test_the_chord(reached: Producer) -> None:
    model = reached.options(saying("write more tests"))["model"]
    command = (PRODUCERS / "celery_chord.py", reached.cluster.store.celery_url, "--model", model)
    assert await printed_by(reached, *command, "--timeout", str(LIMIT_SECONDS)) == ["write more tests"]
    assert len(await reached.cluster.client.recent()) == 21


async def test_the_beat_of_another_application(reached: Producer) -> None:
    send = """
import celery_beat
from celery.beat import Scheduler

beat = Scheduler(celery_beat.app)
print(*[beat.apply_entry(entry) or entry.task for entry in beat.schedule.values()])
"""
    found = {"DECKHANDS_CELERY": reached.cluster.store.celery_url, "PYTHONPATH": str(PRODUCERS)}
    model = reached.options(saying("all is well"))["model"]
    sent = await printed_by(reached, sys.executable, "-c", send, DECKHANDS_MODEL=model, **found)
    assert sent == ["deckhands.run"]

    async def has_begun() -> bool:
        rows = await reached.cluster.client.recent()
        return [dict(row.labels) for row in rows] == [{"example": "celery-beat"}]

    await until(has_begun, limit=LIMIT_SECONDS, what="the conversation of a tick")


async def test_the_inbox_from_python(reached: Producer) -> None:
    model = reached.options(saying("listed"))["model"]
    lines = await printed_by(reached, PRODUCERS / "inbox.py", address_of(reached), 'List "the" files', MODEL=model)
    assert [line.split() for line in lines] == [["accepted"], ["settled", "finished", "listed"]]


async def test_the_inbox_from_node(reached: Producer, tmp_path: Path) -> None:
    if (shutil.which("node") is None or shutil.which("npm") is None) and "CI" not in os.environ:
        pytest.skip("node is not installed")
    folder = tmp_path / "node"
    folder.mkdir()
    shutil.copy(PRODUCERS / "inbox.mjs", folder)
    await printed_by(reached, "npm", "install", "--no-audit", "--no-fund", "--silent", NODE_CLIENT, folder=folder)
    model = reached.options(saying("listed"))["model"]
    for address in (address_of(reached), reached.cluster.store.url):  # the second has its password before a path
        lines = await printed_by(reached, "node", "inbox.mjs", address, 'List "the" files', folder=folder, MODEL=model)
        assert [line.split() for line in lines] == [["accepted"], ["settled", "finished", "listed"]]


async def test_the_inbox_from_a_shell(reached: Producer) -> None:
    model = reached.options(saying("listed"))["model"]
    client = shutil.which("redis-cli") or shutil.which("valkey-cli")
    assert client is not None, "redis-cli is missing (on Debian: apt-get install redis-tools)"
    command = (PRODUCERS / "inbox.sh", 'List "the" files')
    address = urlsplit(address_of(reached))
    variables = {"MODEL": model, "REDIS_CLI": f"{client} -p {address.port}", "REDISCLI_AUTH": address.password or ""}
    assert await printed_by(reached, *command, **variables) == ["accepted", "settled"]
    (row,) = await reached.cluster.client.recent()
    assert row.title == 'List "the" files'
    assert await reached.cluster.client.store.connection.call("XLEN", keys.INBOX) == 0
