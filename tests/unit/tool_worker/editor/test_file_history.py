"""The bounds of the history of edited files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tool_worker.editor.file_history import FileHistory


def drain(history: FileHistory, path: str) -> list[bytes]:
    """Take all versions of a file, the newest first."""
    versions = []
    while (content := history.newest(path)) is not None:
        versions.append(content)
        history.drop_newest(path)
    return versions


def test_versions_come_back_newest_first_and_by_file() -> None:
    history = FileHistory()
    for path, content in [("/a", b"1"), ("/b", b"2"), ("/a", b"3")]:
        history.push(path, content)
    assert drain(history, "/a") == [b"3", b"1"]
    assert drain(history, "/b") == [b"2"]
    assert history.newest("/c") is None


def test_dropping_nothing_changes_nothing() -> None:
    history = FileHistory()
    history.push("/a", b"1")
    history.drop_newest("/b")
    assert drain(history, "/a") == [b"1"]


def test_the_oldest_versions_of_all_files_make_room() -> None:
    history = FileHistory(limit_bytes=4096)
    history.push("/a", b"1" * 1000)
    history.push("/b", b"2" * 1000)
    history.push("/a", b"3" * 1000)
    assert drain(history, "/a") == [b"3" * 1000]
    assert drain(history, "/b") == [b"2" * 1000]
    history.push("/a", b"4" * 4096)
    assert history.newest("/a") is None


def test_versions_of_empty_files_are_bounded_too() -> None:
    history = FileHistory(limit_bytes=4096)
    for number in range(1000):
        history.push(f"/{number}", b"")
    assert [number for number in range(1000) if history.newest(f"/{number}") is not None] == list(range(992, 1000))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=900))))
def test_what_is_left_of_a_file_has_no_gaps_and_keeps_the_bounds(pushed: list[tuple[str, bytes]]) -> None:
    history = FileHistory(versions_per_file=3, limit_bytes=3000)
    for path, content in pushed:
        history.push(path, content)
    left = {path: drain(history, path) for path in "abc"}
    for path, versions in left.items():
        newest_first = [content for name, content in reversed(pushed) if name == path]
        assert versions == newest_first[: len(versions)]
        assert len(versions) <= 3
    assert sum(len(content) for versions in left.values() for content in versions) <= 3000
