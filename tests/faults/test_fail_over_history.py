"""The checker of histories finds what it is there to find: each planted contradiction, and none in a true history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fail_over_history import PRODUCER, History, describe_times, find_faults

Logs = dict[str, list[tuple[bytes, bytes]]]


def make_history() -> tuple[History, Logs]:
    """Two owners that follow each other, a producer, and a call whose outcome nobody knows."""
    history, log = History(promotions=[1.0]), []
    for at, (worker, token) in enumerate([("w1", 5), ("w1", 5), (PRODUCER, 0), ("w2", 6), ("w2", 6)], 1):
        number, mark = history.call("c", worker, token)
        if at < 5:
            history.acknowledge(number, at, float(at))
        log.append((f"{at}-0".encode(), b"\x81\xa7content" + mark.encode()))
    return history, {"c": log}


def lose(history: History, logs: Logs) -> None:
    logs["c"][3] = (b"4-0", b"another event")


def lose_the_end(history: History, logs: Logs) -> None:
    del logs["c"][2:]


def write_twice(history: History, logs: Logs) -> None:
    logs["c"].append((b"6-0", logs["c"][0][1]))


def leave_a_gap(history: History, logs: Logs) -> None:
    logs["c"][4] = (b"6-0", logs["c"][4][1])


def write_as_a_former_owner(history: History, logs: Logs) -> None:
    number, mark = history.call("c", "w1", 5)
    history.acknowledge(number, 6, 6.0)
    logs["c"].append((b"6-0", mark.encode()))


def give_a_token_twice(history: History, logs: Logs) -> None:
    number, mark = history.call("c", "w3", 6)
    history.acknowledge(number, 6, 6.0)
    logs["c"].append((b"6-0", mark.encode()))


def acknowledge_twice(history: History, logs: Logs) -> None:
    number, _ = history.call("c", PRODUCER, 0)
    history.acknowledge(number, 4, 6.0)


def write_what_no_one_called(history: History, logs: Logs) -> None:
    logs["c"].append((b"6-0", b"<n=99 w=w2 t=6>"))


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lose, "call 3 was acknowledged as event ('c', 4), which is lost"),
        (lose_the_end, "call 2 was acknowledged as event ('c', 3), which is lost"),
        (write_twice, "call 0 was written 2 times"),
        (leave_a_gap, "without a gap"),
        (write_as_a_former_owner, "the owner w1 with token 5 wrote after token 6"),
        (give_a_token_twice, "token 6 has owners"),
        (acknowledge_twice, "event ('c', 4) was acknowledged 2 times"),
        (write_what_no_one_called, "event 6 is of call 99, which was another one"),
    ],
)
def test_a_contradiction_is_found(plant: Callable[[History, Logs], None], found: str) -> None:
    history, logs = make_history()
    plant(history, logs)
    assert any(found in fault for fault in find_faults(history, logs)), find_faults(history, logs)


def test_a_true_history_has_no_contradiction(tmp_path: Path) -> None:
    history, logs = make_history()
    history.save(tmp_path / "history")
    assert find_faults(History.load(tmp_path / "history"), logs) == []


def test_the_time_to_the_next_event_counts_from_each_promotion() -> None:
    history, _ = make_history()
    history.promotions = [0.5, 2.5]
    assert history.takeover_seconds() == [0.5, 0.5]
    assert describe_times([1.0, 2.0, 3.0]) == "3 times, p50 2.00 s, p99 3.00 s, max 3.00 s"
