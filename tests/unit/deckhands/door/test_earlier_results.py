"""A task that follows others is one text: the task, and what the others returned."""

from __future__ import annotations

import pytest

from broker.runtime.errors import UsageError
from deckhands.door.earlier_results import fields_of
from deckhands.tasks.tasks import MAX_TASK_CHARS


def test_a_task_alone_is_left_as_it_is() -> None:
    assert fields_of(["do it"], {"model": "m"}) == {"task": "do it", "model": "m"}
    assert fields_of([], {"task": "do it"}) == {"task": "do it"}


def test_the_result_before_stands_behind_the_task() -> None:
    summary = {"summary": True, "conversation_id": "c", "message": "found it", "metrics": {"much": 1}}
    task = fields_of([summary], {"task": "Check."})["task"]
    assert task.startswith("Check.\n\nResults of the tasks before this one, as JSON:\n{")
    assert '"message": "found it"' in task
    assert "metrics" not in task
    assert fields_of([summary, "Check."], {})["task"] == task


def test_many_long_results_are_cut_by_the_same_measure() -> None:
    task = fields_of([[{"message": str(n) + "x" * 50_000} for n in range(40)]], {"task": "Sum up."})["task"]
    assert len(task) <= MAX_TASK_CHARS
    assert all(f'"message": "{n}x' in task for n in range(40))


@pytest.mark.parametrize(("arguments", "options"), [([], {}), (["a", "b", "c"], {}), (["a", "b"], {"task": "t"})])
def test_a_task_that_is_missing_or_one_too_many_is_refused(arguments: list[str], options: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        fields_of(arguments, options)
