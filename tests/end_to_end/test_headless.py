"""The headless hand-off as a process: the page on migrating, runs of the bridge, and a bridge that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from deckhands.interop.headless.bridge import Bridge
from tests.docker_image import image
from tests.end_to_end.test_cli_run import running_below
from tests.integration.command_line import environment, run_command
from tests.polling import until
from tests.source_code import ROOT
from tests.turns import call, finish, script

PAGE = ROOT / "docs" / "parity.md"
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


def logged(workspace, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind in the log of the run."""
    lines = (workspace / "logs/count/events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


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


async def test_a_killed_bridge_leaves_no_processes(home, place, tmp_path):
    model = script(tmp_path / "m.json", run_command("echo here > a; sleep 301.7"))
    code = f"from deckhands.interop.headless.bridge import Bridge\nBridge({str(place)!r}).run('Wait.', name='count')\n"
    with subprocess.Popen([sys.executable, "-P", "-c", code], env=env_for(home, model)) as bridge:
        try:
            await until((place / "a").exists, what="command that runs")
        finally:
            bridge.send_signal(signal.SIGKILL)
    await until(lambda: running_below(home) == [], what="end of all processes")
    assert json.loads((place / "logs/count/summary.json").read_text())["state"] == "stopped"


def test_a_browser_that_the_environment_enables(home, place, tmp_path):
    (place / "hours.html").write_text("<h1>Open at 9</h1>")
    look = call("browser", code=f"goto('file://{place}/hours.html')")
    env = env_for(home, script(tmp_path / "m.json", look, WRITE, finish("Done.")), ENABLE_BROWSER="true")
    done = Bridge(place, environment=env).run("When does it open?", name="count")
    assert (done.success, done.reason) == (True, "finished"), done
    (page,) = logged(place, "observation.browse")
    assert "heading 'Open at 9'" in page["content"]
    assert running_below(home) == []


def test_the_sdk_agent_that_a_configuration_prefers(home, place, tmp_path):
    config = tmp_path / "my.toml"
    config.write_text("[agent]\nprefer_sdk_agents = true\nfallback_to_legacy = true\ntimeout_seconds = 300\n")
    env = env_for(home, script(tmp_path / "m.json", WRITE, finish("Done.")))
    done = Bridge(place, environment=env).run("Count.", name="count", arguments=["--config-file", str(config)])
    assert (done.success, done.reason) == (True, "finished"), done
    (created,) = logged(place, "conversation.created")
    assert created["agent"]["name"] == "CodeActAgentSDK"
    assert created["agent"]["sdk"] == {"fallback_to_legacy": True, "timeout_seconds": 300.0}
    # Where the SDK is not installed, the legacy agent has done it, and the log says why.
    assert [change["loop"] for change in logged(place, "conversation.changed")] in ([], ["legacy"])


def test_sections_of_a_configuration_and_a_trajectory_outside(home, place, tmp_path):
    server = {"name": "example", "command": sys.executable, "args": [str(ROOT / "tests" / "example_mcp_server.py")]}
    entry = ", ".join(f"{key} = {json.dumps(value)}" for key, value in server.items())
    cheap = script(tmp_path / "cheap.json")
    config = tmp_path / "config.toml"
    config.write_text(f"""
[core]
save_trajectory_path = {json.dumps(str(tmp_path / "saved"))}
[llm.cheap]
model = "{cheap}"
[condenser]
type = "llm"
llm_config = "cheap"
keep_first = 1
max_size = 6
[mcp]
stdio_servers = [{{{entry}}}]
[agent]
enable_think = true
[agent.CodeActAgent]
enable_think = false
""")
    (tmp_path / "saved").mkdir()
    echo = call("echo", text="from the server")
    looks = [run_command(f"echo {number}") for number in range(4)]
    env = env_for(home, script(tmp_path / "m.json", echo, *looks, WRITE, finish("Done.")))
    done = Bridge(place, environment=env).run("Count.", name="count", arguments=["--config-file", str(config)])
    assert (done.success, done.reason) == (True, "finished"), done
    (answer,) = logged(place, "observation.mcp")
    assert "from the server" in answer["content"]
    (created,) = logged(place, "conversation.created")
    assert created["agent"]["enable_think"] is False
    condensing = [reply["model"] for reply in logged(place, "model.reply") if reply["service"] == "condenser"]
    assert condensing
    assert set(condensing) == {cheap}
    trajectory = json.loads((tmp_path / "saved" / "count.json").read_text())
    assert [event["id"] for event in trajectory] == list(range(len(trajectory)))
    assert "config.toml" not in str(files_of(place))


def test_run_that_changes_a_file_outside_of_its_folders_fails(home, place, tmp_path):
    (place / "src").mkdir()
    (place / "src/a.py").write_text("a")
    stray = run_command("touch out/mine; touch -r src/a.py /tmp/t.$$; echo b > src/a.py; touch -r /tmp/t.$$ src/a.py")
    env = env_for(home, script(tmp_path / "m.json", stray, WRITE, finish("Done.")))
    env["SAVE_TRAJECTORY_PATH"] = "saved/t.json"  # which the command writes, not the agent
    done = Bridge(place, environment=env).run("Count.", name="count", permit=["out"])
    assert (done.success, done.exit_code, done.reason) == (False, 9, "path_denied"), done
    assert done.denied_paths == ("src/a.py",)
    assert "Changed outside of the permitted folders: 'src/a.py'." in done.stdout_tail
    summary = json.loads((place / "logs/count/summary.json").read_text())
    assert (summary["state"], summary["denied_paths"]) == ("finished", ["src/a.py"])
    done = Bridge(place, environment=env).run("Count.", name="count", permit=["out", "src"])
    assert (done.success, done.reason, done.denied_paths) == (True, "finished", ()), done


AUTHENTICATION = {"error": {"code": "authentication", "times": None}}
ENDS = {
    "missing_artifact": (8, [finish("Done.")] * 9, []),
    "path_denied": (9, [run_command("touch stray"), WRITE, finish("Done.")], ["--permit", "out"]),
    "out_of_time": (4, [run_command("sleep 301.7")], ["--timeout", "3"]),
    "error": (1, [AUTHENTICATION], []),
    "usage": (2, [WRITE, finish("Done.")], ["--config-file", "bad.toml"]),
    "limit_reached": (6, [run_command("true")] * 9, ["-i", "2"]),
    "needs_person": (5, [{"text": "Shall I?"}], ["--no-auto-continue"]),
}


@pytest.mark.parametrize("reason", ENDS)
def test_run_without_success_exits_with_its_code(home, place, tmp_path, monkeypatch, reason):
    code, turns, options = ENDS[reason]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[core]\nvolumes = '/a:/b'\n")
    env = env_for(home, script(tmp_path / "m.json", *turns), LLM_NUM_RETRIES="1")
    done = Bridge(place, environment=env).run("Count.", name="count", arguments=options)
    assert (done.success, done.exit_code, done.reason) == (False, code, reason), done
    assert running_below(home) == []


def test_a_run_in_docker_without_an_engine_says_so(home, place):
    env = env_for(home, "openai/none", RUNTIME="docker", SANDBOX_BASE_CONTAINER_IMAGE="some/image")
    done = Bridge(place, environment=env | {"DECKHANDS_DOCKER_HOST": "tcp://127.0.0.1:1"}).run("Count.", name="count")
    assert (done.exit_code, done.reason) == (2, "usage"), done
    assert "RUNTIME is docker, and docker does not work here: no docker engine answers" in done.stdout_tail
    assert files_of(place) == []


@pytest.mark.docker
def test_a_run_in_docker(home, place, tmp_path):
    if os.geteuid() == 0:
        os.chown(place, 4321, 4321)
    write = run_command(f"""echo '{{"status": "'$(hostname)'"}}' > {FINAL}""")
    env = env_for(home, script(tmp_path / "m.json", write, finish("Done.")), RUNTIME="docker")
    done = Bridge(place, environment=env | {"SANDBOX_BASE_CONTAINER_IMAGE": image()}).run("Count.", name="count")
    assert (done.success, done.reason) == (True, "finished"), done
    assert json.loads((place / FINAL).read_text())["status"] != socket.gethostname()
    assert {path.stat().st_uid for path in place.rglob("*")} == {place.stat().st_uid}
