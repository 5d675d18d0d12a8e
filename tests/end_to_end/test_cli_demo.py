"""`deckhands demo`: agents at once, workers killed, and a report that can be believed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from deckhands.cli.commands.demo import report_lines
from deckhands.cli.demo import DemoReport
from tests.integration.command_line import deckhands, environment, finished, started

WHOLE = DemoReport(
    conversations=20,
    finished=20,
    tests_passing=20,
    events=1640,
    events_lost=0,
    observations_doubled=0,
    violations=[],
    failures=[],
    kills=["controller-2", "tools-1"],
    takeovers=13,
    takeover_median_seconds=1.9876,
    takeover_longest_seconds=2.2,
    wall_seconds=9.87,
    seed=0,
)


def test_every_agent_finishes_though_workers_are_killed(tmp_path):
    done = deckhands(
        *("demo", "--conversations", "6", "--kills", "2", "--seed", "1", "--json"), env=environment(tmp_path / "home")
    )
    assert done.code == 0, done
    (report,) = done.json
    expected = {"conversations": 6, "finished": 6, "tests_passing": 6, "events_lost": 0, "observations_doubled": 0}
    assert {name: report[name] for name in expected} == expected
    assert (report["violations"], report["is_whole"], report["seed"]) == ([], True, 1)
    assert [name.rpartition("-")[0] for name in report["kills"]] == ["controller", "tools"]
    assert report["takeovers"] >= 1
    assert 0 < report["takeover_median_seconds"] <= report["takeover_longest_seconds"] < 10
    assert report["events"] > 6 * 20
    assert "6/6 finished" in done.err

    directory = Path(done.err.splitlines()[0].rpartition(" ")[2])
    assert not directory.exists()
    assert [line for line in command_lines() if str(directory) in line] == []


def test_an_interrupted_demo_leaves_nothing(tmp_path):
    env = environment(tmp_path / "home", TMPDIR=str(tmp_path))
    with started("demo", "--conversations", "4", "--kills", "0", env=env) as running:
        assert running.stderr is not None
        assert "4 agents" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        assert finished(running).code == 130
    assert list(tmp_path.glob("deckhands-demo-*")) == []


def command_lines() -> Iterator[str]:
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            yield " ".join(process.cmdline())


def test_the_table_at_the_end():
    assert report_lines(WHOLE) == [
        "conversations         20",
        "finished              20",
        "tests passing         20",
        "workers killed        2 (controller-2, tools-1)",
        "takeovers             13, median 1.99 s, longest 2.20 s",
        "events                1,640",
        "events lost           0",
        "observations doubled  0",
        "wall time             9.9 s",
        "Everything finished, every test passes, every log is whole.",
    ]


def test_missing_parts_of_the_demo_are_reported():
    for broken in (
        {"finished": 19},
        {"tests_passing": 19},
        {"events_lost": 1},
        {"observations_doubled": 1},
        {"violations": ["c1: I2: event 6 is where event 5 belongs"]},
    ):
        report = DemoReport(**{**{name: getattr(WHOLE, name) for name in WHOLE.__slots__}, **broken})
        assert not report.is_whole
        assert report_lines(report)[-1] == "Something is missing, see above."
    assert "! c1: I2: event 6 is where event 5 belongs" in report_lines(report)
