"""Whole runs of agents from the command line: what each is for, with real workers, sandboxes and clones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command_line import COMMAND, Done, deckhands, environment, finished, started
from tests.turns import bash, call, finish, script

STEPS = [
    ("action.message", "I begin."),
    ("action.run", "echo foo"),
    ("observation.run", "foo"),
    ("action.write", 'echo "Hello, World!"'),
    ("observation.write", ""),
    ("action.read", ""),
    ("observation.read", 'echo "Hello, World!"\n'),
    ("action.run", "bash hello.sh"),
    ("observation.run", "Hello, World!"),
    ("action.reject", ""),
]


def steps(events: list[Any]) -> list[tuple[str, str]]:
    kinds = {kind for kind, _ in STEPS} | {"action.finish"}
    return [
        (event["kind"], event.get("command") if event["kind"] == "action.run" else event.get("content", ""))
        for event in events
        if event.get("kind") in kinds and event["source"] != "user"
    ]


def test_dummy_agent_follows_its_list_and_finishes_on_resume(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    (tmp_path / "work").mkdir()
    done = deckhands("run", "--agent", "DummyAgent", "-t", "Anything", "-w", tmp_path / "work", "--json", env=env)
    assert done.code == 3, done
    assert steps(done.json) == STEPS
    summary = done.json[-1]
    assert (summary["state"], summary["iterations"], summary["cost_usd"]) == ("rejected", 6, 0)
    again = deckhands("run", "--resume", summary["conversation_id"], "-t", "Continue", "--json", env=env)
    assert again.code == 0, again
    assert steps(again.json) == [("action.finish", "")]
    checked = deckhands("replay", summary["conversation_id"], "--json", env=env)
    assert checked.json[0]["is_same"], checked


BAD = "I try.\n<function=execute_bash>\n<parameter=comand>echo hello > a</parameter>\n</function>"
GOOD = """I fix it.
<function=execute_bash>
<parameter=command>
echo hello > a &&
cat a
</parameter>
<parameter=security_risk>LOW</parameter>
</function>"""
FINISH = "<function=finish><parameter=message>Done.</parameter></function>"


def test_a_run_in_text(tmp_path: Path) -> None:
    workspace, path = tmp_path / "workspace", tmp_path / "script.json"
    workspace.mkdir()
    path.write_text(json.dumps({"turns": [{"text": text} for text in (BAD, GOOD, FINISH)]}))
    env = environment(tmp_path / "home", LLM_MODEL=f"scripted/{path}", LLM_NATIVE_TOOL_CALLING="false")
    command = [*COMMAND, "run", "-t", "Do it.", "-w", str(workspace), "--sandbox", "none", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done
    *events, summary = (json.loads(line) for line in done.stdout.splitlines())
    assert (workspace / "a").read_text() == "hello\n"
    assert (summary["state"], summary["message"], summary["iterations"]) == ("finished", "Done.", 3)
    (error,) = (event for event in events if event["kind"] == "observation.error")
    assert error["content"].startswith("Parameter 'comand' is not allowed for function 'execute_bash'.")
    (run,) = (event for event in events if event["kind"] == "action.run")
    assert (run["command"], run["thought"]) == ("echo hello > a &&\ncat a", "I fix it.")


def test_run_reads_the_instructions_of_workspace_and_person(monkeypatch, tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    (workspace / "AGENTS.md").write_text("Use tabs.")
    skills = workspace / ".openhands" / "skills"
    skills.mkdir(parents=True)
    (skills / "release.md").write_text("---\ntriggers: [changelog]\n---\nCut from main.")
    (tmp_path / ".openhands" / "skills").mkdir(parents=True)
    (tmp_path / ".openhands" / "skills" / "style.md").write_text("Be brief.")
    model = script(tmp_path / "m.json", finish("Done."))
    arguments = ["run", "-t", "Write the changelog.", "-w", workspace, "--model", model, "--sandbox", "none", "--json"]
    done = deckhands(*arguments, env=environment(tmp_path / "deckhands"))
    assert done.code == 0, done
    (recall,) = [event for event in done.json if event.get("kind") == "observation.recall"]
    assert recall["repo_instructions"] == "Be brief.\n\nUse tabs."
    assert recall["microagent_knowledge"] == [{"name": "release", "trigger": "changelog", "content": "Cut from main."}]
    kinds = [event["kind"] for event in done.json if "kind" in event]
    assert kinds[:8] == [
        *("conversation.created", "action.message", "action.system", "action.survey", "observation.survey"),
        *("action.recall", "observation.agent_state_changed", "observation.recall"),
    ]


SETUP = """
export FROM_SETUP=set
echo made > ~/made-by-setup
touch /workspace/in-workspace
touch /etc/x "$OUTSIDE" 2>/dev/null
echo setup is noisy
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / ".openhands").mkdir(parents=True)
    (folder / ".openhands" / "setup.sh").write_text(SETUP.replace("$OUTSIDE", str(tmp_path / "outside")))
    (folder / ".openhands" / "pre-commit.sh").write_text(
        "echo checked >> ~/commits; ! git diff --cached | grep -q WIP\n"
    )
    commit = "git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -qm first"
    subprocess.run(["bash", "-c", commit], cwd=folder, check=True)
    return folder


def test_clone_is_set_up_in_its_sandbox_and_commits_checked(tmp_path: Path, project: Path) -> None:
    model = script(
        tmp_path / "m.json",
        bash("echo $FROM_SETUP $(cat ~/made-by-setup) $(ls in-workspace)"),
        bash(
            "echo WIP > f; git add f; git commit -qm bad; echo $?; echo fine > f; git add f; git commit -qm good; echo $?"
        ),
        bash("cat ~/commits; git status --short"),
        finish("Done."),
    )
    env = environment(tmp_path / "own")
    arguments = ["run", "-t", "work", "-w", f"git+file://{project}", "--model", model, "--sandbox", "bwrap", "--json"]
    done = deckhands(*arguments, env=env)
    assert done.code == 0, done
    runs = [event for event in done.json if event.get("kind") == "action.run"]
    assert [(event["hidden"], event["source"]) for event in runs] == [
        *[(True, "environment")] * 2,
        *[(False, "agent")] * 3,
    ]
    answers = [event["content"] for event in done.json if event.get("kind") == "observation.run"]
    assert answers[0] == "setup is noisy"
    assert answers[2:4] == ["set made in-workspace", "1\n0"]
    assert answers[4].startswith("checked\nchecked")
    assert not (tmp_path / "outside").exists()
    assert not (project / ".git/hooks/pre-commit").exists()


def test_without_a_sandbox_no_script_of_a_repository_runs(tmp_path: Path, project: Path) -> None:
    model = script(tmp_path / "m.json", bash("echo ${FROM_SETUP:-unset}"), finish("Done."))
    arguments = ["run", "-t", "work", "-w", project, "--model", model, "--sandbox", "none", "--json"]
    done = deckhands(*arguments, env=environment(tmp_path / "own"))
    assert done.code == 0, done
    answers = [event["content"] for event in done.json if event.get("kind") == "observation.run"]
    assert answers == ["unset"]
    assert not (tmp_path / "outside").exists()


PLAN = call("propose_plan", plan="1. Make `made`.")
TOUCH = bash("touch made", security_risk="LOW")
GREP = call("grep", pattern="made")


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in events if event.get("kind", "").startswith(("action.", "observation.plan"))]


def planned(tmp_path: Path, mode: str, *turns: dict[str, Any]) -> list[str | Path]:
    (tmp_path / "work").mkdir()
    model = script(tmp_path / "m.json", *turns)
    return ["run", "-t", "Do it", "--plan", mode, "-w", tmp_path / "work", "--model", model, "--json"]


@pytest.mark.soak
def test_other_agent_carries_out_a_plan_at_once(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    done = deckhands(*planned(tmp_path, "auto", TOUCH, GREP, PLAN, TOUCH, finish("Done.")), env=env)
    assert done.code == 0, done
    assert kinds(done.json)[-6:] == [
        *("action.search_code", "action.plan", "observation.plan_accepted"),
        *("action.system", "action.run", "action.finish"),
    ]
    assert (tmp_path / "work" / "made").exists()
    refused = [event for event in done.json if event.get("kind") == "observation.error"]
    assert [event["content"].partition(".")[0] for event in refused] == ["Tool execute_bash is not registered"]
    checked = deckhands("replay", done.json[-1]["conversation_id"], "--json", env=env)
    assert checked.json[0]["is_same"], checked


def test_nothing_starts_without_a_person_and_planner_takes_more(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    done = deckhands(*planned(tmp_path, "ask", PLAN, PLAN, TOUCH), env=env)
    assert done.code == 5, done
    conversation_id = done.json[-1]["conversation_id"]
    again = deckhands("run", "--resume", conversation_id, "-t", "Smaller, please", "--json", env=env)
    assert again.code == 5, again
    assert kinds(again.json)[-1] == "action.plan"
    assert not (tmp_path / "work" / "made").exists()


def run(tmp_path: Path, *options: str) -> tuple[Done, Done]:
    """Run a task by the command line and return that and what `show` says of it."""
    env = environment(tmp_path / "home", DECKHANDS_SANDBOX="none")
    (tmp_path / "work").mkdir(exist_ok=True)
    with started("run", "-t", "x", "-w", tmp_path / "work", *options, env=env) as running:
        done = finished(running)
    found = [line for line in done.err.splitlines() if line.startswith("Conversation ")]
    return done, deckhands("show", found[0].split()[1], env=env) if found else done


def test_a_task_is_handed_to_a_delegate_of_a_file(tmp_path: Path) -> None:
    small = script(tmp_path / "small.json", finish("Three."))
    (tmp_path / "scout.json").write_text(json.dumps({"name": "ReadOnlyAgent", "llm": {"model": small}}))
    large = script(tmp_path / "large.json", call("delegate", agent="scout", task="Count."), finish("Done."))
    done, shown = run(
        tmp_path, "--model", large, "--delegate", f"scout={tmp_path}/scout.json", "--delegate", "LocAgent"
    )
    assert done.code == 0, done
    assert "Three." in done.out
    assert f"Hands to:     scout (ReadOnlyAgent, {small}), LocAgent (LocAgent, {large})" in shown.out


def test_cells_are_run(tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", call("execute_ipython_cell", code="print(6 * 7)"), finish("Done."))
    done, shown = run(tmp_path, "--model", model, "--ipython")
    assert done.code == 0, done
    assert ">>> print(6 * 7)" in done.out
    assert "42" in done.out
    assert "IPython:      the agent can run cells" in shown.out
    assert "action.run_ipython" not in done.out
