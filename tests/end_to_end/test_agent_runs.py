"""Whole runs of each kind of agent from the command line, with real workers, sandboxes and clones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command_line import Done, deckhands, environment
from tests.turns import bash, call, finish, script


class Runs:
    """Runs in one workspace of one home, by default without a sandbox."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = environment(root / "home", DECKHANDS_SANDBOX="none")
        self.work = root / "work"
        self.work.mkdir()

    def start(self, *options: str | Path, model: str = "", **variables: str) -> Done:
        model_options = ("--model", model) if model else ()
        workspace = () if "-w" in options else ("-w", self.work)
        return deckhands("run", "-t", "Do it.", *workspace, *model_options, *options, env=self.env | variables)

    def run(self, *turns: dict[str, Any], options: tuple[str | Path, ...] = (), **variables: str) -> Done:
        """Run a task whose model has these turns; its events are printed as JSON."""
        done = self.start(*options, "--json", model=script(self.root / "m.json", *turns), **variables)
        assert done.code == 0, done
        return done

    def again(self, done: Done, task: str) -> Done:
        return deckhands("run", "--resume", done.json[-1]["conversation_id"], "-t", task, "--json", env=self.env)

    def is_replayed(self, done: Done) -> bool:
        return deckhands("replay", done.json[-1]["conversation_id"], "--json", env=self.env).json[0]["is_same"]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def of(done: Done, kind: str) -> list[dict[str, Any]]:
    return [event for event in done.json if event.get("kind") == kind]


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


def test_dummy_agent_follows_its_list_and_finishes_on_resume(runs: Runs) -> None:
    done = runs.start("--agent", "DummyAgent", "--json")
    assert done.code == 3, done
    assert steps(done.json) == STEPS
    summary = done.json[-1]
    assert (summary["state"], summary["iterations"], summary["cost_usd"]) == ("rejected", 6, 0)
    again = runs.again(done, "Continue")
    assert again.code == 0, again
    assert steps(again.json) == [("action.finish", "")]
    assert runs.is_replayed(done)


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


def test_a_run_in_text(runs: Runs) -> None:
    done = runs.run(*({"text": text} for text in (BAD, GOOD, FINISH)), LLM_NATIVE_TOOL_CALLING="false")
    summary = done.json[-1]
    assert (runs.work / "a").read_text() == "hello\n"
    assert (summary["state"], summary["message"], summary["iterations"]) == ("finished", "Done.", 3)
    (error,) = of(done, "observation.error")
    assert error["content"].startswith("Parameter 'comand' is not allowed for function 'execute_bash'.")
    (command,) = of(done, "action.run")
    assert (command["command"], command["thought"]) == ("echo hello > a &&\ncat a", "I fix it.")


def test_run_reads_the_instructions_of_workspace_and_person(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    monkeypatch.setenv("HOME", str(runs.root))
    (runs.work / "AGENTS.md").write_text("Use tabs.")
    for folder, name, content in (
        (runs.work, "release.md", "---\ntriggers: [changelog]\n---\nCut from main."),
        (runs.root, "style.md", "Be brief."),
    ):
        (folder / ".openhands" / "skills").mkdir(parents=True)
        (folder / ".openhands" / "skills" / name).write_text(content)
    done = runs.run(finish("Done."), options=("-t", "Write the changelog."), HOME=str(runs.root))
    (recall,) = of(done, "observation.recall")
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


def test_clone_is_set_up_in_its_sandbox_and_commits_checked(runs: Runs, project: Path) -> None:
    committing = "echo WIP > f; git add f; git commit -qm bad; echo $?; echo fine > f; git add f; git commit -qm good"
    done = runs.run(
        bash("echo $FROM_SETUP $(cat ~/made-by-setup) $(ls in-workspace)"),
        bash(f"{committing}; echo $?"),
        bash("cat ~/commits; git status --short"),
        finish("Done."),
        options=("-w", f"git+file://{project}", "--sandbox", "bwrap"),
    )
    commands = [(event["hidden"], event["source"]) for event in of(done, "action.run")]
    assert commands == [*[(True, "environment")] * 2, *[(False, "agent")] * 3]
    answers = [event["content"] for event in of(done, "observation.run")]
    assert answers[0] == "setup is noisy"
    assert answers[2:4] == ["set made in-workspace", "1\n0"]
    assert answers[4].startswith("checked\nchecked")
    assert not (runs.root / "outside").exists()
    assert not (project / ".git/hooks/pre-commit").exists()


def test_without_a_sandbox_no_script_of_a_repository_runs(runs: Runs, project: Path) -> None:
    done = runs.run(bash("echo ${FROM_SETUP:-unset}"), finish("Done."), options=("-w", project))
    assert [event["content"] for event in of(done, "observation.run")] == ["unset"]
    assert not (runs.root / "outside").exists()


PLAN = call("propose_plan", plan="1. Make `made`.")
TOUCH = bash("touch made", security_risk="LOW")


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in events if event.get("kind", "").startswith(("action.", "observation.plan"))]


def test_nothing_starts_without_a_person_and_planner_takes_more(runs: Runs) -> None:
    model = script(runs.root / "m.json", PLAN, PLAN, TOUCH)
    done = runs.start("--plan", "ask", "--json", model=model)
    assert done.code == 5, done
    again = runs.again(done, "Smaller, please")
    assert again.code == 5, again
    assert kinds(again.json)[-1] == "action.plan"
    assert not (runs.work / "made").exists()


def test_a_task_is_handed_to_a_delegate_of_a_file(runs: Runs) -> None:
    small, file = script(runs.root / "small.json", finish("Three.")), runs.root / "scout.json"
    file.write_text(json.dumps({"name": "ReadOnlyAgent", "llm": {"model": small}}))
    large = script(runs.root / "large.json", call("delegate", agent="scout", task="Count."), finish("Done."))
    done = runs.start("--delegate", f"scout={file}", "--delegate", "LocAgent", model=large)
    assert done.code == 0, done
    assert "Three." in done.out
    shown = deckhands("show", done.err.split()[1], env=runs.env).out
    assert f"Hands to:     scout (ReadOnlyAgent, {small}), LocAgent (LocAgent, {large})" in shown


def test_tasks_go_to_agents_that_files_define(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    monkeypatch.setenv("HOME", str(runs.root))
    for top, name in ((runs.work, "clerk"), (runs.root, "scribe")):
        (top / ".claude" / "agents").mkdir(parents=True)
        (top / ".claude" / "agents" / f"{name}.md").write_text(f"---\ndescription: A {name}.\n---\nI am the {name}.")
    calls = [call("delegate", agent=name, task="Count.") for name in ("clerk", "scribe")]
    # The delegates have the same script: their calls of `delegate`, which they lack, fail, and then they finish.
    model = script(runs.root / "m.json", *calls, call("delegates", operation="list"), finish("Done."))
    done = runs.start("--delegation", "--json", model=model, HOME=str(runs.root))
    assert done.code == 0, done
    (recall,) = [event for event in of(done, "observation.recall") if event.get("available_agents")]
    assert recall["available_agents"] == [{"name": "clerk", "description": "A clerk."}]
    (greeting,) = of(done, "action.system")
    assert "hand tasks to these agents: scribe (A scribe.)." in greeting["content"]
    ends = [event["content"] for event in of(done, "observation.delegate")]
    assert ["finishes task" in end for end in ends] == [True, True], ends
    (control,) = of(done, "observation.manage_delegates")
    assert control["content"] == "No delegate works in the background."
    assert runs.is_replayed(done)
    listed = deckhands("skills", "ls", str(runs.work), env=runs.env | {"HOME": str(runs.root)}).out
    assert "clerk" in listed
    assert "scribe" in listed


def test_cells_are_run(runs: Runs) -> None:
    model = script(runs.root / "m.json", call("execute_ipython_cell", code="print(6 * 7)"), finish("Done."))
    done = runs.start("--ipython", model=model)
    assert done.code == 0, done
    assert ">>> print(6 * 7)" in done.out
    assert "42" in done.out
    assert "action.run_ipython" not in done.out
    assert "IPython:      the agent can run cells" in deckhands("show", done.err.split()[1], env=runs.env).out
