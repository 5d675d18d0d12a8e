"""A machine without a working sandbox: programs that run nevertheless, and programs that report it at once."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.integration.command_line import deckhands, environment, finished, run_command, started
from tests.turns import finish, script

# As on a machine that never had bubblewrap: nothing may be executed in its place.
WITHOUT_BWRAP = "bwrap --dev-bind / / --ro-bind /dev/null /usr/bin/bwrap"
WITHOUT_TERMINALS = "bwrap --dev-bind / / --tmpfs /dev/pts"
REASON = "bwrap does not work here"


@pytest.fixture
def env(tmp_path):
    return environment(tmp_path / "home")


@pytest.mark.soak
def test_the_demo_needs_none(env):
    with started("demo", "--conversations", "4", "--json", env=env, before=WITHOUT_BWRAP) as running:
        done = finished(running)
    assert done.code == 0, done
    assert (done.json[0]["tests_passing"], done.json[0]["is_whole"]) == (4, True)
    assert f"No sandbox works here ({REASON}" in done.err


def test_the_demo_takes_no_less_than_was_asked_for(env):
    with started("demo", "--kills", "0", env=env | {"DECKHANDS_SANDBOX": "bwrap"}, before=WITHOUT_BWRAP) as running:
        done = finished(running)
    assert (done.code, f"deckhands: The sandbox bwrap does not work here: {REASON}" in done.err) == (1, True), done


def test_a_demo_that_fails_says_why(env):
    arguments = ("demo", "--conversations", "2", "--kills", "0")
    with started(*arguments, env=env | {"DECKHANDS_SANDBOX": "none"}, before=WITHOUT_TERMINALS) as running:
        done = finished(running)
    assert done.code == 1, done
    first, second = (line for line in done.out.splitlines() if line.startswith("! "))
    assert first.startswith("! 00-billing_dates: its agent's first error: The host of ")
    assert second.startswith("! 01-expense_totals: ")


@pytest.mark.parametrize(
    ("sandbox", "verdict"), [pytest.param("none", "missing", marks=pytest.mark.soak), ("auto", "weaker")]
)
def test_the_doctor_misses_terminals(env, sandbox, verdict):
    with started("doctor", env=env | {"DECKHANDS_SANDBOX": sandbox}, before=WITHOUT_TERMINALS) as running:
        done = finished(running)
    assert f"{verdict:<8}room for sessions   no terminal can be opened" in done.out, done
    assert done.code == (sandbox == "none")


@pytest.mark.soak
def test_run_without_sandbox_ends_and_continues_when_possible(env, tmp_path):
    (workspace := tmp_path / "workspace").mkdir()
    model = script(tmp_path / "m.json", *[run_command("echo $((6 * 7)) > n")] * 3, finish("Done."), latency_seconds=0.5)
    arguments = ["-t", "Count.", "-w", workspace, "--model", model, "--json"]
    with started("run", *arguments, env=env, before=WITHOUT_BWRAP) as running:
        done = finished(running)
    assert done.code == 1, done
    assert "deckhands: No sandbox works on this machine: bwrap does not work here" in done.err
    assert "DECKHANDS_SANDBOX=none" in done.err
    cid = done.json[0]["conversation_id"]
    assert f"`deckhands run --resume {cid}`" in done.err
    assert sum(event["kind"].startswith("action.run") for event in done.json) <= 1
    resumed = deckhands("run", "--resume", cid, "--json", env=env)
    assert (resumed.code, resumed.json[-1]["state"]) == (0, "finished"), resumed
    assert (workspace / "n").read_text() == "42\n"


@pytest.mark.soak
def test_unservable_run_ends_at_its_first_action(env, tmp_path):
    (workspace := tmp_path / "workspace").mkdir()
    model = script(tmp_path / "m.json", *[run_command("true")] * 3, finish("Done."))
    without_engine = env | {"DECKHANDS_DOCKER_HOST": "tcp://127.0.0.1:1"}
    arguments = ("run", "-t", "x", "-w", workspace, "--sandbox", "docker", "--model", model, "--json")
    done = deckhands(*arguments, env=without_engine)
    assert done.code == 1, done
    assert "lacks the sandbox docker" in done.err
    assert sum(event["kind"].startswith("action.run") for event in done.json) <= 1


@pytest.mark.soak
def test_a_cluster_says_that_it_refuses(env):
    with started("up", env=env, before=WITHOUT_BWRAP) as running:
        assert running.stderr is not None
        line = next(line for line in running.stderr if "sandbox" in line)
        (inside,) = psutil.Process(running.pid).children()
        inside.send_signal(signal.SIGINT)
        assert finished(running).code == 0
    assert f"No sandbox works on this machine: {REASON}" in line
    assert "agents' commands are refused" in line
