"""Builds with other functions meet one store (F53): a copy of the package `broker` with other Lua is another build.

There is no earlier release to install, and a clone for CI may have no history. So this build is the older one, N-1,
and N is a copy of it with a higher version of the functions: `Build`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import broker
from broker.runtime.child import EXIT_FUNCTIONS
from broker.runtime.version import read_version
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
ANOTHER_RELEASE = (*A_COMMENT, ("runtime/version.py", 'return metadata.version("deckhands")', 'return "9.9.9"'))


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
        return await self.python(
            "-m", "deckhands", *arguments, DECKHANDS_URL=cluster.url, DECKHANDS_CELERY_URL=cluster.store.celery_url
        )

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
        "from broker.store.cluster import connect as C; f._find_unserved_workers = lambda *_: asyncio.sleep(0); "
        "asyncio.run(f.deploy(C(sys.argv[1])))"
    )
    status, output = await newer.python("-c", script, cluster.url)
    assert status == 0, output
    for name in ("c1", "t1", "j1", "d1"):
        assert await cluster.until_ended(name) == EXIT_FUNCTIONS, cluster.log_of(name)
    cluster.start_controller("c2", **newer.environment)
    cluster.start_tool("t2", **newer.environment)
    await cluster.check(ids, commands=6)


def start_mixed(cluster: FaultCluster, newer: Build, mix: str) -> None:
    """Start workers: the roles in `mix` of the newer build, all others of this one; `both` starts two of each."""
    starts = {
        "controller": cluster.start_controller,
        "tool": cluster.start_tool,
        "ingress": cluster.start_ingress,
        "jobs": cluster.start_jobs,
    }
    for role, start in starts.items():
        if mix == "both" or role not in mix:
            start(f"{role}-own")
        if mix == "both" or role in mix:
            start(f"{role}-newer", **newer.environment)


@pytest.mark.parametrize("mix", ["controller", "tool", "ingress jobs", "both"])
async def test_older_and_newer_workers_share_the_work_in_every_mix(
    processes: FaultCluster, tmp_path: Path, mix: str
) -> None:
    cluster = processes
    newer = await Build(tmp_path / "newer", A_COMMENT, order=OWN.order + 1, oldest=OWN.order).made()
    status, output = await newer.run(cluster, "setup")
    assert status == 0, output
    start_mixed(cluster, newer, mix)
    names = set(cluster.workers)
    ids = await cluster.submit(steps(3, seconds=0.2), count=8)
    await cluster.until(lambda: any("begin-0" in cluster.effects(cid) for cid in ids))
    # Meanwhile, clients of both builds read and write.
    status, output = await newer.run(cluster, "message", ids[0], "And hello from the newer one.")
    assert status == 0, output
    await cluster.client.send_message(ids[1], "And hello from the older one.")
    status, output = await newer.run(cluster, "logs", ids[1], "--plain")
    assert status == 0, output
    await cluster.settle(ids)
    await cluster.check(ids[2:], commands=3)
    assert {name for name, worker in cluster.workers.items() if worker.poll() is None} == names


async def submit_by(build: Build, cluster: FaultCluster, turns: list[dict[str, Any]]) -> str:
    """Submit a conversation with the command line of a build; its effects are counted as usual."""
    folder = cluster.root / "work" / "by-build"
    folder.mkdir(parents=True)
    status, output = await build.run(
        cluster, "submit", "-t", "do it", "--model", cluster.script(*turns), "-w", str(folder), "--sandbox", "none"
    )
    assert status == 0, output
    cid = output.strip().splitlines()[-1].split()[-1]
    (cluster.root / f"{cid}.where").write_text(str(folder))
    return cid


async def test_functions_are_rolled_back_while_conversations_work(processes: FaultCluster, tmp_path: Path) -> None:
    cluster = processes
    newer = await Build(tmp_path / "newer", ANOTHER_NAME, order=OWN.order + 1, oldest=OWN.order + 1).made()
    own = Build(tmp_path / "own", (), order=0, oldest=0)
    status, output = await newer.run(cluster, "upgrade")
    assert (status, "replaced by those of this version" in output) == (0, True), output
    cluster.start_controller("c2", **newer.environment)
    cluster.start_tool("t2", **newer.environment)
    cid = await submit_by(newer, cluster, steps(6, seconds=0.5))
    await cluster.until(lambda: "begin-0" in cluster.effects(cid))
    before = await functions_of(cluster)
    status, output = await own.run(cluster, "upgrade", "--check")
    assert (status, "they do not serve this version" in output) == (1, True), output
    status, output = await own.run(cluster, "upgrade", "--check", "--roll-back")
    assert (status, "controller-" in output, "newer workers wait" in output) == (1, True, True), output
    assert await functions_of(cluster) == before
    status, output = await own.run(cluster, "upgrade", "--roll-back")
    assert status == 0, output
    for name in ("c2", "t2"):
        assert await cluster.until_ended(name) == EXIT_FUNCTIONS, cluster.log_of(name)
    cluster.start_controller("c3", **newer.environment)  # a supervisor restarts it
    await cluster.until(lambda: "were rolled back to version" in cluster.log_of("c3"), what="line of a waiting worker")
    cluster.start()
    await cluster.check([cid], commands=6)

    async def have_to_stop() -> bool:  # on a busy machine, a beat can be late
        status, output = await newer.run(cluster, "upgrade", "--check")
        assert "held after a rollback" in output, output
        return status == 1

    await cluster.until(have_to_stop, limit=60, what="workers that have to stop")
    status, output = await newer.run(cluster, "upgrade")
    assert status == 0, output
    for name in ("c1", "t1"):
        assert await cluster.until_ended(name) == EXIT_FUNCTIONS, cluster.log_of(name)
    assert cluster.workers["c3"].poll() is None


async def test_a_check_of_an_upgrade_names_what_it_would_do(cluster: FaultCluster, tmp_path: Path) -> None:
    newer = await Build(tmp_path / "newer", A_COMMENT, order=OWN.order + 1, oldest=OWN.order).made()
    before = await functions_of(cluster)
    status, output = await newer.run(cluster, "upgrade", "--check", "--json")
    found = json.loads(output)
    assert (status, found["effect"], found["has_to_stop"], found["is_possible"]) == (0, "upgrade", [], True), output
    assert found["functions"] == {"store": OWN.stamp, "build": newer.version.stamp}
    assert await functions_of(cluster) == before
    assert (await newer.run(cluster, "upgrade"))[0] == 0
    own = Build(tmp_path / "own", (), order=0, oldest=0)
    status, output = await own.run(cluster, "upgrade", "--check")
    assert (status, "they serve this version" in output) == (0, True), output
    status, output = await newer.run(cluster, "upgrade", "--check")
    assert (status, "the store has the functions of this version" in output) == (0, True), output


async def test_a_pinned_conversation_is_continued_by_its_version_alone(processes: FaultCluster, tmp_path: Path) -> None:
    cluster = processes
    newer = await Build(tmp_path / "newer", ANOTHER_RELEASE, order=OWN.order + 1, oldest=OWN.order).made()
    assert (await newer.run(cluster, "upgrade"))[0] == 0
    cluster.start()
    (pinned,) = await cluster.submit(steps(6, seconds=0.5), task={"pinned_version": "current"})
    (free,) = await cluster.submit(steps(6, seconds=0.5))
    await cluster.until(lambda: all("begin-0" in cluster.effects(cid) for cid in (pinned, free)))
    cluster.kill("c1")
    cluster.start_controller("c2", **newer.environment)

    async def waits() -> bool:
        return (await cluster.client.row(pinned)).wait_reason == "pinned_version"

    await cluster.until(waits, what="a conversation that the newer worker leaves")
    await cluster.check([free], commands=6)
    status, output = await newer.run(cluster, "upgrade", "--check")
    assert (status, "1 conversation for a worker of the version" in output) == (0, True), output
    status, output = await newer.run(cluster, "why", pinned)
    assert (status, f"pinned to version {read_version()}" in output) == (0, True), output
    cluster.start_controller("c3")
    await cluster.check([pinned], commands=6)
