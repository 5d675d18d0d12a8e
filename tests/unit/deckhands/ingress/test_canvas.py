"""What follows a task keeps its ids, however often the second half is sent."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain, chord, group

from broker.runtime.errors import UsageError
from deckhands.ingress.canvas import add_ids, parse_followers

APP = Celery("shop", set_as_current=False)


def signature(name: str, **options: Any) -> Any:
    return APP.signature(name, **options)


def ids(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in ids(item)]
    if not isinstance(value, dict):
        return []
    here = [value["options"]["task_id"]] if "task" in value and value.get("options", {}).get("task_id") else []
    return here + [found for item in value.values() for found in ids(item)]


def test_every_callback_has_an_id_of_its_place() -> None:
    nested = group([signature("a"), chain(signature("b"), signature("c"), app=APP)], app=APP)
    body = signature("d")
    body.link(signature("e"))
    found = {"callbacks": [nested, chord([signature("f")], body, app=APP)], "errbacks": [signature("g")]}
    first, second = parse_followers("task-1", found), parse_followers("task-1", found)
    assert first == second
    assert len(set(ids([first["callbacks"], first["errbacks"]]))) == len(ids([first["callbacks"], first["errbacks"]]))
    assert {*ids([first["callbacks"]])}.isdisjoint(ids([parse_followers("task-2", found)["callbacks"]]))


def test_an_id_that_is_there_is_kept() -> None:
    assert add_ids([signature("a", options={"task_id": "mine"})], "p")[0]["options"]["task_id"] == "mine"


@pytest.mark.parametrize(
    "spoilt",
    [
        {},
        {"args": 3},
        {"task": 5},
        {"task": "a", "args": 3},
        {"task": "a", "kwargs": []},
        {"task": "a", "options": "x"},
    ],
)
def test_what_is_no_signature_is_refused(spoilt: Any) -> None:
    with pytest.raises(UsageError, match="signature"):
        parse_followers("task-1", {"callbacks": [signature("good")], "chain": [spoilt]})


def test_what_is_nested_without_end_is_refused() -> None:
    deep: Any = signature("a")
    for _ in range(40):
        deep = [deep]
    with pytest.raises(UsageError, match="levels deep"):
        parse_followers("task-1", {"callbacks": deep})


@pytest.mark.parametrize("option", ["queue", "routing_key"])
@pytest.mark.parametrize(
    "place",
    [
        *(
            *("deckhands.jobs", "deckhands:unacked", "deckhands:beat::lock", "_kombu.binding.celery", "unacked"),
            "unacked_index",
        ),
        *("celery-task-meta-x", "celery-taskset-meta-x", "celery\x06\x163", "", "x" * 129, 7, ["a"], {"name": "a"}),
    ],
)
def test_follow_ups_reach_only_valid_application_queues(option: str, place: Any) -> None:
    with pytest.raises(UsageError, match="cannot be sent to"):
        parse_followers("task-1", {"callbacks": [signature("a", options={option: place})]})


def test_what_follows_reaches_no_exchange() -> None:
    with pytest.raises(UsageError, match="exchange"):
        parse_followers("task-1", {"errbacks": [signature("a", options={"exchange": "celery.pidbox"})]})


@pytest.mark.parametrize("place", ["celery", "deckhands", "shop.reports", "a_b-c"])
def test_what_follows_reaches_queues_of_applications_and_ingresses(place: str) -> None:
    found = parse_followers("task-1", {"callbacks": [signature("a", options={"queue": place, "routing_key": place})]})
    assert found["callbacks"][0]["options"]["queue"] == place
