"""Bodies of requests: a value has the type that the OpenAPI document promises, and a text of a number is no number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from broker.contract.events import AgentSpec, Limits, WorkspaceSpec
from broker.contract.workspace_sources import GitSource
from deckhands.server.application import routes_of
from deckhands.server.models import ChangedConversation, Command, ConfirmationAnswer, Fork, NewConversation
from deckhands.server.openapi.json_body import JsonBody

AGENT = AgentSpec(name="CodeActAgent").model_dump(mode="json", exclude={"condenser"})  # its schema promises no types
PLACE = WorkspaceSpec(source=GitSource(url="https://example.org/a", depth=3)).model_dump(mode="json")
LIMITS = Limits(max_budget_usd=2.5, max_tokens=7).model_dump(mode="json")
WHOLE: dict[type[BaseModel], dict[str, Any]] = {
    NewConversation: {
        "task": "x",
        "agent": AGENT,
        "workspace": PLACE,
        "limits": LIMITS,
        "delay": 1.5,
        "headless": True,
    },
    ChangedConversation: {"agent": AGENT, "limits": LIMITS, "reason": "x"},
    Fork: {"at": 3},
    ConfirmationAnswer: {"action_id": 3, "edited": {"any": "3"}},
    Command: {"command": "ls", "timeout_seconds": 3},
}


def leaves(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the numbers and flags of a body, with their places."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*place, name))
    elif isinstance(value, bool | int | float):
        yield place, value


def changed(body: dict[str, Any], place: tuple[str | int, ...], value: object) -> dict[str, Any]:
    copy = json.loads(json.dumps(body))
    part = copy
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    return dict(copy)


def test_every_body_of_a_route_has_promised_types() -> None:
    models = {
        route.body_field.field_info.annotation
        for route in routes_of()
        if isinstance(route, APIRoute) and route.body_field
    }
    lax = {model for model in models if isinstance(model, type) and not issubclass(model, JsonBody)}
    for model in lax:
        kinds = {part.get("type") for part in model.model_json_schema()["properties"].values()}
        assert kinds == {"string"}, f"{model} has more than texts"


@pytest.mark.parametrize("model", WHOLE)
def test_wrong_json_types_are_refused_at_their_position(model: type[BaseModel]) -> None:
    body = WHOLE[model]
    found = list(leaves(body))
    assert found
    model.model_validate(body)
    for place, value in found:
        others = [json.dumps(value), 1] if isinstance(value, bool) else [str(value), True]
        for other in others:
            with pytest.raises(ValidationError) as refused:
                model.model_validate(changed(body, place, other))
            assert set(place) <= set(refused.value.errors()[0]["loc"]), refused.value


def test_bodies_valid_by_schema_are_accepted() -> None:
    assert Fork.model_validate({"at": 3.0}).at == 3
    assert Command.model_validate({"command": "ls", "timeout_seconds": 3}).timeout_seconds == 3.0
    assert NewConversation.model_validate({"task": "x", "expires": "2100-01-01T00:00:00Z", "output": {"a": "3"}}).output
    for wrong in ({"at": "3"}, {"at": 3.5}, {"at": None, "title": 3}):
        with pytest.raises(ValidationError):
            Fork.model_validate(wrong)
