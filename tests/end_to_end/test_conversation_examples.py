"""The examples of conversations: each is run as a stranger would run it, on a private cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.command_line import finish, run_command, script
from tests.source_code import ROOT

EXAMPLES = ROOT / "examples" / "conversations"
LIMIT_SECONDS = 120.0


def printed(example: str, *arguments: str, folder: Path, **variables: str) -> list[str]:
    """Run a program, and return the lines that it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DECKHANDS_", "LLM_"))}
    home = {"DECKHANDS_HOME": str(folder / "home"), "DECKHANDS_SANDBOX": "none"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        check=False,
        env=kept | home | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_minimal_example(tmp_path: Path) -> None:
    model = script(tmp_path / "model.json", run_command("echo 2 3 5 > primes.txt"), finish("Written."))
    assert printed("minimal.py", model, folder=tmp_path) == ["Written.", "2 3 5"]


def test_local_to_remote(tmp_path: Path) -> None:
    model = script(tmp_path / "model.json", finish("An agent."))
    assert printed("local_to_remote.py", model, folder=tmp_path) == ["An agent."]


def test_the_router(tmp_path: Path) -> None:
    first = script(tmp_path / "first.json", finish("By the first."))
    second = script(tmp_path / "second.json", finish("By the second."))
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(
        f'[llm.second]\nmodel = "{second}"\n[llm.auto]\nmodel = "{first}"\n'
        'router = {kind = "rules", rules = [{use = "second", service = "agent"}]}\n'
    )
    assert printed("router.py", str(profiles), folder=tmp_path)[0] == "By the second."


def test_a_tool_of_the_program(tmp_path: Path) -> None:
    asking = {"tool_calls": [{"name": "stock", "arguments": {"item": "lamp"}}]}
    model = script(tmp_path / "model.json", asking, finish("Four."))
    assert printed("own_tool.py", model, folder=tmp_path) == ["Four.", "4 lamps"]


def test_secrets(tmp_path: Path) -> None:
    model = script(tmp_path / "model.json", run_command("echo the token is $API_TOKEN"), finish("Used."))
    assert printed("with_secrets.py", model, folder=tmp_path) == ["Used.", "the token is <secret_hidden>"]


def test_a_policy_of_a_package(tmp_path: Path) -> None:
    described = tmp_path / "site" / "deployments-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: deployments\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[deckhands.confirmation_policies]\ndeployments = deployments:Deployments\n"
    )
    path = os.pathsep.join((str(tmp_path / "site"), str(EXAMPLES / "own_policy")))
    model = script(tmp_path / "model.json", run_command("true"), run_command("deploy now"), finish("On Monday, then."))
    shown = printed("own_policy/ask_first.py", model, folder=tmp_path, PYTHONPATH=path)
    assert shown == ["asked about: deploy now", "On Monday, then."]


def test_sub_agents(tmp_path: Path) -> None:
    handing = {"tool_calls": [{"name": "delegate", "arguments": {"agent": "helper", "task": "Count the files."}}]}
    chief = script(tmp_path / "chief.json", handing, finish("There are none."))
    helper = script(tmp_path / "helper.json", finish("None."))
    assert printed("sub_agents.py", chief, helper, folder=tmp_path) == ["There are none.", "delegates: 1"]


def test_long_work(tmp_path: Path) -> None:
    shown = printed("long_work.py", f"scripted/{EXAMPLES / 'long_work.json'}", folder=tmp_path)
    assert shown[0] == "All three features work."
    assert shown[1:-3] == [f"{passing} of 3 features pass." for passing in (0, 1, 1, 2, 3)]
    assert [line.split()[:2] for line in shown[-3:]] == [
        ["greeting", "passes"],
        ["by-name", "passes"],
        ["german", "passes"],
    ]
