"""Skills of a workspace and of a person in a run from the command line, with real workers."""

from __future__ import annotations

from deckhands import Conversation
from tests.integration.command_line import deckhands, environment
from tests.turns import finish, script


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
    assert recall["microagent_knowledge"] == [
        {"name": "release", "trigger": "changelog", "content": "Cut from main."},
    ]
    kinds = [event["kind"] for event in done.json if "kind" in event]
    assert kinds[:8] == [
        *("conversation.created", "action.message", "action.system", "action.survey", "observation.survey"),
        *("action.recall", "observation.agent_state_changed", "observation.recall"),
    ]


def test_program_reads_repository_as_command_line_does(monkeypatch, tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "AGENTS.md").write_text("Use tabs.")
    for name, value in environment(tmp_path / "deckhands", DECKHANDS_SANDBOX="none").items():
        monkeypatch.setenv(name, value)
    with Conversation(workspace=workspace, model=script(tmp_path / "m.json", finish("Done."))) as conversation:
        conversation.run("Write the changelog.")
        events = conversation.events()
    (recall,) = [event for event in events if event.kind == "observation.recall"]
    assert recall.repo_instructions == "Use tabs."
