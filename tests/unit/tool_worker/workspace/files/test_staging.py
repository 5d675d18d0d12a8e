"""Files beside a workspace, and their removal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.trees import nested, without_rights
from tool_worker.workspace.files.staging import create_staging, remove_staging, remove_tree


def test_very_deep_directory_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    with nested(top, 3000):
        remove_tree(top)
        assert not top.exists()
        remove_tree(top)


def test_files_without_owner_rights_are_removed(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with without_rights(own):
        for name, mode in (("cached", 0o555), ("closed", 0)):
            (own / "top" / name / "inner").mkdir(parents=True)
            (own / "top" / name / "inner" / "file").touch(mode=0o444)
            (own / "top" / name / "inner").chmod(mode)
            (own / "top" / name).chmod(mode)
        remove_tree(own / "top")
        assert list(own.iterdir()) == []


def test_targets_of_links_stay(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with without_rights(own):
        (own / "outside").mkdir()
        (own / "outside" / "file").touch(mode=0o400)
        (own / "outside").chmod(0o500)
        (own / "top" / "cached").mkdir(parents=True)
        (own / "top" / "cached" / "out").symlink_to(own / "outside")
        (own / "top" / "cached").chmod(0o555)
        remove_tree(own / "top")
        assert [path.name for path in own.iterdir()] == ["outside"]
        assert (own / "outside").stat().st_mode & 0o777 == 0o500
        assert (own / "outside" / "file").stat().st_mode & 0o777 == 0o400
        (own / "outside").chmod(0o700)


def test_failed_removal_is_an_error(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "top").mkdir(parents=True)
    (own / "top" / "others").mkdir(mode=0o755)
    (own / "top" / "others" / "file").touch()
    if os.getuid() != 0:
        pytest.skip("needs root to be two people")
    with without_rights(own), pytest.raises(OSError, match="Not all of it can be removed"):
        remove_tree(own / "top")
    assert (own / "top" / "others" / "file").exists()


def test_draft_and_its_predecessors_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".draft-left"
    left.mkdir()
    with create_staging(tmp_path) as draft:
        assert not left.exists()
        (draft / "made").mkdir()
        left.mkdir()
        with create_staging(tmp_path) as second:
            assert second != draft
        remove_staging(tmp_path)
        assert left.exists()
        (draft / "made").rename(tmp_path / "made")
    assert {path.name for path in tmp_path.iterdir()} == {"made", ".draft-left"}
    remove_staging(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"made"}
