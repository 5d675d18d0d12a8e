"""Builds with other functions meet one store (F53): a copy of the package `broker` with other Lua is another build."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import broker
from broker.runtime.child import EXIT_FUNCTIONS
from broker.store.function_library import LIBRARY, FunctionsVersion, own_version
from tests.faults.harness import FaultCluster, steps

OWN = own_version()
ANOTHER_NAME = (
    (
        "log/lua/append.lua",
        "redis.register_function('deck_append', append)",
        "redis.register_function('deck_add', append)",
    ),
    ("log/event_log.py", '"deck_append"', '"deck_add"'),
)
"""What makes functions that workers of this build cannot call."""
A_COMMENT = (("log/lua/append.lua", "-- Append: ", "-- Another version of append: "),)


class Build:
    """Another build of Deckhands: the same packages, but for the one that holds the functions."""

    def __init__(self, root: Path, changes: tuple[tuple[str, str, str], ...], *, order: int, oldest: int) -> None:
        self.folder = root
        package = root / "broker"
        shutil.copytree(Path(broker.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        for name, before, after in changes:
            text = (package / name).read_text()
            assert before in text, name
            (package / name).write_text(text.replace(before, after))
        self._order, self._oldest = order, oldest
        self.version: FunctionsVersion

    async def made(self) -> Build:
        """Add its version to the table of its package, unless it has no order."""
        table = self.folder / "broker" / "store" / "function_library.py"
        script = "from broker.store.function_library import own_version; print(own_version().code)"
        _, output = await self.python("-c", script)
        code = output.strip()
        if self._order:
            line = f'    FunctionsVersion({self._order}, "{code}", {self._oldest}),\n'
            text = table.read_text()
            end = text.index("\n)\n", text.index("VERSIONS = (")) + 1
            table.write_text(text[:end] + line + text[end:])
        self.version = FunctionsVersion(self._order, code, self._oldest)
        return self

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder), "PYTHONSAFEPATH": "1"}

    async def run(self, cluster: FaultCluster, *arguments: str) -> tuple[int, str]:
        """Run the command line of this build on a cluster; return its exit status and its output."""
        return await self.python("-m", "deckhands", *arguments, DECKHANDS_URL=cluster.store.url)

    async def python(self, *arguments: str, **environment: str) -> tuple[int, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DECKHANDS_", "LLM_"))}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            env={**kept, **self.environment, **environment},
            cwd=self.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()


async def functions_of(cluster: FaultCluster) -> Any:
    call = cluster.client.store.connection.call
    return await call("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY, "WITHCODE")


@pytest.fixture
def processes(cluster: FaultCluster) -> FaultCluster:
    """A cluster whose workers are started by their commands, so that each may be of another build."""
    cluster.started_by = ("env",)
    return cluster


async def test_reading_commands_leave_functions_alone(cluster: FaultCluster, tmp_path: Path) -> None:
    newer = await Build(tmp_path / "newer", A_COMMENT, order=OWN.order + 1, oldest=OWN.order).made()
    (cid,) = await cluster.submit(steps(1))
    before = await functions_of(cluster)
    status, output = await newer.run(cluster, "ls")
    assert (status, cid in output) == (0, True), output
    status, output = await newer.run(cluster, "show", cid)
    assert (status, cid in output) == (0, True), output
    _, output = await newer.run(cluster, "doctor")
    assert f"the store has version {OWN}; this build has {newer.version}" in " ".join(output.split())
    assert await functions_of(cluster) == before


@pytest.mark.parametrize("order", [OWN.order + 1, OWN.order, 0])
async def test_a_writing_client_of_another_version_names_both_versions(
    cluster: FaultCluster, tmp_path: Path, order: int
) -> None:
    other = await Build(tmp_path / "other", A_COMMENT, order=order, oldest=order).made()
    before = await functions_of(cluster)
    commands: list[tuple[str, ...]] = [("submit", "--model", "scripted/x", "-t", "hello")]
    commands += [("setup",)] if order <= OWN.order else []  # only a known, newer build replaces functions
    for command in commands:
        status, output = await other.run(cluster, *command)
        said = " ".join(output.split())
        assert status != 0, output
        assert str(OWN) in said, output
        assert str(other.version) in said, output
    assert await functions_of(cluster) == before


async def test_workers_keep_working_with_newer_functions_that_serve_them(
    processes: FaultCluster, tmp_path: Path
) -> None:
    cluster = processes
    newer = await Build(tmp_path / "newer", A_COMMENT, order=OWN.order + 1, oldest=OWN.order).made()
    cluster.start()
    ids = await cluster.submit(steps(4, seconds=0.5), count=3)
    await cluster.until(lambda: all("begin-0" in cluster.effects(cid) for cid in ids))
    status, output = await newer.run(cluster, "setup")
    assert (status, f"have version {newer.version}" in output) == (0, True), output
    cluster.start_controller("c2", **newer.environment)
    more = await cluster.submit(steps(2), count=3)
    await cluster.settle([*ids, *more])
    await cluster.check(ids, commands=4)
    await cluster.check(more, commands=2)
    assert {name: worker.poll() for name, worker in cluster.workers.items()} == {"c1": None, "t1": None, "c2": None}


async def test_an_upgrade_stops_older_workers_and_loses_nothing(processes: FaultCluster, tmp_path: Path) -> None:
    cluster = processes
    newer = await Build(tmp_path / "newer", ANOTHER_NAME, order=OWN.order + 1, oldest=OWN.order + 1).made()
    cluster.start()
    ids = await cluster.submit(steps(6, seconds=0.5), count=5)
    await cluster.until(lambda: all("begin-0" in cluster.effects(cid) for cid in ids))
    cluster.start_controller("c2", **newer.environment)
    cluster.start_tool("t2", **newer.environment)
    await cluster.until(lambda: "running workers need them" in cluster.log_of("c2"), what="line of a waiting worker")
    status, output = await newer.run(cluster, "setup")
    assert (status, "controller-" in output, "--stop-older" in output) == (1, True, True), output
    status, output = await newer.run(cluster, "setup", "--stop-older")
    assert status == 0, output
    for name in ("c1", "t1"):
        assert await cluster.until_ended(name) == EXIT_FUNCTIONS
        assert f"are about to have version {newer.version}" in cluster.log_of(name)
        assert "Traceback" not in cluster.log_of(name)
    await cluster.check(ids, commands=6)
    cluster.start_controller("c3")
    assert await cluster.until_ended("c3") == EXIT_FUNCTIONS
    assert f"made for version {OWN}" in cluster.log_of("c3")


async def test_workers_hand_back_when_their_functions_are_replaced(processes: FaultCluster, tmp_path: Path) -> None:
    """By hand, or by a build from before there were announcements."""
    cluster = processes
    newer = await Build(tmp_path / "newer", ANOTHER_NAME, order=OWN.order + 1, oldest=OWN.order + 1).made()
    cluster.start()
    cluster.start_jobs()
    cluster.start_ingress()
    ids = await cluster.submit(steps(6, seconds=0.5), count=5)
    await cluster.until(lambda: all("begin-0" in cluster.effects(cid) for cid in ids))
    script = (
        "import asyncio, sys; from broker.store import function_library as f; "
        "from broker.store.connection import MultiplexedConnection as C; f._find_unserved_workers = lambda *_: asyncio.sleep(0); "
        "asyncio.run(f.deploy(C(sys.argv[1])))"
    )
    status, output = await newer.python("-c", script, cluster.store.url)
    assert status == 0, output
    for name in ("c1", "t1", "j1", "d1"):
        assert await cluster.until_ended(name) == EXIT_FUNCTIONS, cluster.log_of(name)
    cluster.start_controller("c2", **newer.environment)
    cluster.start_tool("t2", **newer.environment)
    await cluster.check(ids, commands=6)
