"""`deckhands run` and a cluster's tool workers as a whole: the files that an agent reaches by its directory."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from broker.secrets.secrets import KEY_FILE
from tests.integration.command_line import cluster, deckhands, environment, finish, run_command, script

LOOK = "cat .deckhands/secret.key .deckhands/runs/*/valkey/password; ls -a .deckhands; find . -name '*.sock'"


@pytest.fixture
def person(tmp_path: Path) -> Path:
    """The home directory of a user who has run Deckhands before."""
    person = tmp_path / "person"
    (person / ".deckhands").mkdir(parents=True)
    (person / ".deckhands" / KEY_FILE).write_text("key-canary")
    (person / "project").mkdir()
    return person


@pytest.mark.parametrize("named", [".", "link", "project/..", ".deckhands", ".deckhands/runs", "link/.deckhands"])
def test_directory_containing_or_within_our_home_is_refused(person: Path, named: str) -> None:
    (person.parent / "link").symlink_to(person)
    (person / ".deckhands" / "runs").mkdir()
    path = person.parent / named if named.startswith("link") else person / named
    model = script(person.parent / "m.json", run_command(LOOK), finish("Done."))
    env = environment(person / ".deckhands", HOME=str(person))
    done = deckhands("run", "-t", "x", "-w", path, "--model", model, "--json", env=env)
    assert "key-canary" not in done.out
    assert (done.code, done.out) == (2, "")
    assert re.search(rf"may not be a workspace: it (holds|is a part of) {person}/.deckhands", done.err)
    assert "Name the directory of a project with -w" in done.err


def test_a_project_beside_our_home_is_worked_in(person: Path) -> None:
    model = script(person.parent / "m.json", run_command(f"cd ..; {LOOK}"), finish("Done."))
    env = environment(person / ".deckhands", HOME=str(person))
    done = deckhands("run", "-t", "x", "-w", person / "project", "--model", model, "--json", env=env)
    assert done.code == 0, done.err
    (seen,) = [event for event in done.json if event.get("kind") == "observation.run"]
    assert "key-canary" not in seen["content"]
    assert "No such file or directory" in seen["content"]


@pytest.mark.parametrize("path", ["/", "/etc", "/usr", "/var", "/proc", "/sys", "/dev", "/boot", "/home", "/tmp"])
def test_system_trees_are_refused_at_once(tmp_path: Path, path: str) -> None:
    model = script(tmp_path / "m.json", run_command("cat shadow etc/shadow; ls -a"), finish("Done."))
    done = deckhands("run", "-t", "x", "-w", path, "--model", model, "--json", env=environment(tmp_path / "home"))
    assert "root:" not in done.out
    assert (done.code, done.out) == (2, "")
    assert f"The directory {path} may not be a workspace" in done.err


def test_run_started_in_such_a_directory_does_not_continue(person: Path, tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", finish("Done."))
    project = person / "project"
    env = environment(person / ".deckhands")
    done = deckhands("run", "-t", "x", "-w", project, "--model", model, "--json", env=env)
    cid = done.json[-1]["conversation_id"]
    events = person / ".deckhands" / "runs" / cid / "events.jsonl"
    events.write_text(events.read_text().replace(str(project), str(person)))  # as an earlier version took it
    again = deckhands("run", "--resume", cid, "-t", "Once more.", env=env)
    assert again.code == 2
    assert f"The directory {person} may not be a workspace: it holds" in again.err


def test_a_cluster_takes_what_its_operator_names_and_nothing_else(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    for name in ("project", "other"):
        (work / name).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (work / "link").symlink_to(work / "project")
    env = environment(home)
    model = script(tmp_path / "m.json", run_command("pwd; cat file"), finish("Done."))
    (work / "project" / "file").write_text("served\n")

    def submitted(path: Path) -> tuple[int, str]:
        done = deckhands("submit", "-t", "x", "-w", path, "--model", model, env=env)
        return done.code, done.out.strip() if done.code == 0 else done.err

    with cluster(home, "--workspace-root", str(work)):
        assert stat.S_IMODE((home / "cluster" / "valkey" / "password").stat().st_mode) == 0o600
        for path in (work / "project", work / "link"):  # a user's own links are followed before anything is queued
            code, cid = submitted(path)
            assert code == 0, cid
            followed = deckhands("logs", "-f", cid, env=env)
            assert f"{work}/project\n  served" in followed.out
        for path in (tmp_path / "elsewhere", tmp_path / "work-beside"):
            path.mkdir(exist_ok=True)
            code, said = submitted(path)
            assert code == 2
            assert "No tool worker takes the directory" in said
            assert "--workspace-root" in said
        for path in (home, home / "cluster", Path("/etc")):
            code, said = submitted(path)
            assert (code, "may not be a workspace" in said) == (2, True)


@pytest.mark.soak
def test_a_cluster_takes_no_directory_unless_its_operator_names_one(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    env = environment(tmp_path / "home")
    model = script(tmp_path / "m.json", finish("Done."))
    with cluster(tmp_path / "home"):
        done = deckhands("submit", "-t", "x", "-w", tmp_path / "project", "--model", model, env=env)
        assert done.code == 2
        assert "No tool worker takes the directory" in done.err
        for root in ("/", "/etc", str(tmp_path / "missing")):
            refused = deckhands("up", "--workspace-root", root, env=environment(tmp_path / "second"))
            assert (refused.code, f"The workspace root {root} cannot be used" in refused.err) == (2, True)
