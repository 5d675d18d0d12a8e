"""What an agent has to hand in, as a person gives it."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from broker.runtime.errors import UsageError
from broker.tools.output_schema import find_violations
from deckhands.client.tasks.tasks import to_output_spec


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
