"""The specification of a log accepts every golden log and refuses each mutation of one, with a sentence."""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from broker.contract import find_kinds
from broker.log import specification
from broker.log.specification import MAX_VIOLATIONS, check_log
from tests.replay.log_mutations import MUTATIONS, Log, mutate

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.jsonl"))
MAX_LINES = 600


def load(path: Path) -> Log:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_logs_are_correct(path: Path) -> None:
    assert check_log(load(path), must_be_over=True) == []


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_beginning_of_a_golden_log_is_correct(path: Path) -> None:
    log = load(path)
    assert [found for end in range(1, len(log)) for found in check_log(log[:end])] == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutated_logs_are_refused_with_the_reason(name: str) -> None:
    rule, mutation = MUTATIONS[name]
    mutated = [(path.stem, log) for path in GOLDEN for log in mutate(load(path), mutation)]
    assert mutated
    for source, log in mutated:
        found = check_log(log)
        assert rule in [one.rule for one in found], (source, found[:3])
        assert all(len(one.text.split()) > 3 and one.text.isprintable() for one in found)


def test_every_kind_of_event_in_a_log_is_known() -> None:
    kinds = {kind for kind, one in find_kinds().items() if one.__module__.startswith("broker.")}
    assert kinds - {"observation.condense"} == specification.KINDS  # which is part of views only


def test_a_segment_starts_with_one_earlier_reply() -> None:
    log = load(GOLDEN[0])
    reply = next(event["id"] for event in log if event["kind"] == "model.reply")
    for reply_ids, refused in (([reply], []), ([reply, reply], ["turn"]), ([1], ["turn"]), ([99], ["turn"])):
        segments: Log = [
            {**log[-1], "id": len(log) + number, "kind": "model.segment_started", "reply_id": one, "reason": "rollback"}
            for number, one in enumerate(reply_ids, 1)
        ]
        assert [one.rule for one in check_log([*log, *segments])] == refused


def test_there_are_enough_mutations() -> None:
    count = sum(1 for _, mutation in MUTATIONS.values() for path in GOLDEN for _ in mutate(load(path), mutation))
    assert (len(MUTATIONS) >= 20, count >= 200) == (True, True), (len(MUTATIONS), count)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"last_event_id": 14}, "the index says last_event_id 14, the log 15"),
        ({"state": "running"}, "the index says state running, the log finished"),
        ({"iterations": 2}, "the index says iterations 2, the log 3"),
        ({"cost_usd": 0.04}, "the index says cost_usd 0.04, the log 0.03"),
    ],
)
def test_an_index_that_says_something_else(index: dict[str, Any], text: str) -> None:
    log = load(GOLDEN[0])
    assert [one.text for one in check_log(log, index=index)] == [text]
    assert check_log(log, index={"last_event_id": 15, "state": "finished", "iterations": 3, "cost_usd": 0.03}) == []


def test_a_log_of_another_conversation() -> None:
    (found,) = check_log(load(GOLDEN[0]), conversation_id="other")
    assert found.text == "the log does not begin with the creation of other"


@pytest.mark.parametrize("value", [None, 0, -1, 1e400, "", "x", [], [[]], {}, {"a": {}}, True, 10**400])
def test_values_of_any_type_are_survived(value: Any) -> None:
    """Each field of each event in turn is replaced."""
    for path in GOLDEN[:3]:
        log = load(path)
        for at in range(len(log)):
            for name in log[at]:
                event = log[at]
                log[at] = {**event, name: value}
                assert len(check_log(log, index={"cost_usd": 1.0})) <= MAX_VIOLATIONS + 4
                log[at] = event


def test_what_is_no_log() -> None:
    for events in ([], [None], [1, 2], [[]], ["x"], [{}], [{"id": 1}], [{"id": 1, "kind": []}]):
        assert check_log(events)


def test_a_log_is_not_changed() -> None:
    log = load(GOLDEN[2])
    before = copy.deepcopy(log)
    check_log(log)
    assert log == before


def test_it_is_one_file_of_its_own() -> None:
    """It imports the standard library only and is short enough to be read."""
    path = Path(specification.__file__)
    names = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.split(".")[0] in ("broker", "controller_worker", "deckhands")]
    assert len(path.read_text().splitlines()) <= MAX_LINES
