"""Follow-up tasks: earlier results in their texts, and the ids and queues of their own followers."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from broker.runtime.errors import UsageError
from deckhands.client.tasks.tasks import MAX_TASK_CHARS
from deckhands.ingress.canvas import add_ids, parse_followers
from deckhands.ingress.earlier_results import FILE, follow


def test_a_task_alone_is_left_as_it_is() -> None:
    assert follow(["do it"], {"model": "m"}).fields == {"task": "do it", "model": "m"}
    assert follow([], {"task": "do it"}).fields == {"task": "do it"}


def test_the_result_before_stands_behind_the_task() -> None:
    summary = {"summary": True, "conversation_id": "c", "message": "found it", "metrics": {"much": 1}}
    task = follow([summary], {"task": "Check."}).fields["task"]
    assert task.startswith("Check.\n\nResults of the tasks before this one, as JSON:\n{")
    assert '"message": "found it"' in task
    assert "metrics" not in task
    assert follow([summary, "Check."], {}).fields["task"] == task


def test_many_long_results_are_cut_by_the_same_measure() -> None:
    task = follow([[{"message": str(n) + "x" * 50_000} for n in range(40)]], {"task": "Sum up."}).fields["task"]
    assert len(task) <= MAX_TASK_CHARS
    assert all(f'"message": "{n}x' in task for n in range(40))


@pytest.mark.parametrize("count", [500, 1_500, 5_000])
@pytest.mark.parametrize("task", ["Sum up.", "x" * (MAX_TASK_CHARS - 1_100)])
def test_very_many_results_fit_and_are_in_a_file(count: int, task: str) -> None:
    results = [{"summary": True, "message": f"answer {n}", "metrics": n} for n in range(count)]
    following = follow([results], {"task": task})
    assert len(following.fields["task"]) <= MAX_TASK_CHARS
    assert f"{FILE} in the workspace has all {count:,} results" in following.fields["task"]
    assert following.archive is not None
    with tarfile.open(fileobj=io.BytesIO(following.archive)) as archive:
        file = archive.extractfile(FILE)
        assert file is not None
        assert [json.loads(line) for line in file] == results
    assert follow([results], {"task": task}).archive == following.archive


@pytest.mark.parametrize("workspace", ["/srv/project", {"path": "/srv/project"}, "git+https://h/p"])
def test_results_that_do_not_fit_are_counted(workspace: Any) -> None:
    following = follow([["x" * 300] * 1_500], {"task": "Sum up.", "workspace": workspace})
    assert following.archive is None
    assert "of 1,500 results are left out here" in following.fields["task"]
    assert FILE not in following.fields["task"]


@pytest.mark.parametrize(("arguments", "options"), [([], {}), (["a", "b", "c"], {}), (["a", "b"], {"task": "t"})])
def test_missing_or_surplus_task_is_refused(arguments: list[str], options: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        follow(arguments, options)


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
def test_invalid_signature_is_refused(spoilt: Any) -> None:
    with pytest.raises(UsageError, match="signature"):
        parse_followers("task-1", {"callbacks": [signature("good")], "chain": [spoilt]})


def test_deeply_nested_signature_is_refused() -> None:
    deep: Any = signature("a")
    for _ in range(40):
        deep = [deep]
    with pytest.raises(UsageError, match="levels deep"):
        parse_followers("task-1", {"callbacks": deep})


@pytest.mark.parametrize("option", ["queue", "routing_key"])
@pytest.mark.parametrize(
    "place",
    [
        *("deckhands.jobs", "deckhands:unacked", "deckhands:beat::lock", "_kombu.binding.celery", "unacked"),
        "unacked_index",
        *("celery-task-meta-x", "celery-taskset-meta-x", "celery\x06\x163", "", "x" * 129, 7, ["a"], {"name": "a"}),
    ],
)
def test_follow_ups_reach_only_valid_application_queues(option: str, place: Any) -> None:
    with pytest.raises(UsageError, match="cannot be sent to"):
        parse_followers("task-1", {"callbacks": [signature("a", options={option: place})]})


def test_followers_reach_no_exchange() -> None:
    with pytest.raises(UsageError, match="exchange"):
        parse_followers("task-1", {"errbacks": [signature("a", options={"exchange": "celery.pidbox"})]})


@pytest.mark.parametrize("place", ["celery", "deckhands", "shop.reports", "a_b-c"])
def test_followers_reach_queues_of_applications_and_ingresses(place: str) -> None:
    found = parse_followers("task-1", {"callbacks": [signature("a", options={"queue": place, "routing_key": place})]})
    assert found["callbacks"][0]["options"]["queue"] == place
