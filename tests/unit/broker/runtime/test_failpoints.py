"""Failpoints: action, time and count; in separate processes where they end them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from broker.runtime.errors import UsageError
from broker.runtime.failpoints import failpoint, parse_failpoints
from tests.polling import until

HITS = """
import sys
from broker.runtime.failpoints import FailpointReached, arm, failpoint
from broker.runtime.settings import BrokerSettings
arm(BrokerSettings.from_env())
for n in range(1, 5):
    try:
        failpoint("here")
    except FailpointReached as reached:
        print(reached, flush=True)
    failpoint("elsewhere")
    print(n, flush=True)
"""


def _start(failpoints: str, log: Path | str = "") -> subprocess.Popen[str]:
    env = {"DECKHANDS_FAILPOINTS": failpoints, "DECKHANDS_FAILPOINT_LOG": str(log)}
    return subprocess.Popen([sys.executable, "-c", HITS], env=env, stdout=subprocess.PIPE, text=True)


def _run(failpoints: str, log: Path | str = "") -> tuple[int, list[str]]:
    with _start(failpoints, log) as process:
        out, _ = process.communicate(timeout=30)
    return process.returncode, out.split("\n")[:-1]


def test_unarmed_nothing_happens() -> None:
    failpoint("anything")


@pytest.mark.parametrize(
    ("failpoints", "outcome"),
    [
        ("here:kill", (-signal.SIGKILL, [])),
        ("here:kill@3", (-signal.SIGKILL, ["1", "2"])),
        ("elsewhere:exit@2", (1, ["1"])),
        ("here:raise@2", (0, ["1", "The failpoint here was reached.", "2", "3", "4"])),
        ("here:raise@1, elsewhere:kill@2", (-signal.SIGKILL, ["The failpoint here was reached.", "1"])),
        ("nowhere:kill, here:kill@9", (0, ["1", "2", "3", "4"])),
    ],
)
def test_actions(failpoints: str, outcome: tuple[int, list[str]]) -> None:
    assert _run(failpoints) == outcome


def test_a_marker_lets_a_process_die_once_only(tmp_path: Path) -> None:
    failpoints = f"here:kill@2:{tmp_path / 'once'}"
    assert _run(failpoints) == (-signal.SIGKILL, ["1"])
    assert _run(failpoints) == (0, ["1", "2", "3", "4"])


def test_what_is_reached_is_noted_before_it_acts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _run("here:kill@2", log)
    _run("elsewhere:raise@1", log)
    noted = [line.split() for line in log.read_text().splitlines()]
    assert [name for name, _ in noted] == ["here", "elsewhere"]
    assert all(int(pid) > 0 for _, pid in noted)


async def test_a_stopped_process_goes_on_when_told_to(tmp_path: Path) -> None:
    with _start("here:stop@2") as process:
        state = psutil.Process(process.pid)
        await until(lambda: state.status() == psutil.STATUS_STOPPED, what="stopped process")
        state.resume()
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "1\n2\n3\n4\n")


async def test_a_pause_lasts_until_its_marker_is_removed(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with _start(f"here:pause@2:{gate}") as process:
        await until(gate.exists, what="gate")
        assert process.poll() is None
        gate.unlink()
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "1\n2\n3\n4\n")


@pytest.mark.parametrize(
    "text", ["here", "here:", "here:explode", "here:kill@0", "here:kill@x", ":kill", "here:pause", "a:kill,a:stop"]
)
def test_invalid_failpoints_are_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be used\. Write name:kill@1"):
        parse_failpoints(text)
