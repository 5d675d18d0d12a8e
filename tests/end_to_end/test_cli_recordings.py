"""`deckhands replay`, `export --format openhands` and `import`: from files, from runs, onto a cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.command_line import cluster, deckhands, environment, run_command
from tests.turns import finish, script
from tests.unit.deckhands.interop.openhands.test_trajectory_import import RUN, TRAJECTORY

GOLDEN = Path(__file__).parents[1] / "replay" / "golden" / "files_and_an_unknown_tool.jsonl"
ID = "01m80qagsabx2dtbh5p8gzsgzh"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A home with a run, whose log has an event that OpenHands does not have."""
    folder = tmp_path / "runs" / ID
    folder.mkdir(parents=True)
    shutil.copy(GOLDEN, folder / "events.jsonl")
    return environment(tmp_path)


def test_logs_are_replayed_by_file_id_and_folder(env: dict[str, str], tmp_path: Path) -> None:
    for source in (GOLDEN, ID, tmp_path / "runs" / ID):
        done = deckhands("replay", source, env=env)
        assert (done.code, done.err) == (0, "")
        assert done.out == f"{ID}: 24 events, 13 of them decided again; all are the same.\n"
    assert deckhands("replay", ID, "--json", env=env).json[0]["is_same"] is True
    lines = GOLDEN.read_text().splitlines()
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join([*lines[:-1], lines[-1].replace('"finished"', '"rejected"')]) + "\n")
    done = deckhands("replay", changed, env=env)
    assert done.code == 1
    assert done.out.startswith(f"{ID}: the first difference is at event 24; 12 decisions before it are the same.\n")
    assert '- "agent_state": "rejected",' in done.out
    assert '+ "agent_state": "finished",' in done.out
    changed.write_text('{"id": 1}\n')
    done = deckhands("replay", changed, env=env)
    assert (done.code, "Line 1 of the log is not an event" in done.err) == (2, True)


def test_a_run_is_written_as_a_trajectory_and_read_again(env: dict[str, str], tmp_path: Path) -> None:
    with (tmp_path / "runs" / ID / "events.jsonl").open("a") as log:
        log.write(json.dumps({"id": 25, "kind": "model.deferred", "code": "rate_limit"}) + "\n")
    trajectory, events = tmp_path / "trajectory.json", tmp_path / "events.jsonl"
    done = deckhands("export", ID, "--format", "openhands", "-o", trajectory, env=env)
    assert done.code == 0
    assert "Left out: 1 event of the kind model.deferred, which OpenHands has no name for." in done.err
    records = json.loads(trajectory.read_text())
    assert records[0]["action"] == "message"
    trajectory.write_text(json.dumps([*records[:3], {"id": 99, "action": "fly"}, *records[3:]]))
    done = deckhands("import", trajectory, "-o", events, env=env)
    assert (done.code, "Event 3 (fly) cannot be read and is left out" in done.err) == (0, True)
    replayed = deckhands("replay", events, "--json", env=env)
    assert (replayed.code, replayed.json[0]["state"]) == (0, "finished")


def test_run_survives_export_to_an_sdk_directory_and_import(env: dict[str, str], tmp_path: Path) -> None:
    folder, events = tmp_path / "sdk", tmp_path / "events.jsonl"
    done = deckhands("export", ID, "--format", "openhands-sdk", "-o", folder, env=env)
    assert (done.code, "The SDK's name of the conversation is " in done.err) == (0, True)
    assert json.loads((folder / "base_state.json").read_text())["execution_status"] == "finished"
    assert deckhands("import", folder, "-o", events, env=env).code == 0
    replayed = deckhands("replay", events, "--json", env=env)
    assert (replayed.code, replayed.json[0]["state"]) == (0, "finished")
    done = deckhands("export", ID, "--format", "openhands-sdk", "-o", folder, env=env)
    assert (done.code, "cannot be written: File exists" in done.err) == (2, True)


def test_exported_file_is_imported_as_a_fork(env: dict[str, str], tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    assert deckhands("import", GOLDEN, "-o", events, env=env).code == 0
    created = json.loads(events.read_text().splitlines()[0])
    assert created["forked_from"] == f"{ID}@24"
    assert created["conversation_id"] != ID
    done = deckhands("import", GOLDEN, env=env)
    assert (done.code, "No cluster is running here." in done.err) == (1, True)


def test_a_trajectory_that_was_cut_off_continues_and_repeats_nothing(tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    project.mkdir()
    model = script(tmp_path / "m.json", run_command("was recorded"), run_command("echo now"), finish("continued"))
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
        assert len([event for event in events if event["kind"] == "action.run" and not event["hidden"]]) == 2
        assert [event["cause_id"] for event in events if event["kind"] == "observation.outcome_unknown"] == [7]
        assert deckhands("replay", conversation, env=env).code == 0
    assert not (project / "ran.txt").exists()


def test_conversation_is_exported_in_the_formats_of_evaluations(env: dict[str, str], tmp_path: Path) -> None:
    (trajectory,) = [json.loads(deckhands("export", ID, "--format", "atif", env=env).out)]
    assert (trajectory["session_id"], trajectory["extra"]["outcome"]) == (ID, "unscored")
    assert [step["step_id"] for step in trajectory["steps"]] == [*range(1, len(trajectory["steps"]) + 1)]
    (example,) = deckhands("export", ID, "--format", "sft", env=env).json
    assert [message["role"] for message in example["messages"]][:3] == ["system", "user", "assistant"]
    assert example["metadata"]["conversation_id"] == ID
    path = tmp_path / "log.json"
    assert deckhands("export", ID, "--format", "inspect", "-o", path, env=env).code == 0
    log = json.loads(path.read_text())
    assert (log["results"]["scores"], log["eval"]["scorers"]) == ([], [])
    assert "scores" not in log["samples"][0]
