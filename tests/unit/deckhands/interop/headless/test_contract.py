"""The contract of a headless run: files put into a workspace, files that stay, and links that are never followed."""

from __future__ import annotations

import os

import pytest

from broker.runtime.errors import UsageError
from deckhands.interop.headless.contract import Contract
from deckhands.interop.headless.inside import Inside, PathDenied, locate, path_inside


def prepare(root) -> Contract:
    contract = Contract(root, "one")
    contract.prepare("Count.\n\nAll of them.", iterations=80, seconds=1800)
    return contract


def test_second_run_leaves_equal_files_and_keeps_earlier_result(tmp_path):
    contract = prepare(tmp_path)
    (tmp_path / contract.final).write_text('{"run": 1}')
    assert contract.find_fault() == ""
    prepare(tmp_path)
    assert contract.find_fault() == f"{contract.final} is missing."
    assert (tmp_path / contract.results / "final.previous.json").read_text() == '{"run": 1}'
    text = (tmp_path / "README.md").read_text()
    assert "> Count.\n>\n> All of them." in text
    assert "at most 80 iterations and 30 minutes" in text
    assert not (tmp_path / "README.deckhands.md").exists()


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_readme_of_somebody_else_stays(tmp_path, kind):
    mine = tmp_path / "README.md"
    if kind == "file":
        mine.write_text("# My project")
    elif kind == "link":
        mine.symlink_to(tmp_path / "elsewhere")
    else:
        mine.mkdir()
    prepare(tmp_path)
    assert kind != "file" or mine.read_text() == "# My project"
    assert not (tmp_path / "elsewhere").exists()
    assert "## Contract" in (tmp_path / "README.deckhands.md").read_text()


@pytest.mark.parametrize("place", ["experiments", "logs", "logs/one", "experiments/one/results"])
def test_nothing_is_written_through_a_link(tmp_path, place):
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (root / place).parent.mkdir(parents=True)
    (root / place).symlink_to(outside)
    with pytest.raises(PathDenied, match="a part of it is a link"):
        prepare(root)
    assert list(outside.iterdir()) == []


def test_files_are_replaced_and_links_are_not_followed(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.write_text("kept")
    for name in ("a", "b"):
        (root / name).symlink_to(outside)
    Inside(root).write("a", b"new")
    with Inside(root).create("b") as file:
        file.write(b"new")
    assert [(root / name).is_symlink() for name in ("a", "b")] == [False, False]
    assert outside.read_text() == "kept"
    assert sorted(path.name for path in root.iterdir()) == ["a", "b"]


def test_a_fifo_is_no_result(tmp_path):
    contract = prepare(tmp_path)
    os.mkfifo(tmp_path / contract.final)
    assert contract.find_fault() == f"{contract.final} is missing."


def test_one_run_at_a_time_works_on_an_experiment(tmp_path):
    inside = Inside(tmp_path)
    refused = pytest.raises(UsageError, match="Another run works on")
    with inside.lock("experiments/one"), refused, inside.lock("experiments/one"):
        pass
    with inside.lock("experiments/one"):
        pass


@pytest.mark.parametrize("text", ["..", "a/../../b", "/etc/passwd", "", ".", "a\0b"])
def test_a_path_that_leads_out(tmp_path, text):
    with pytest.raises(PathDenied, match="is not inside the workspace"):
        path_inside(tmp_path, text, what="X")


@pytest.mark.parametrize(
    ("text", "where", "path"),
    [
        ("t/a.json", "work", "t/a.json"),
        ("../t.json", "", "t.json"),
        ("../new/deep/t.json", "new/deep", "t.json"),
        ("../folder", "folder", "one.json"),
        ("../link/t.json", "work", "logs/t.json"),
        ("../link", "work", "logs/one.json"),
    ],
)
def test_place_of_a_trajectory(tmp_path, text, where, path):
    root = tmp_path / "work"
    (root / "logs").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(root / "logs")
    for named in (text, os.path.normpath(root / text)):
        assert locate(root, named, "one.json") == (tmp_path / where, path)
    assert (tmp_path / where).is_dir()


@pytest.mark.parametrize("text", ["../file/t.json", "/proc/none/t.json"])
def test_a_trajectory_that_cannot_be_written_is_refused(tmp_path, text):
    root = tmp_path / "work"
    root.mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        locate(root, text, "one.json")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files for others")
def test_files_made_as_root_belong_to_the_workspace_owner(tmp_path):
    root = tmp_path / "place"
    root.mkdir()
    os.chown(root, 4321, 4322)
    contract = prepare(root)
    Inside(root).create(f"{contract.logs}/run.log").close()
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in root.rglob("*")}
    assert owners == {(4321, 4322)}
    assert (root / contract.logs / "run.log").is_file()
