"""The host's journal on a real file: its records, and their rest after a crash at any byte."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tool_worker.host.journal import Journal, JournalError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def opened(path: Path, boot_id: str = "boot-1") -> Journal:
    return Journal(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), boot_id)


def known(journal: Journal, action_ids: range) -> list[tuple[bool, bytes | None]]:
    return [(journal.has_started(action_id), journal.result(action_id)) for action_id in action_ids]


def test_started_and_recorded_are_remembered_by_the_next_host(path: Path) -> None:
    journal = opened(path)
    journal.record_start(1)
    journal.record_result(1, b'{"content":"one\\n"}')
    journal.record_start(2)
    expected = [(False, None), (True, b'{"content":"one\\n"}'), (True, None), (False, None)]
    assert known(journal, range(4)) == expected
    assert known(opened(path), range(4)) == expected


def test_the_last_result_of_an_action_counts(path: Path) -> None:
    journal = opened(path)
    for body in (b"first", b"second"):
        journal.record_start(1)
        journal.record_result(1, body)
    assert journal.result(1) == opened(path).result(1) == b"second"


def test_bodies_may_contain_anything(path: Path) -> None:
    body = b"\nstart 9\nresult 8 3\nabc\n\0" * 50
    opened(path).record_result(1, body)
    again = opened(path)
    assert again.result(1) == body
    assert known(again, range(8, 10)) == [(False, None), (False, None)]


def test_a_torn_record_is_taken_away_and_the_rest_stays(path: Path) -> None:
    journal = opened(path)
    journal.record_start(1)
    journal.record_result(1, b"one")
    whole = path.read_bytes()
    journal.record_start(2)
    journal.record_result(2, b"two")
    full = path.read_bytes()
    for length in range(len(full)):
        path.write_bytes(full[:length])
        torn = opened(path)
        assert torn.result(1) == (b"one" if length >= len(whole) else None)
        assert torn.result(2) is None
        torn.record_result(3, b"three")
        assert opened(path).result(3) == b"three"


def test_a_reboot_takes_the_certainty_away(path: Path) -> None:
    assert opened(path, "boot-1").is_certain
    assert opened(path, "boot-1").is_certain
    assert not opened(path, "boot-2").is_certain
    assert not opened(path, "boot-2").is_certain


@pytest.fixture
def full_disk(path: Path) -> Iterator[Journal]:
    """A journal that can grow by ten bytes more."""
    journal = opened(path)
    journal.record_start(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    yield journal
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_stops_starts_but_loses_no_result(full_disk: Journal, path: Path) -> None:
    size = path.stat().st_size
    full_disk.record_result(1, b"kept in memory")
    assert full_disk.result(1) == b"kept in memory"
    with pytest.raises(JournalError):
        full_disk.record_start(222_222_222)
    assert not full_disk.has_started(222_222_222)
    assert path.stat().st_size == size == full_disk.size_bytes


def test_a_start_is_remembered_with_its_fingerprint(path: Path) -> None:
    journal = opened(path)
    journal.record_start(3, "abc")
    journal.record_result(3, b"three")
    journal.record_start(2)
    for one in (journal, opened(path)):
        assert [one.fingerprint(action_id) for action_id in (2, 3, 4)] == ["", "abc", ""]
        assert one.newest == [3, "abc"]
        assert one.result(3) == b"three"


def test_older_journal_is_read_and_continued(path: Path) -> None:
    path.write_bytes(b"boot boot-1\nstart 1\nresult 1 3\none\nstart 2\n")
    journal = opened(path)
    assert known(journal, range(1, 4)) == [(True, b"one"), (True, None), (False, None)]
    assert journal.newest == [2, ""]
    journal.record_start(3, "abc")
    again = opened(path)
    assert known(again, range(1, 4)) == [(True, b"one"), (True, None), (True, None)]
    assert (again.fingerprint(1), again.fingerprint(3)) == ("", "abc")


def test_an_empty_journal_has_no_newest_action(path: Path) -> None:
    assert opened(path).newest is None


def test_the_newest_action_is_the_one_with_the_highest_number(path: Path) -> None:
    journal = opened(path)
    for action_id, fingerprint in ((7, "seven"), (12, "twelve"), (9, "nine")):
        journal.record_start(action_id, fingerprint)
    assert journal.newest == [12, "twelve"]
