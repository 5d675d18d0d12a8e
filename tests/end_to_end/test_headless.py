"""The headless hand-off as a process: the page on migrating, runs of the bridge, and a bridge that is killed."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys

import pytest

from deckhands.headless.bridge import Bridge
from tests.end_to_end.test_cli_run import running_below
from tests.integration.command_line import environment, finish, run_command, script
from tests.polling import until
from tests.source_code import ROOT

PAGE = ROOT / "docs" / "migrating-from-openhands.md"
FINAL = "experiments/count/results/final.json"
WRITE = run_command(f"""echo '{{"status": "success"}}' > {FINAL}""")


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "place"
    path.mkdir()
    return path


def env_for(home, model: str, **variables: str) -> dict[str, str]:
    return environment(home, LLM_MODEL=model, DECKHANDS_SANDBOX="none", **variables)


def files_of(workspace) -> list[str]:
    return sorted(str(path.relative_to(workspace)) for path in workspace.rglob("*") if path.is_file())


def block_of_page(language: str) -> str:
    """Return the first block of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]


def test_the_bridge_of_the_page(home, place, tmp_path, monkeypatch):
    model = script(tmp_path / "m.json", WRITE, {"text": "Shall I continue?"}, finish("Done."))
    (place / ".env").write_text("SAVE_TRAJECTORY_PATH=saved/trajectory.json\n")
    env = env_for(home, model)
    for name in list(env):
        monkeypatch.setenv(name, env[name])
    monkeypatch.chdir(place)
    names = {"directory": str(place)}
    exec(compile(block_of_page("python"), str(PAGE), "exec"), names)
    summary, workspace = names["done"], place / "workspace"
    assert (summary.success, summary.exit_code, summary.reason) == (True, 0, "finished"), summary
    assert summary.duration_seconds > 0
    assert "State:        finished" in summary.stdout_tail
    logs = [f"logs/count/{name}" for name in ("events.jsonl", "run.log", "summary.json")]
    assert [str(path.relative_to(workspace)) for path in summary.artifacts] == [FINAL, *logs]
    assert files_of(workspace) == ["README.md", FINAL, *logs, "saved/trajectory.json"]
    assert FINAL in (workspace / "README.md").read_text()
    log = (workspace / "logs/count/run.log").read_text()
    assert "Shall I continue?" in log
    assert "Never ask a person for help" in log
    trajectory = json.loads((workspace / "saved/trajectory.json").read_text())
    assert [event["id"] for event in trajectory] == list(range(len(trajectory)))
    assert "finish" in [event.get("action") for event in trajectory]
    assert running_below(home) == []


@pytest.mark.soak
def test_the_command_of_the_page_leaves_the_same_files_each_time(home, place, tmp_path):
    env = env_for(home, script(tmp_path / "m.json", WRITE, finish("Done.")))
    words = shlex.split(block_of_page("bash"))
    assert words[:3] == ["python", "-m", "deckhands.headless"]
    found = []
    for _ in range(3):
        command = [sys.executable, "-P", *words[1:]]
        done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done
        found.append(files_of(place / "workspace"))
    assert found[1] == found[2] == sorted([*found[0], FINAL.replace("final.json", "final.previous.json")])


async def test_a_killed_bridge_leaves_no_processes(home, place, tmp_path):
    model = script(tmp_path / "m.json", run_command("echo here > a; sleep 301.7"))
    code = f"from deckhands.headless.bridge import Bridge\nBridge({str(place)!r}).run('Wait.', name='count')\n"
    with subprocess.Popen([sys.executable, "-P", "-c", code], env=env_for(home, model)) as bridge:
        try:
            await until((place / "a").exists, what="command that runs")
        finally:
            bridge.send_signal(signal.SIGKILL)
    await until(lambda: running_below(home) == [], what="end of all processes")
    assert json.loads((place / "logs/count/summary.json").read_text())["state"] == "stopped"


@pytest.mark.soak
def test_a_result_that_is_never_written_is_reported(home, place, tmp_path):
    model = script(tmp_path / "m.json", finish("Done."))
    done = Bridge(place, environment=env_for(home, model)).run("Do nothing.", name="count")
    assert (done.success, done.exit_code, done.reason) == (False, 8, "missing_artifact"), done
    assert f"No result: {FINAL} is missing." in done.stdout_tail


@pytest.mark.soak
def test_a_run_whose_time_is_up_is_stopped_in_order(home, place, tmp_path):
    model = script(tmp_path / "m.json", run_command("sleep 301.8"))
    done = Bridge(place, environment=env_for(home, model)).run("Wait.", name="count", timeout_seconds=3)
    assert (done.success, done.exit_code, done.reason) == (False, 4, "out_of_time"), done
    assert place / "logs/count/events.jsonl" in done.artifacts
    assert running_below(home) == []


@pytest.mark.soak
def test_a_link_that_the_agent_puts_in_place_of_its_result_is_refused(home, place, tmp_path):
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    model = script(tmp_path / "m.json", run_command(f"ln -s {outside} {FINAL}"), finish("Done."))
    done = Bridge(place, environment=env_for(home, model)).run("Cheat.", name="count")
    assert (done.success, done.exit_code, done.reason) == (False, 9, "path_denied"), done


@pytest.mark.soak
def test_limits_and_questions_have_their_codes(home, place, tmp_path):
    bridge = Bridge(place, environment=env_for(home, script(tmp_path / "m.json", *[run_command("ls /")] * 9)))
    assert bridge.run("Look.", name="count", max_iterations=2).reason == "limit_reached"
    asking = Bridge(place, environment=env_for(home, script(tmp_path / "n.json", {"text": "What?"})))
    assert asking.run("Look.", name="count", arguments=["--no-auto-continue"]).reason == "needs_person"
