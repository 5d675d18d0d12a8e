"""The bounds of the history of edited files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_worker.host.text_files.file_history import FileHistory


def drain(history: FileHistory, path: str) -> list[bytes]:
    """Take all versions of a file, the newest first."""
    versions = []
    while (version := history.newest(path)) is not None:
        versions.append(version.content)
        history.drop_newest(path)
    return versions


def test_versions_come_back_newest_first_and_by_file() -> None:
    history = FileHistory()
    for path, content in [("/a", b"1"), ("/b", b"2"), ("/a", b"3")]:
        history.push(path, content, b"")
    assert drain(history, "/a") == [b"3", b"1"]
    assert drain(history, "/b") == [b"2"]
    assert history.newest("/c") is None


def test_dropping_nothing_changes_nothing() -> None:
    history = FileHistory()
    history.push("/a", b"1", b"")
    history.drop_newest("/b")
    assert drain(history, "/a") == [b"1"]


def test_the_oldest_versions_of_all_files_make_room() -> None:
    history = FileHistory(limit_bytes=4096)
    history.push("/a", b"1" * 1000, b"")
    history.push("/b", b"2" * 1000, b"")
    history.push("/a", b"3" * 1000, b"")
    assert drain(history, "/a") == [b"3" * 1000]
    assert drain(history, "/b") == [b"2" * 1000]
    history.push("/a", b"4" * 4096, b"")
    assert history.newest("/a") is None


def test_versions_of_empty_files_are_bounded_too() -> None:
    history = FileHistory(limit_bytes=4096)
    for number in range(1000):
        history.push(f"/{number}", b"", b"")
    assert [number for number in range(1000) if history.newest(f"/{number}") is not None] == list(range(992, 1000))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=900))))
def test_remaining_file_history_has_no_gaps_and_stays_bounded(pushed: list[tuple[str, bytes]]) -> None:
    history = FileHistory(versions_per_file=3, limit_bytes=3000)
    for path, content in pushed:
        history.push(path, content, b"")
    left = {path: drain(history, path) for path in "abc"}
    for path, versions in left.items():
        newest_first = [content for name, content in reversed(pushed) if name == path]
        assert versions == newest_first[: len(versions)]
        assert len(versions) <= 3
    assert sum(len(content) for versions in left.values() for content in versions) <= 3000


def test_a_version_says_what_replaced_it() -> None:
    history = FileHistory()
    history.push("/a", b"1", b"2")
    version = history.newest("/a")
    assert version.was_replaced_by(b"2")
    assert not version.was_replaced_by(b"3")


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "\udcff"]), st.none() | st.binary(max_size=900)), max_size=40))
def test_another_history_of_the_same_file_has_the_same_versions(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bytes | None]]
) -> None:
    path = tmp_path_factory.mktemp("history") / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        history = FileHistory(versions_per_file=3, limit_bytes=3000, descriptor=descriptor)
        for name, content in steps:
            if content is None:
                history.drop_newest(name)
            else:
                history.push(name, content, content)
            assert path.stat().st_size <= 2 * 3000 + 1000
        os.write(descriptor, b"push 1 2000 0\na cut record")
        again = FileHistory(versions_per_file=3, limit_bytes=3000, descriptor=descriptor)
        for name in ("a", "b", "\udcff"):
            assert drain(again, name) == drain(history, name)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "content",
    [b"push 99999999999 1 x\n", b"push 1 1 x y\nab", b"drop x\n", b"\0" * 500, b"push -1 5 x\n", b"push 1 1 \xff\na"],
)
def test_a_file_that_is_no_history_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_APPEND)
    history = FileHistory(descriptor=descriptor)
    history.push("/a", b"1", b"2")
    assert drain(FileHistory(descriptor=descriptor), "/a") == [b"1"]
    os.close(descriptor)


def test_a_full_disk_costs_no_version_of_this_history(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)  # it cannot be written
    history = FileHistory(descriptor=descriptor)
    history.push("/a", b"1", b"2")
    history.push("/a", b"2", b"3")
    assert drain(history, "/a") == [b"2", b"1"]
    os.close(descriptor)
