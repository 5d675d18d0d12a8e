"""Requests as plain JSON: valid and refused ones, the error texts, and the resulting conversations."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from broker.contract.specs import AgentSpec, Tenancy
from broker.runtime.errors import UsageError
from broker.tools.output_schema import find_violations
from deckhands.client.client import Client
from deckhands.client.conversation.async_conversation import AsyncConversation
from deckhands.client.conversation.conversation import ConversationFields
from deckhands.client.tasks.inputs import to_task_spec
from deckhands.client.tasks.spec import TaskFields, TaskSpec
from deckhands.client.tasks.tasks import to_output_spec


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
    assert request.workspace_spec().source is not None
    assert request.limits.max_iterations == 7
    assert request.tenancy() == Tenancy(tenant="acme", priority="interactive")
    assert "t0ken" not in repr(request)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "task"),
        ({"task": ""}, "task"),
        ({"task": " \n"}, "task: it is empty"),
        ({"task": "x", "agent": "acp:"}, "agent"),
        ({"task": "x", "images": ["/etc/passwd"]}, "images"),
        ({"task": "x", "images": ["https://a b"]}, "images: The picture"),
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
def test_invalid_fields_are_named(fields: Any, named: str) -> None:
    with pytest.raises(UsageError) as refused:
        TaskSpec.parse(fields)
    assert named in str(refused.value)
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("agent", ["CodeActAgent", AgentSpec(), {"name": "CodeActAgent"}, {"plan": {}}])
def test_repository_is_read_unless_agent_forbids_it(agent: Any) -> None:
    assert TaskSpec.parse({"task": "x", "agent": agent}).agent_spec().enable_workspace_skills
    forbidding = {"task": "x", "agent": {"enable_workspace_skills": False}}
    assert not TaskSpec.parse(forbidding).agent_spec().enable_workspace_skills
    stored = TaskSpec.parse(TaskSpec.parse({"task": "x", "agent": agent}).model_dump(mode="json"))
    assert stored.agent_spec().enable_workspace_skills


def test_keywords_and_json_have_the_same_fields() -> None:
    own = {"task", "agent", "tools", "output", "idempotency_key"}
    assert TaskFields.__annotations__.keys() == TaskSpec.model_fields.keys() - own | {"tenancy"}
    parameters = inspect.signature(AsyncConversation).parameters.keys() - {"agent", "output", "fields"}
    assert ConversationFields.__annotations__.keys() == TaskFields.__annotations__.keys() | parameters
    assert TaskFields.__annotations__.keys() <= inspect.signature(Client.submit).parameters.keys()


def test_keywords_of_python_are_fields_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    spec, _ = to_task_spec(
        "Look",
        agent="ReadOnlyAgent",
        model="some/model",
        workspace=tmp_path,
        images=[tmp_path / "a.png"],
        tenancy=Tenancy(tenant="acme", priority="batch"),
        delay=timedelta(minutes=2),
        labels=None,
        expires=600,
    )
    agent = spec.agent_spec()
    assert (agent.name, agent.llm.model) == ("ReadOnlyAgent", "some/model")
    assert (spec.workspace_spec().path, spec.images[0][:22]) == (str(tmp_path), "data:image/png;base64,")
    assert (spec.tenancy(), spec.delay, spec.expires) == (Tenancy(tenant="acme", priority="batch"), 120.0, 600.0)
    assert (spec.labels, spec.headless) == ({}, True)


def test_unknown_keyword_is_named_with_those_that_exist() -> None:
    with pytest.raises(TypeError, match="no colour; it has task, agent, model,"):
        to_task_spec("Look", colour="red")  # type: ignore[call-arg]


def test_conversation_can_be_delayed_and_expire() -> None:
    conversation = AsyncConversation(delay=60, expires=timedelta(hours=1), double_texting="reject", title="Later")
    spec = conversation._spec
    assert (spec.delay, spec.expires, spec.double_texting, spec.headless) == (60.0, 3_600.0, "reject", False)
    with pytest.raises(UsageError, match="it would expire before it may start"):
        AsyncConversation(delay=60, expires=30)


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


class Part(BaseModel):
    name: str


class Answer(BaseModel):
    total: int
    parts: list[Part] = []


def test_a_pydantic_model_is_a_schema() -> None:
    schema = to_output_spec(Answer).json_schema
    assert find_violations({"total": 3, "parts": [{"name": "a"}]}, schema) == []
    assert find_violations({"total": 3, "parts": [{}]}, schema) == ["/parts/0: 'name' is missing"]


def test_schema_is_taken_unchanged_and_unusable_one_refused() -> None:
    schema = {"type": "object", "required": ["a"]}
    assert to_output_spec(schema).json_schema == schema
    with pytest.raises(UsageError, match="cannot be used"):
        to_output_spec({"type": "object", "minProperties": -1})
    with pytest.raises(UsageError, match="14000 characters"):
        to_output_spec({"type": "object", "description": "x" * 15_000})
