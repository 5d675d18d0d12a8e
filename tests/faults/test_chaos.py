"""`deckhands chaos` on real clusters: what it reports, what it refuses, what it finds, and what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.contract import CmdOutputObservation, CmdRunAction, ConversationCreated, OutcomeUnknownObservation
from broker.contract.counted_commands import make_counted_command
from broker.coordination import ClusterMember, Membership, list_members
from broker.runtime import TOOLS, StoreMisconfigured, UsageError
from broker.runtime.clock import SystemClock
from broker.runtime.ids import make_connection_name, make_worker_id_prefix
from broker.store.server_control import close_connections
from broker.store.store import open_store
from deckhands.chaos.chaos import FAULTS, Chaos, ChaosSpec, NotPossible
from deckhands.chaos.fake_clock import FakeClock
from deckhands.chaos.report import ChaosReport, EffectCounts, Latencies
from deckhands.chaos.undo_journal import OpenFault, UndoJournal
from deckhands.chaos.victims import ProvenProcess, find_hosts, find_workers, open_store_process
from deckhands.chaos.workload import count_effects
from deckhands.client.client import Client
from deckhands.cluster.embedded_cluster import Cluster as EmbeddedCluster
from deckhands.cluster.embedded_cluster import ClusterSpec
from tests.clusters import Cluster
from tests.faults.harness import FaultCluster
from tests.left_logs import verify_left_logs
from tests.polling import unhurried, until
from tests.sentinels import PASSWORD, SentinelGroup, find_port
from tests.served_stores import environment_with, serving
from tests.stores import valkey_program

REPEATS_COMMANDS = """
from tool_worker.worker.steps.action_run import ActionRun
ActionRun.may_repeat = property(lambda self: True)
from tool_worker.__main__ import main
main()
"""
"""A tool worker with a planted defect: it takes commands for idempotent, and repeats those whose outcome is unknown."""


@contextlib.asynccontextmanager
async def running(root: Path, **fields: Any) -> AsyncIterator[tuple[EmbeddedCluster, Client]]:
    """A cluster as `deckhands up` runs it, without a sandbox."""
    spec = ClusterSpec(
        root / "cluster",
        environment={"PATH": os.environ["PATH"], "HOME": str(root), "DECKHANDS_SANDBOX": "none"},
        gives_up=False,
        ready_seconds=unhurried(60),
        **fields,
    )
    spec.directory.mkdir()
    cluster = EmbeddedCluster(spec)
    await cluster.start()
    try:
        await cluster.until_ready()
        async with await Client.connect(cluster.url, patience_seconds=unhurried(120)) as client:
            yield cluster, client
            await verify_left_logs(client)
    finally:
        await cluster.stop()


def spec_for(root: Path, cluster: EmbeddedCluster, faults: Sequence[str], **fields: Any) -> ChaosSpec:
    return ChaosSpec(
        root / "chaos",
        cluster.url,
        faults=tuple(faults),
        store_directory=cluster.store.directory,
        environment=cluster.spec.environment,
        settle_seconds=unhurried(120),
        **{"own_pairs": 0, "conversations": 3, **fields},
    )


ASLEEP = ("/bin/sleep", "1000")
POSING = (sys.executable, "-c", "import time; time.sleep(1000)", "-m", "controller_worker")
"""A program that looks like a controller worker."""


@contextlib.contextmanager
def program(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs until the block ends."""
    running = subprocess.Popen(command)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size; only root can mount one."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def check_that_all_holds(report: ChaosReport) -> None:
    assert report.holds, (report.findings, report.unsettled)
    assert report.finished == report.conversations == report.logs > 0
    effects = report.effects
    assert effects.commands == effects.done + effects.unknown > 0


@pytest.mark.timeout(600)
async def test_a_cluster_survives_every_fault_that_is_possible_here(tmp_path: Path) -> None:
    async with running(tmp_path, controllers=2, tools=2) as (cluster, client):
        spec = spec_for(tmp_path, cluster, list(FAULTS), own_pairs=1, every_seconds=1.0, duration_seconds=20, seed=5)
        report = await Chaos(client, spec).run()
        places = await find_places(client)
    check_that_all_holds(report)
    assert places == {("bash", False), ("chaos", True)}  # the run's own workers serve its conversations alone
    assert set(report.not_tried) >= {"disk", "failover"}
    tried = {fault.kind for fault in report.faults}
    assert tried.isdisjoint(report.not_tried)
    # The others need a worker or a host that can be reached at that moment.
    assert tried >= {"delay", "partition", "disconnect", "pause", "memory", "store"}
    assert ("clock" in tried) is (FakeClock.find_library() is not None)
    assert tried & {"kill", "stop"}
    assert not report.unreachable
    assert UndoJournal(tmp_path / "chaos" / "open-faults.jsonl").load() == []
    report.write(tmp_path / "report")
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (written["holds"], written["seed"], len(written["faults"])) == (True, 5, len(report.faults))
    page = (tmp_path / "report" / "report.md").read_text()
    assert "Everything holds." in page
    assert "the store has no Sentinels, and is no cluster" in page


async def find_places(client: Client) -> set[tuple[str, bool]]:
    """Return the pools of the conversations that ran commands, and whether these ran at a worker of the run."""
    places = set[tuple[str, bool]]()
    for row in await client.recent(limit=1000):
        created, *events = await client.events(row.conversation_id)
        assert isinstance(created, ConversationCreated)
        ran = [event.metadata.working_dir for event in events if isinstance(event, CmdOutputObservation)]
        places |= {(created.workspace.pool, "/chaos/workers/" in place) for place in ran if place}
    return places


@pytest.mark.timeout(400)
async def test_a_fail_over_is_ordered_of_sentinels(tmp_path: Path) -> None:
    async with (
        SentinelGroup(valkey_program(), tmp_path).running() as group,
        FaultCluster(tmp_path).running() as workers,
    ):
        workers.url_for_workers = group.url
        workers.start(DECKHANDS_ACKS="replica")
        store = await open_store(group.url, acks="replica", patience_seconds=unhurried(120))
        async with Client(store) as client:
            spec = ChaosSpec(
                tmp_path / "chaos",
                group.url,
                faults=("failover", "store", "partition"),
                every_seconds=4.0,
                duration_seconds=8.0,
                settle_seconds=unhurried(120),
                conversations=2,
            )
            report = await Chaos(client, spec).run()
            check_that_all_holds(report)
            assert "failover" in {fault.kind for fault in report.faults}
            assert report.not_tried["partition"] == "a proxy leads to a single store without TLS only"
            assert "`--store-restarts` states it" in report.not_tried["store"]


SUPERVISOR = ("bash", "-c", 'while :; do setpriv --pdeathsig KILL "$@"; done', "supervisor")
"""Starts a program again whenever it ends; it ends with its supervisor."""
IN_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Gives a program other process ids, as a container does."""


@contextlib.asynccontextmanager
async def foreign_cluster(root: Path, around_store: Sequence[str] = ()) -> AsyncIterator[str]:
    """A store and workers that other supervisors than `deckhands up` run; yields the store's URL."""
    url = f"redis://:{PASSWORD}@127.0.0.1:{(port := find_port())}/0"
    (root / "log").mkdir()
    options = ("--port", str(port), "--dir", str(root / "log"), "--appendonly", "yes", "--requirepass", PASSWORD)
    with (root / "store.log").open("wb") as log:
        store = subprocess.Popen([*SUPERVISOR, *around_store, valkey_program(), *options], stdout=log, stderr=log)
    try:
        async with FaultCluster(root).running() as workers:
            workers.url_for_workers, workers.started_by = url, SUPERVISOR
            workers.start()
            workers.start_controller("c2")
            yield url
    finally:
        store.kill()
        store.wait()


def foreign_spec(root: Path, url: str, *faults: str, **fields: Any) -> ChaosSpec:
    environment = {"PATH": os.environ["PATH"], "HOME": str(root), "DECKHANDS_SANDBOX": "none"}
    fields = {"own_pairs": 0, "conversations": 3, "every_seconds": 1.0, "store_restarts": True} | fields
    return ChaosSpec(
        root / "chaos", url, faults=faults, settle_seconds=unhurried(120), environment=environment, **fields
    )


@pytest.mark.timeout(600)
async def test_a_cluster_of_other_supervisors_survives(tmp_path: Path) -> None:
    async with (
        foreign_cluster(tmp_path) as url,
        await Client.connect(url, patience_seconds=unhurried(120)) as client,
    ):
        kinds = ("partition", "memory", "store")
        report = await Chaos(client, foreign_spec(tmp_path, url, *kinds, own_pairs=1, duration_seconds=6)).run()
    check_that_all_holds(report)
    hit = {fault.kind: fault for fault in report.faults}
    assert set(hit) == set(kinds)
    assert hit["store"].pid > 0  # it runs here, so it was killed
    assert not report.unreachable


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a program other process ids")
@pytest.mark.timeout(400)
async def test_a_store_out_of_reach_is_shut_down(tmp_path: Path) -> None:
    async with (
        foreign_cluster(tmp_path, IN_CONTAINER) as url,
        await Client.connect(url, patience_seconds=unhurried(120)) as client,
    ):
        report = await Chaos(client, foreign_spec(tmp_path, url, "store", duration_seconds=4)).run()
    check_that_all_holds(report)
    assert {(fault.target, fault.pid) for fault in report.faults} == {("the store, by SHUTDOWN", 0)}


@pytest.mark.timeout(600)
async def test_primaries_of_a_cluster_are_replaced(tmp_path: Path) -> None:
    nodes = Cluster(valkey_program(), tmp_path)
    async with nodes.running(), FaultCluster(tmp_path).running_on(nodes, 4) as workers:
        workers.start()
        kinds = ("failover", "disconnect", "pause", "memory", "store")
        spec = foreign_spec(tmp_path, nodes.url, *kinds, every_seconds=2.0, duration_seconds=15)
        report = await Chaos(workers.client, spec).run()
    check_that_all_holds(report)
    assert {fault.kind for fault in report.faults} == {"failover", "disconnect", "pause"}
    assert report.not_tried["store"] == "a store with replicas fails over instead"


async def test_a_store_that_keeps_nothing_is_not_ended(valkey_store: Any, tmp_path: Path) -> None:
    await valkey_store.call("CONFIG", "SET", "appendonly", "no")
    chaos = Chaos(Client(valkey_store), foreign_spec(tmp_path, "redis://h", "store"))
    with pytest.raises(NotPossible, match="its end would lose everything"):
        await chaos._cause("store", 0.0)
    unasked = Chaos(Client(valkey_store), foreign_spec(tmp_path, "redis://h", "store", store_restarts=False))
    with pytest.raises(NotPossible, match="--store-restarts"):
        await unasked._cause("store", 0.0)


async def test_connections_of_the_named_process_alone_are_closed(valkey_store: Any) -> None:
    connection = valkey_store.connection
    mine, others = (connection.another(reply_timeout_seconds=5) for _ in range(2))
    for one, name in ((mine, "deckhands-host-1"), (others, "deckhands-host-11")):
        await one.call("CLIENT", "SETNAME", name)
    assert await close_connections(connection, "deckhands-host-1") == 1
    assert await others.call("CLIENT", "GETNAME") == b"deckhands-host-11"
    assert await mine.call("CLIENT", "GETNAME") == make_connection_name().encode()  # it has connected again
    assert await close_connections(connection, "deckhands-host-1") == 0
    await mine.aclose()
    await others.aclose()


def test_a_process_that_is_older_than_the_store_is_spared(tmp_path: Path) -> None:
    with program(valkey_program(), "--port", "0", "--dir", str(tmp_path)) as server:
        found = open_store_process(server.pid, tmp_path, age_seconds=1_000)
        assert found is None  # another store reports its number
        assert open_store_process(os.getpid(), Path.cwd(), age_seconds=0) is None


@pytest.mark.skipif(FakeClock.find_library() is None, reason="libfaketime is not installed")
def test_the_clock_of_one_process_jumps(tmp_path: Path) -> None:
    clock = FakeClock.create(tmp_path / "clock")
    assert clock is not None
    show = "import time\nwhile input(): print(time.time() - time.monotonic(), flush=True)"
    asked = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", show], env=os.environ | clock.environment, **asked) as process:  # type: ignore[call-overload]

        def ask() -> float:
            print("x", file=process.stdin, flush=True)
            return float(process.stdout.readline())

        before = ask()
        clock.step(-3_600)
        assert -3_601 < ask() - before < -3_599
        clock.restore()
        assert -1 < ask() - before < 1
        print(file=process.stdin, flush=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a small file system")
@pytest.mark.timeout(400)
async def test_a_small_disk_is_filled_and_freed(tmp_path: Path) -> None:
    with small_disk(tmp_path, "64m") as disk:
        async with running(disk) as (cluster, client):
            # The journal is on this disk as well.
            spec = spec_for(disk, cluster, ["disk", "stop"], every_seconds=1.0, duration_seconds=6, conversations=2)
            report = await Chaos(client, spec).run()
            check_that_all_holds(report)
            assert "disk" in {fault.kind for fault in report.faults}
            assert UndoJournal(disk / "chaos" / "open-faults.jsonl").load() == []
            assert not (cluster.store.directory / "chaos-ballast").exists()
            assert shutil.disk_usage(disk).free > 1 << 20


@pytest.mark.timeout(600)
async def test_a_planted_defect_is_found(tmp_path: Path) -> None:
    commands = dict(ClusterSpec(tmp_path).commands) | {TOOLS: (sys.executable, "-P", "-c", REPEATS_COMMANDS)}
    async with running(tmp_path, commands=commands) as (cluster, client):
        spec = spec_for(tmp_path, cluster, ["host"], every_seconds=0.4, duration_seconds=15, conversations=4)
        report = await Chaos(client, spec).run()
    assert not report.holds
    assert report.effects.doubled > 0
    assert re.search("was doubled: its command started [2-9]", report.findings[0])


@pytest.mark.timeout(300)
async def test_a_cluster_with_the_work_of_others_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, tools=0) as (cluster, client):
        theirs = await client.submit("do it", agent="DummyAgent")  # it waits for a tool worker
        pids = [worker.child.pid for worker in cluster.workers.values() if worker.child]
        spec = spec_for(tmp_path, cluster, ["kill"], every_seconds=0.2, duration_seconds=5)
        with pytest.raises(UsageError, match=f"1 conversation of other users may be disturbed, such as {theirs}"):
            await Chaos(client, spec).run()
        assert [worker.child.pid for worker in cluster.workers.values() if worker.child] == pids
        assert len(await client.recent()) == 1


async def test_an_unknown_fault_is_refused(memory_store: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no fault 'earthquake'"):
        Chaos(Client(memory_store), ChaosSpec(tmp_path, "redis://h", faults=("earthquake",)))


# Proofs


def member(worker_id: str, role: str = "controller", **about: str) -> ClusterMember:
    return ClusterMember(worker_id, role, 1.0, about)


async def test_a_forged_report_kills_no_other_process(memory_store: Any, tmp_path: Path) -> None:
    with program(*ASLEEP) as innocent:
        forged = Membership(memory_store, f"{make_worker_id_prefix('controller')}{innocent.pid}-abcd", "controller")
        await forged.register()
        report = await chaos_without_workers(memory_store, tmp_path, "kill").run()
        assert report.faults == ()
        assert list(report.unreachable.values()) == [f"process {innocent.pid} runs no controller worker of Deckhands"]
        assert "no worker could be signalled" in report.not_tried["kill"]
        assert innocent.poll() is None


async def test_only_local_workers_older_than_their_report_are_proven(tmp_path: Path) -> None:
    prefix = make_worker_id_prefix("controller")
    with program(*POSING) as posing:
        await until(lambda: b"controller_worker" in Path(f"/proc/{posing.pid}/cmdline").read_bytes())
        now = SystemClock().now()
        ms = int(now.timestamp() * 1000)
        reports = {
            "proven": member(f"{prefix}{posing.pid}-a", clock_ms=str(ms)),
            "is younger than the worker": member(f"{prefix}{posing.pid}-b", clock_ms=str(ms - 3_600_000)),
            "does not say when": member(f"{prefix}{posing.pid}-c"),
            "runs no tool worker": member(f"tool-{prefix.split('-')[1]}-{posing.pid}-d", "tool", clock_ms=str(ms)),
            "another host": member(f"controller-elsewhere-{posing.pid}-e", clock_ms=str(ms)),
            "its id names no process": member("controller-x"),
            "is not there": member(f"{prefix}999999999-f", clock_ms=str(ms)),
        }
        for reason, forged in reports.items():
            found = find_workers([forged], now)
            found.close()
            if reason == "proven":
                assert [victim.process.pid for victim in found.victims] == [posing.pid]
            else:
                assert not found.victims
                assert reason in found.unreachable[forged.worker_id]
        lapsed = ClusterMember(f"{prefix}{posing.pid}-g", "controller", -1.0, {"clock_ms": str(ms)})
        assert find_workers([lapsed], now).victims == ()
        shared = find_workers([reports["another host"]], now, shares_pids=True)
        shared.close()
        assert len(shared.victims) == 1


def test_only_hosts_of_the_run_are_found() -> None:
    assert list(find_hosts(["no-such-conversation", str(os.getpid())])) == []


# What is left after a death


@pytest.mark.timeout(300)
async def test_a_worker_that_a_dead_run_has_stopped_is_continued(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, client):
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "DECKHANDS_HOME": str(tmp_path / "home"),
            "DECKHANDS_URL": cluster.url,
        }
        command = [sys.executable, "-P", "-m", "deckhands", "chaos"]
        options = ["--faults", "stop", "--every", "0.2s", "--duration", "60s", "--conversations", "1", "--workers", "0"]
        journal = UndoJournal(tmp_path / "home" / "chaos" / "open-faults.jsonl")
        with (tmp_path / "log").open("wb") as log:
            run = subprocess.Popen([*command, *options], env=environment, stdout=log, stderr=log)
            try:
                await until(lambda: any(map(is_stopped, journal.load())), limit=60, what="a stopped worker")
            finally:
                run.kill()
                run.wait()
        left = journal.load()
        done = await asyncio.to_thread(
            subprocess.run, [*command, "--undo"], env=environment, capture_output=True, text=True, check=True
        )
        assert f"the process {left[0].pid} was continued" in done.stdout
        assert not any(map(is_stopped, left))
        assert journal.load() == []
        cid = await client.submit("do it", agent="ChaosAgent")
        await client.wait_until_settled(cid)
        assert len(await list_members(client.store)) > 0


def is_stopped(fault: OpenFault) -> bool:
    try:
        return Path(f"/proc/{fault.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


async def test_undoing_spares_a_later_process_with_the_number(tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "journal")
    with program(*ASLEEP) as asleep:
        asleep.send_signal(signal.SIGSTOP)
        fault = OpenFault("stop", asleep.pid, started=1)
        await until(lambda: is_stopped(fault), what="a stop")
        journal.add(fault)
        assert await journal.undo_all(None) == [f"the stopped process {asleep.pid} has ended"]
        assert is_stopped(fault)
        assert journal.load() == []


async def test_the_limit_of_another_store_stays(memory_store: Any, tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "journal")
    ballast = tmp_path / "ballast"
    ballast.write_bytes(b"x")
    elsewhere = OpenFault("memory", value="0", generation="another")
    for fault in (elsewhere, OpenFault("disk", value=str(ballast))):
        journal.add(fault)
    assert await journal.undo_all(memory_store) == [f"{ballast} was removed"]
    assert journal.load() == [elsewhere]
    assert not ballast.exists()


async def test_the_oldest_limit_is_restored_last(valkey_store: Any, tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "journal")
    _, before = await valkey_store.call("CONFIG", "GET", "maxmemory")
    try:
        for value in ("104857600", "209715200"):
            journal.add(OpenFault("memory", value=value, generation=valkey_store.generation))
        assert len(await journal.undo_all(valkey_store)) == 2
        assert await valkey_store.call("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"104857600"]
        assert journal.load() == []
    finally:
        await valkey_store.call("CONFIG", "SET", "maxmemory", before)


def chaos_without_workers(store: Any, root: Path, *faults: str, url: str = "redis://h", **fields: Any) -> Chaos:
    given = {"every_seconds": 0.2, "duration_seconds": 1, "conversations": 1, "settle_seconds": 0.1, **fields}
    return Chaos(Client(store), ChaosSpec(root, url, faults=faults, own_pairs=0, **given))


async def test_memory_faults_do_not_overlap(valkey_store: Any, tmp_path: Path) -> None:
    before = await valkey_store.call("CONFIG", "GET", "maxmemory")
    report = await chaos_without_workers(valkey_store, tmp_path, "memory", duration_seconds=4).run()
    times = sorted((fault.after_seconds, fault.after_seconds + fault.lasted_seconds) for fault in report.faults)
    assert times
    assert all(end <= start + 0.05 for (_, end), (start, _) in itertools.pairwise(times))
    assert await valkey_store.call("CONFIG", "GET", "maxmemory") == before
    assert UndoJournal(tmp_path / "open-faults.jsonl").load() == []


async def test_the_memory_of_a_store_behind_sentinels_is_not_limited(memory_store: Any, tmp_path: Path) -> None:
    report = await chaos_without_workers(memory_store, tmp_path, "memory", url="redis+sentinel://h:1/group").run()
    assert report.not_tried["memory"] == "a failover would leave the limit on the former primary"


async def test_a_fault_that_was_refused_is_not_reported(memory_store: Any, tmp_path: Path) -> None:
    report = await chaos_without_workers(memory_store, tmp_path, "pause", "memory").run()
    assert report.faults == ()
    assert set(report.not_tried) == {"pause", "memory"}
    assert UndoJournal(tmp_path / "open-faults.jsonl").load() == []


async def test_run_that_may_not_start_conversations_ends_with_the_reason(tmp_path: Path) -> None:
    async with serving("log", tmp_path / "log", environment_with(tmp_path)) as log:
        await (await open_store(log.admin)).aclose()
        store = await open_store(log.role("metrics"))
        with pytest.raises(StoreMisconfigured, match="NOPERM"):
            await chaos_without_workers(store, tmp_path / "chaos", "pause").run()
        await store.aclose()


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({}, True),
        ({"finished": 0}, False),
        ({"effects": EffectCounts(commands=1, unknown=1)}, False),
        ({"effects": EffectCounts(commands=2, done=1, unread=1)}, False),
        ({"effects": EffectCounts(commands=2, done=1, lost=1)}, False),
        ({"effects": EffectCounts(commands=2, done=1, unknown=1)}, True),
        ({"unsettled": ("c",)}, False),
        ({"findings": ("x",)}, False),
    ],
)
def test_a_run_that_shows_nothing_does_not_hold(fields: dict[str, Any], holds: bool) -> None:
    report = ChaosReport(0, 1.0, **{"finished": 1, "effects": EffectCounts(commands=1, done=1), **fields})
    assert report.holds is holds
    assert ("Everything holds." in report.render_markdown()) is holds


async def test_role_is_left_alone_until_its_killed_worker_is_replaced(valkey_store: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        posing = [stack.enter_context(program(*POSING)) for _ in range(3)]
        for one in posing:
            await until(lambda pid=one.pid: b"controller_worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
            await Membership(
                valkey_store, f"{make_worker_id_prefix('controller')}{one.pid}-abcd", "controller"
            ).register()
        report = await chaos_without_workers(valkey_store, tmp_path, "kill").run()
        assert len(report.faults) == 1, (report.not_tried, report.unreachable)
        assert sum(one.poll() is not None for one in posing) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a small file system")
async def test_a_full_disk_with_the_journal_is_undone(tmp_path: Path) -> None:
    with small_disk(tmp_path, "1m") as disk, program(*ASLEEP) as asleep:
        journal, ballast = UndoJournal(disk / "journal"), disk / "ballast"
        asleep.send_signal(signal.SIGSTOP)
        with ProvenProcess.open(asleep.pid) as process:  # type: ignore[union-attr]
            stopped = OpenFault("stop", asleep.pid, process.started)
        await until(lambda: is_stopped(stopped), what="a stop")
        filled = OpenFault("disk", value=str(ballast))
        journal.add(stopped)
        journal.add(filled)
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        with pytest.raises(OSError, match="No space left"):
            journal.add(OpenFault("stop", 1, 1))
        assert await journal.undo(stopped, None) == f"the process {asleep.pid} was continued"
        assert journal.load() == [stopped, filled]
        assert len(await journal.undo_all(None)) == 2
        assert journal.load() == []
        assert not ballast.exists()


# Counting

ACTION = CmdRunAction(id=5, command=make_counted_command(1))
RAN = CmdOutputObservation(
    id=6,
    cause=5,
    content="",
    command=ACTION.command,
    metadata={"exit_code": 0, "pid": -1},  # type: ignore[arg-type]
)
UNKNOWN = OutcomeUnknownObservation(id=6, cause=5, content="x")


@pytest.mark.parametrize(
    ("answer", "effects", "kind"),
    [
        (RAN, "start 1\nend 1\n", "done"),
        (RAN, "start 1\n", "lost"),
        (RAN, "", "lost"),
        (RAN, "start 1\nend 1\nstart 1\nend 1\n", "doubled"),
        (RAN, "start 1\nend 1\nend 1\n", "doubled"),
        (RAN, None, "unread"),
        (UNKNOWN, "start 1\n", "unknown"),
        (UNKNOWN, "", "unknown"),
        (UNKNOWN, "start 1\nstart 1\n", "doubled"),
    ],
)
def test_an_effect_is_judged_by_its_file(answer: Any, effects: str | None, kind: str) -> None:
    created = ConversationCreated(id=1, conversation_id="c")
    counts, findings = count_effects("c", [created, ACTION, answer], effects)
    assert counts == EffectCounts(commands=1, **{kind: 1})  # type: ignore[arg-type]
    assert bool(findings) is (kind in ("lost", "doubled"))
    report = ChaosReport(1, 1.0, conversations=1, finished=1, effects=counts)
    assert report.holds is (kind == "done")


def test_ranks_of_latencies() -> None:
    assert Latencies.of([]) == Latencies(0, None, None, None)
    assert Latencies.of([float(n) for n in range(1, 201)]) == Latencies(200, 100.0, 198.0, 200.0)
    assert str(Latencies.of([2.0])) == "1; p50 2.00 s, p99 2.00 s, max 2.00 s"


async def test_the_schedule_follows_from_the_seed(memory_store: Any, tmp_path: Path) -> None:
    def plan(seed: int) -> list[tuple[float, str]]:
        return Chaos(Client(memory_store), ChaosSpec(tmp_path, "redis://h", seed=seed))._plan()

    assert plan(1) == plan(1) != plan(2)
    assert {kind for _, kind in plan(1)} >= set(list(FAULTS)[:3])
