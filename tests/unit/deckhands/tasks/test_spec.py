"""Requests as plain JSON: what is taken, what is refused and by which words, and what they begin."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.specs import Tenancy, WorkspaceSpec
from broker.runtime.errors import UsageError
from deckhands.client.tasks.spec import TaskSpec


def test_everything_that_a_request_names_is_in_what_it_begins() -> None:
    request = TaskSpec.parse(
        {
            "task": "Look",
            "agent": "PlanningAgent",
            "model": "some/model",
            "workspace": "git+https://example.com/x.git#main",
            "limits": {"max_iterations": 7},
            "output": {"type": "object", "properties": {"n": {"type": "integer"}}},
            "secrets": {"TOKEN": "t0ken"},
            "tenant": "acme",
            "priority": "interactive",
            "labels": {"team": "billing"},
            "title": "A title",
        }
    )
    agent = request.agent_spec()
    assert (agent.name, agent.llm.model) == ("PlanningAgent", "some/model")
    assert agent.output is not None
    assert request.place().source is not None
    assert request.limits.max_iterations == 7
    assert request.tenancy() == Tenancy(tenant="acme", priority="interactive")
    assert "t0ken" not in repr(request)


def test_a_task_is_enough() -> None:
    spec = TaskSpec.parse({"task": "Look"})
    assert (spec.agent_spec().name, spec.place(), spec.tenancy()) == ("CodeActAgent", WorkspaceSpec(), None)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "task"),
        ({"task": ""}, "task"),
        ({"task": "x" * 100_001}, "task"),
        ({"task": "x", "tasc": "y"}, "tasc"),
        ({"task": "x", "workspace": "here/there"}, "workspace"),
        ({"task": "x", "workspace": "archive.zip"}, "workspace"),
        ({"task": "x", "workspace": "git+https://user:pass@example.com/x"}, "workspace"),
        ({"task": "x", "limits": {"max_iterations": 0}}, "limits.max_iterations"),
        ({"task": "x", "labels": {"a b": "c"}}, "labels"),
        ({"task": "x", "labels": {"a": "\x1b[31m"}}, "labels"),
        ({"task": "x", "labels": {str(n): "" for n in range(33)}}, "labels"),
        ({"task": "x", "tenant": "a/b"}, "tenant"),
        ({"task": "x", "priority": "now"}, "priority"),
        ({"task": "x", "secrets": {"A": 5}}, "secrets.A"),
        ([], "the whole"),
        (None, "the whole"),
    ],
)
def test_what_cannot_be_used_is_named(fields: Any, named: str) -> None:
    with pytest.raises(UsageError) as refused:
        TaskSpec.parse(fields)
    assert named in str(refused.value)
    assert "\x1b" not in str(refused.value)


def test_no_value_stands_in_the_refusal() -> None:
    with pytest.raises(UsageError) as refused:
        TaskSpec.parse({"task": "x", "secrets": {"A": ["hunter2"]}, "model": {"k": "hunter2"}})
    assert "hunter2" not in str(refused.value)


def test_a_refusal_is_written_for_people() -> None:
    with pytest.raises(UsageError) as refused:
        TaskSpec.parse({"titel": "x", "labels": {"é": "y"}})
    assert "task: it is missing" in refused.value.message
    assert "titel: there is no such field; did you mean title?" in refused.value.message
    assert "Value error" not in refused.value.message
