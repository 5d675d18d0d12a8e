"""`deckhands import` onto a cluster: a recorded conversation continues, and nothing that it recorded runs again."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.command_line import cluster, deckhands, environment, finish, run_command, script
from tests.unit.deckhands.interop.openhands.test_trajectory_import import RUN, TRAJECTORY


def test_a_trajectory_that_was_cut_off_continues_and_repeats_nothing(tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    project.mkdir()
    turns = run_command("was recorded"), run_command("echo now"), finish("continued")
    model = script(tmp_path / "model.json", *turns)
    env = environment(home, LLM_MODEL=model, DECKHANDS_SANDBOX="none")
    path = tmp_path / "trajectory.json"
    run = RUN | {"args": {"command": f"echo then >> {project}/ran.txt"}}
    # The recording ends while the command runs, in the middle of a line.
    path.write_text(json.dumps([*TRAJECTORY[:4], run])[:-1] + ', {"id": 5, "source": "ag')
    with cluster(home, "--workspace-root", str(tmp_path), LLM_MODEL=model, DECKHANDS_SANDBOX="none"):
        imported = deckhands("import", path, env=env)
        assert imported.code == 0, imported.err
        assert "Event 5 cannot be read and is left out" in imported.err
        conversation = imported.out.strip()
        deckhands("logs", "-f", conversation, env=env)
        summary = deckhands("show", conversation, "--json", env=env).json[0]
        assert (summary["state"], summary["message"]) == ("finished", "continued")
        events = deckhands("export", conversation, env=env).json
        commands = [event["command"] for event in events if event["kind"] == "action.run" and not event["hidden"]]
        assert len(commands) == 2
        assert [event["cause_id"] for event in events if event["kind"] == "observation.outcome_unknown"] == [7]
        assert deckhands("replay", conversation, env=env).code == 0
    assert not (project / "ran.txt").exists()
