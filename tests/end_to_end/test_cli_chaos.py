"""`deckhands chaos` and `up --chaos` from the command line: what they print, their exit codes, and their report."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.command_line import (
    COMMAND,
    Done,
    cluster,
    deckhands,
    environment,
    finished,
    read_until,
    started,
)
from tests.polling import unhurried
from tests.turns import bash, finish, script

SHORT = ("--duration", "6s", "--every", "1s", "--conversations", "2", "--workers", "0")


def run(env: dict[str, str], *options: str) -> Done:
    """Run `deckhands chaos` as a process: it handles signals."""
    ended = subprocess.run(
        [*COMMAND, "chaos", *options], env=env, capture_output=True, text=True, check=False, timeout=unhurried(240)
    )
    return Done(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.timeout(400)
def test_cluster_of_up_holds_and_is_refused_while_others_work(tmp_path: Path) -> None:
    env = environment(tmp_path)
    with cluster(tmp_path, "--sandbox", "none"):
        done = run(env, *SHORT, "--faults", "kill,pause,memory,store", "--report", str(tmp_path / "report"), "--json")
        assert done.code == 0, done
        report = json.loads(done.out)
        assert report["holds"]
        assert report["effects"]["done"] > 0
        assert report == json.loads((tmp_path / "report" / "report.json").read_text())
        assert "Seed 0: " in done.err
        assert "## Faults" in (tmp_path / "report" / "report.md").read_text()
        model = script(tmp_path / "model.json", bash("sleep 300", timeout="300"), finish())
        theirs = deckhands("submit", "-t", "Wait.", "--model", model, env=env).out.strip()
        refused = run(env, *SHORT)
        assert refused.code == 2
        assert f"1 conversation of other users may be disturbed, such as {theirs}." in refused.err
        assert "pass --others" in refused.err
        disturbed = run(env, *SHORT, "--faults", "pause", "--others")
        assert disturbed.code == 0, disturbed
        assert "Everything holds." in disturbed.out
        assert deckhands("cancel", theirs, "--yes", env=env).code == 0


def test_wrong_usage_is_refused_without_a_cluster(tmp_path: Path) -> None:
    env = environment(tmp_path)
    listed = deckhands("chaos", "--list", env=env)
    assert (listed.code, listed.out.count("SIGKILL")) == (0, 3)
    for options, text in {
        ("--every", "soon"): "soon is no length of time. Write 90, 90s, 1.5m or 2h.",
        ("--duration", "25h"): "25h is not between 1 s and 86400 s.",
    }.items():
        refused = deckhands("chaos", *options, env=env)
        assert refused.code == 2
        assert text in refused.err
    assert deckhands("chaos", "--undo", env=env).code == 0
    lost = deckhands("chaos", env=env)
    assert lost.code == 2
    assert "no cluster is running here" in lost.err


@pytest.mark.timeout(300)
def test_up_with_chaos_carries_work_to_its_end(tmp_path: Path) -> None:
    env = environment(tmp_path)
    with started("up", "--sandbox", "none", "--chaos", "1s", "--seed", "4", env=env) as running:
        read_until(running, "Ctrl-C stops it")
        cid = deckhands("submit", "--agent", "ChaosAgent", "-t", "Count.", env=env).out.strip()
        assert deckhands("wait", cid, "--timeout", "200", env=env).code == 0
        assert deckhands("verify", cid, env=env).code == 0
        running.terminate()
        done = finished(running)
    assert done.code == 0
    assert "chaos: SIGKILL to " in done.err
