"""Three servers with a Sentinel beside each, as the pods of the chart run them, by `deploy/serve-valkey`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.health import HEALTHY, check
from broker.primary import wait_for_primary
from broker.runtime import DeckhandsError, StoreMisconfigured
from broker.store import SentinelUrl
from broker.store.connection import MultiplexedConnection
from broker.store.sentinel import find_primary, order_fail_over
from tests.polling import until
from tests.sentinels import find_port
from tests.served_stores import ADMIN, PASSWORDS, SERVE_VALKEY, environment_with

REPLICATION, CLIENT, SENTINELS = "replication-0123456", "client-0123456789", "sentinels-0123456"
LIMIT_SECONDS = 90.0


def find_programs(folder: Path) -> dict[str, str]:
    """Return an environment in which the server and Python are found, as in the image."""
    path = environment_with(folder)["PATH"]
    return {"PATH": f"{Path(sys.executable).parent}:{path}"}


class Pod:
    """A server and its Sentinel, which share a directory."""

    def __init__(self, folder: Path, programs: dict[str, str], port: int, sentinel_port: int) -> None:
        self.folder, self.programs, self.port, self.sentinel_port = folder, programs, port, sentinel_port
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir()

    def start(self, pods: list[Pod], *purposes: str, chosen: str = "") -> None:
        """Start the server and its Sentinel, or one of them."""
        environment = {
            **self.programs,
            **PASSWORDS,
            "REPLICATION_PASSWORD": REPLICATION,
            "SENTINEL_PASSWORD": CLIENT,
            "SENTINEL_ADMIN_PASSWORD": SENTINELS,
            "SENTINELS": ",".join(f"127.0.0.1:{pod.sentinel_port}" for pod in pods),
            "ANNOUNCE": "127.0.0.1",
            "FIRST": f"127.0.0.1:{pods[0].port}",
            "PORT": str(self.port),
            "SENTINEL_PORT": str(self.sentinel_port),
            "DOWN_AFTER_MS": "1000",
            "CHOSEN": chosen,
        }
        for purpose in purposes or ("sentinel", "log"):
            with (self.folder / f"{purpose}.txt").open("ab") as log:
                self.processes[purpose] = subprocess.Popen(
                    [SERVE_VALKEY, purpose],
                    env=environment,
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def kill(self, *purposes: str) -> None:
        for purpose in purposes or tuple(self.processes):
            process = self.processes.pop(purpose)
            os.killpg(process.pid, signal.SIGKILL)  # as the end of a container does
            process.wait()

    def lose_data(self) -> None:
        shutil.rmtree(self.folder / "appendonlydir")


class Pods:
    """All pods of a store."""

    def __init__(self, pods: list[Pod]) -> None:
        self.pods = pods

    def url(self, login: str) -> str:
        hosts = ",".join(f"127.0.0.1:{pod.sentinel_port}" for pod in self.pods)
        return f"redis+sentinel://{login}@{hosts}/deckhands?sentinel_username=client&sentinel_password={CLIENT}"

    async def find_primary(self) -> Pod:
        """Return the primary after a fail-over that is in progress."""
        host, port = (await wait_for_primary(SentinelUrl.parse(self.url("")))).address
        assert host == "127.0.0.1"
        return next(pod for pod in self.pods if pod.port == port)

    async def set(self, value: str) -> bool:
        """Write through the Sentinels, as a worker does; return whether the write was confirmed."""
        connection = MultiplexedConnection(self.url(f"admin:{ADMIN}"), reply_timeout_seconds=2.0)
        try:
            await connection.call("SET", "tried", value)
        except DeckhandsError:
            return False
        else:
            return True
        finally:
            await connection.aclose()

    async def get(self, pod: Pod) -> bytes | None:
        connection = MultiplexedConnection(f"redis://admin:{ADMIN}@127.0.0.1:{pod.port}/0", reply_timeout_seconds=2.0)
        try:
            value: bytes | None = await connection.call("GET", "tried")
        except DeckhandsError:
            return None
        finally:
            await connection.aclose()
        return value

    async def get_is(self, pod: Pod, value: str) -> bool:
        return await self.get(pod) == value.encode()

    async def are_known(self) -> bool:
        """Return whether each Sentinel knows two replicas; they learn of them every ten seconds."""
        url = SentinelUrl.parse(self.url(""))
        try:
            found = [await find_primary(url, turn=turn) for turn in range(len(self.pods))]
        except DeckhandsError:
            return False
        return all(primary.connected == len(self.pods) - 1 for primary in found)

    async def have_all(self, value: str) -> bool:
        return [await self.get(pod) for pod in self.pods] == [value.encode()] * len(self.pods)


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[Pods]:
    programs = find_programs(tmp_path)
    found = [Pod(tmp_path / f"pod-{number}", programs, find_port(), find_port()) for number in range(3)]
    try:
        for pod in found:
            pod.start(found)
        yield Pods(found)
    finally:
        for pod in found:
            pod.kill()


async def written(pods: Pods, value: str) -> None:
    await until(lambda: pods.set(value), limit=LIMIT_SECONDS)
    await until(lambda: pods.have_all(value), limit=LIMIT_SECONDS)
    await until(pods.are_known, limit=LIMIT_SECONDS)


async def test_killed_primary_returns_as_a_replica(pods: Pods) -> None:
    await written(pods, "first")
    primary = await pods.find_primary()
    assert primary is pods.pods[0]

    primary.kill()
    await until(lambda: pods.set("second"), limit=LIMIT_SECONDS)
    assert await pods.find_primary() is not primary

    primary.start(pods.pods)
    await written(pods, "third")
    assert await pods.find_primary() is not primary


async def test_replaced_primary_serves_nothing_when_all_restart(pods: Pods) -> None:
    await written(pods, "first")
    replaced = await pods.find_primary()
    replaced.kill()
    await until(lambda: pods.set("second"), limit=LIMIT_SECONDS)
    for pod in pods.pods:
        pod.kill()

    replaced.start(pods.pods)  # alone, with what it and its Sentinel knew
    log = replaced.folder / "log.txt"
    await until(lambda: "1 of 3 Sentinels name a primary" in log.read_text(), limit=LIMIT_SECONDS)

    for pod in pods.pods[1:]:
        pod.start(pods.pods)
    await until(lambda: pods.have_all("second"), limit=LIMIT_SECONDS)


async def test_primary_that_has_lost_its_data_returns_as_a_replica(pods: Pods) -> None:
    await written(pods, "first")
    primary = await pods.find_primary()
    primary.kill("log")
    primary.lose_data()
    primary.start(pods.pods, "log")  # at once: no Sentinel has missed it yet
    await until(lambda: pods.set("second"), limit=LIMIT_SECONDS)
    await until(lambda: pods.have_all("second"), limit=LIMIT_SECONDS)
    assert await pods.find_primary() is not primary


async def test_empty_primary_waits_until_another_server_is_chosen(pods: Pods) -> None:
    await written(pods, "first")
    primary = await pods.find_primary()
    for pod in pods.pods:
        pod.kill()
    primary.lose_data()
    for pod in pods.pods:
        pod.start(pods.pods)
    log = primary.folder / "log.txt"
    begun = log.read_text().count("Ready to accept connections")
    await until(lambda: "it has no data" in log.read_text(), limit=LIMIT_SECONDS)
    assert log.read_text().count("Ready to accept connections") == begun

    for pod in pods.pods:
        pod.kill()
    keeper = next(pod for pod in pods.pods if pod is not primary)
    for pod in pods.pods:
        pod.start(pods.pods, chosen=f"127.0.0.1:{keeper.port}")
    await until(lambda: pods.have_all("first"), limit=LIMIT_SECONDS)


async def test_primary_without_replicas_writes_again_with_one(pods: Pods) -> None:
    """The runbook of NOREPLICAS, with the volumes of both replicas lost."""
    await written(pods, "first")
    primary = await pods.find_primary()
    replicas = [pod for pod in pods.pods if pod is not primary]
    for pod in replicas:
        pod.kill("log")
        pod.lose_data()

    async def is_refused() -> bool:
        connection = MultiplexedConnection(f"redis://admin:{ADMIN}@127.0.0.1:{primary.port}/0")
        try:
            await connection.call("SET", "tried", "refused")
        except DeckhandsError as error:
            return "NOREPLICAS" in str(error) or "replica" in str(error)
        else:
            return False
        finally:
            await connection.aclose()

    await until(is_refused, limit=LIMIT_SECONDS)
    replicas[0].start(pods.pods, "log")
    await until(lambda: pods.set("second"), limit=LIMIT_SECONDS)
    await until(lambda: pods.get_is(replicas[0], "second"), limit=LIMIT_SECONDS)


async def test_member_is_ready_once_it_has_all_data(pods: Pods) -> None:
    await written(pods, "first")
    for pod in pods.pods:
        url = f"redis://metrics:{PASSWORDS['METRICS_PASSWORD']}@127.0.0.1:{pod.port}/0"

        async def is_ready(url: str = url) -> bool:
            return (await check("member", url)).exit_status == HEALTHY

        await until(is_ready, limit=LIMIT_SECONDS)
    followers = [pod for pod in pods.pods if pod is not await pods.find_primary()]
    for pod in pods.pods:
        if pod not in followers:
            pod.kill()
    unready = f"redis://metrics:{PASSWORDS['METRICS_PASSWORD']}@127.0.0.1:{followers[0].port}/0"
    followers[1].kill()  # so that no fail-over is possible
    await until(lambda: is_not_ready(unready), limit=LIMIT_SECONDS)


async def is_not_ready(url: str) -> bool:
    return (await check("member", url)).exit_status != HEALTHY


async def test_clients_may_not_order_a_fail_over(pods: Pods) -> None:
    await written(pods, "first")
    with pytest.raises(StoreMisconfigured, match="NOPERM"):
        await order_fail_over(SentinelUrl.parse(pods.url("")))


@pytest.mark.parametrize(
    ("purpose", "changed", "complaint"),
    [
        ("sentinel", {"SENTINEL_PASSWORD": ""}, "set SENTINEL_PASSWORD; there is no default password"),
        ("sentinel", {"FIRST": "store-0"}, "set FIRST to HOST:PORT of the first primary"),
        ("sentinel", {"ANNOUNCE": ""}, "set ANNOUNCE to the host by which the other Sentinels reach this one"),
        ("sentinel", {"SENTINEL_ADMIN_PASSWORD": ""}, "set SENTINEL_ADMIN_PASSWORD; there is no default password"),
        ("log", {"ANNOUNCE": ""}, "set ANNOUNCE to the host by which the other servers reach this one"),
        ("log", {"REPLICATION_PASSWORD": ""}, "set REPLICATION_PASSWORD; there is no default password"),
    ],
)
def test_missing_setting_of_a_replicated_server_is_named(
    purpose: str, changed: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    environment = {
        **find_programs(tmp_path),
        **PASSWORDS,
        "REPLICATION_PASSWORD": REPLICATION,
        "SENTINEL_PASSWORD": CLIENT,
        "SENTINEL_ADMIN_PASSWORD": SENTINELS,
        "SENTINELS": "127.0.0.1:1",
        "ANNOUNCE": "127.0.0.1",
        "FIRST": "127.0.0.1:2",
    }
    ended = subprocess.run(
        [SERVE_VALKEY, purpose],
        check=False,
        env={**environment, **changed},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert (ended.returncode, ended.stderr) == (2, f"serve-valkey: {complaint}\n")
