"""Workspaces with a source, and files in and out of them, on a cluster kept up by `deckhands up`."""

from __future__ import annotations

import json
import random
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.command_line import Done, cluster, deckhands, environment, finished, on_terminal, started
from tests.integration.command_line import run_command as command
from tests.integration.test_opening import git, project  # noqa: F401  (a fixture)
from tests.turns import finish, script

Cli = Callable[..., Done]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path, base = tmp_path_factory.mktemp("home"), str(tmp_path_factory.getbasetemp())
    with cluster(path, "--workspace-root", base, DECKHANDS_REPOSITORY_ROOTS=base):
        yield path


@pytest.fixture
def cli(home: Path) -> Cli:
    env = environment(home)
    return lambda *arguments: deckhands(*arguments, env=env)


def called(home: Path, *arguments: str) -> Done:
    with started(*arguments, env=environment(home)) as running:
        return finished(running)


def settled(home: Path, conversation_id: str) -> dict[str, object]:
    """Follow a conversation to its end and return its summary."""
    assert called(home, "logs", "-f", conversation_id).out
    (summary,) = deckhands("show", "--json", conversation_id, env=environment(home)).json
    return summary


def worked(cli: Cli, home: Path, model: str, workspace: str, *options: str) -> str:
    """Submit a task on a workspace and return the conversation when it has finished."""
    done = cli("submit", "-t", "work", "--model", model, "-w", workspace, *options)
    assert done.code == 0, done.err
    conversation_id = done.out.strip()
    summary = settled(home, conversation_id)
    assert summary["state"] == "finished", summary
    return conversation_id


def test_a_repository_is_worked_on_and_compared(cli: Cli, home: Path, project: Path, tmp_path: Path) -> None:  # noqa: F811
    change = "echo three >> README; mkdir out; echo new > out/file; ln -s /etc/passwd out/link; echo x > x.log"
    model = script(tmp_path / "s.json", command(change), command("git commit -qam mine; pwd"), finish("done"))
    conversation_id = worked(cli, home, model, f"git+file://{project}#main", "--clone-depth", "1")
    logged = cli("logs", conversation_id)
    assert f"The workspace holds file://{project} at main at commit" in logged.out

    patch = called(home, "diff", conversation_id)
    assert patch.code == 0, patch.err
    git(tmp_path, "clone", "--quiet", f"file://{project}", "copy")
    subprocess.run(["git", "apply", "-"], input=patch.out, text=True, cwd=tmp_path / "copy", check=True, timeout=20)
    assert (tmp_path / "copy" / "README").read_text() == "two\nthree\n"
    assert (tmp_path / "copy" / "out" / "file").read_text() == "new\n"
    assert "x.log" not in patch.out

    taken = cli("cp", f"{conversation_id}:out", tmp_path / "taken")
    assert taken.code == 0, taken.err
    assert "out/link points outside the directory" in taken.err
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]
    (tmp_path / "taken" / "file").write_text("other\n")
    assert cli("cp", tmp_path / "taken", f"{conversation_id}:deep/er/").code == 0
    assert cli("cp", tmp_path / "taken" / "file", f"{conversation_id}:README").code == 0
    (report,) = cli("cp", f"{conversation_id}:deep/er/taken/file", tmp_path, "--json").json
    assert report == {"files": 1, "size_bytes": 6, "skipped": [], "without_bits": []}
    assert (tmp_path / "file").read_text() == "other\n"
    assert "+other" in called(home, "diff", conversation_id).out

    for path in ("nowhere", "../../host", "out/link"):
        refused = cli("cp", f"{conversation_id}:{path}", tmp_path / "refused")
        assert refused.code == 1
        assert path in refused.err
    assert cli("cp", tmp_path / "file", f"{conversation_id}:../file").code == 1
    assert not (tmp_path / "refused").exists()


def test_a_long_copy_shows_its_progress_on_a_terminal(cli: Cli, home: Path, project: Path, tmp_path: Path) -> None:  # noqa: F811
    model = script(tmp_path / "s.json", finish("done"))
    conversation_id = worked(cli, home, model, f"git+file://{project}#main")
    source = tmp_path / "model.bin"
    source.write_bytes(random.Random(3).randbytes(70 * 2**20))
    source.chmod(0o4755)
    shown = on_terminal("cp", str(source), f"{conversation_id}:data/", env=environment(home))
    assert "\r\x1b[KCopied 16 MiB" in shown
    assert "bits: model.bin." in shown
    after = re.sub(r"^[^\r]*", "", shown.rpartition("MiB")[2])  # behind how fast and how long
    assert after.startswith("\r\x1b[KCopied without"), "the line is gone before the report"
    assert shown.endswith("1 file, 73,400,320 bytes.\n")
    shown = on_terminal("cp", f"{conversation_id}:data", str(tmp_path / "taken"), env=environment(home))
    assert "Copied 70 of 70 MiB" in shown
    assert (tmp_path / "taken" / "model.bin").read_bytes() == source.read_bytes()


def test_an_archive_is_uploaded_and_forked(cli: Cli, home: Path, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("pass\n")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "main.py", arcname="src/main.py")
    model = script(tmp_path / "s.json", command("cat src/main.py; echo 1 > src/main.py"), finish("done"))
    conversation_id = worked(cli, home, model, str(tmp_path / "x.tar.gz"))
    (tmp_path / "x.tar.gz").unlink()
    assert "-pass" in called(home, "diff", conversation_id).out
    taken_over = finish("taken over"), finish("taken over")
    again = script(tmp_path / "f.json", *taken_over, command("ls"), command("cat src/main.py"), finish("done"))
    last = cli("show", "--json", conversation_id).json[0]["last_event_id"]
    forked = cli("fork", f"{conversation_id}@{last}", "--model", again, "-m", "continue")
    assert forked.code == 0, forked.err
    fork_id = forked.out.strip()
    assert settled(home, fork_id)["state"] == "finished"
    told = [json.loads(line) for line in cli("export", fork_id).out.splitlines()]
    contents = [event.get("content", "") for event in told if event["kind"].startswith("observation.")]
    assert any("set up again from its original source" in text for text in contents)
    assert "pass" in contents


def test_own_run_clones_the_named_repository(project: Path, tmp_path: Path) -> None:  # noqa: F811
    model = script(tmp_path / "s.json", command("cat README"), finish("done"))
    done = deckhands(
        *("run", "-t", "work", "--model", model, "-w", f"git+file://{project}#v1"), env=environment(tmp_path / "own")
    )
    assert done.code == 0, done
    assert "  one" in done.out.splitlines()


def test_unopenable_workspace_ends_in_an_explained_error(cli: Cli, home: Path, tmp_path: Path) -> None:
    model = script(tmp_path / "s.json", finish("done"))
    done = cli("submit", "-t", "work", "--model", model, "-w", f"git+file://{tmp_path}/nowhere")
    summary = settled(home, done.out.strip())
    assert summary["state"] == "error"
    assert "nowhere cannot be cloned: No such file or directory" in str(summary["last_error"])
    assert summary["iterations"] == 0
    for workspace, said in (
        ("git+ssh://host/x", "Nothing is cloned over ssh"),
        ("git+https://u:secret@host/x", "--clone-secret"),
        (str(tmp_path / "no.zip"), "cannot be read"),
    ):
        refused = cli("submit", "-t", "work", "--model", model, "-w", workspace)
        assert (refused.code, said in refused.err) == (2, True), refused.err
        assert "secret@" not in refused.err


@pytest.mark.soak
def test_unsupported_copies_are_refused(cli: Cli, home: Path, tmp_path: Path) -> None:
    assert cli("cp", tmp_path, tmp_path).code == 2
    assert cli("cp", "unknown-conversation:x", tmp_path).code == 2
    mine = tmp_path / "mine"
    mine.mkdir()
    model = script(tmp_path / "s.json", command("echo 1 > x"), finish("done"))
    conversation_id = worked(cli, home, model, str(mine))
    assert "directory" in called(home, "diff", conversation_id).err
    assert "no checkpoints of it are saved" in called(home, "checkpoint", conversation_id).err
    assert cli("cp", f"{conversation_id}:x", tmp_path / "x").code == 0
    assert (tmp_path / "x").read_text() == "1\n"
    begun = cli("submit", "-t", "work", "--model", script(tmp_path / "n.json", finish("done"))).out.strip()
    settled(home, begun)
    assert "no workspace yet" in called(home, "diff", begun).err
