"""A task that follows others is one text: the task, and what the others returned."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import pytest

from broker.runtime.errors import UsageError
from deckhands.client.tasks.tasks import MAX_TASK_CHARS
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


@pytest.mark.parametrize("count", [500, 1_500, 50_000])
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
