"""The OpenAPI document: everything that a client may rely on."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from fastapi import FastAPI

from deckhands.server.application import ROUTERS, needs_by_operation
from deckhands.server.guard import PUBLIC
from deckhands.server.openapi.document import Examples, NoExample, bodies_in, document_of, operation_id, operations_in


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    app = FastAPI(title="Deckhands", version="1", generate_unique_id_function=operation_id)
    for router in ROUTERS:
        app.include_router(router)
    return document_of(app, needs_by_operation())


def test_every_body_has_an_example_that_fits_its_schema(document: dict[str, Any]) -> None:
    seen, schemas, examples = set(), [], []
    for name, content in bodies_in(document):
        seen.add(name)
        assert content.keys() & {"example", "examples"}, f"{name} needs an example of each part: {content}"
        shown = content["example"] if "example" in content else next(e["value"] for e in content["examples"].values())
        schemas.append({"properties": {name: content.get("schema", {})}})
        examples.append((name, shown))
        if " request " in name:
            assert shown, name
    whole = {"components": document["components"], "allOf": schemas}
    validator = jsonschema_rs.Draft202012Validator(json.loads(json.dumps(whole)), validate_formats=True)
    for name, shown in examples:
        assert [error.message for error in validator.iter_errors({name: shown})] == [], name
    for path, method, operation in operations_in(document):
        if method in ("post", "put", "patch") and "requestBody" in operation:
            kinds = operation["requestBody"]["content"]
            assert "application/octet-stream" in kinds or f"{method.upper()} {path} request application/json" in seen


def test_every_operation_says_what_it_needs_and_how_it_fails(document: dict[str, Any]) -> None:
    names = set()
    for path, _, operation in operations_in(document):
        assert operation["security"] == [] if path in PUBLIC else operation["x-scope"], path
        assert operation["responses"]["default"]["content"], path
        assert operation["operationId"] not in names
        names.add(operation["operationId"])


def test_discriminators_are_required(document: dict[str, Any]) -> None:
    schemas, wanted, seen = document["components"]["schemas"], [document], set()
    while wanted:
        part = wanted.pop()
        wanted += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        if isinstance(part, dict) and isinstance(part.get("discriminator"), dict):
            for reference in part["discriminator"]["mapping"].values():
                seen.add(name := reference.rpartition("/")[2])
                assert part["discriminator"]["propertyName"] in schemas[name].get("required", ()), name
    assert "UploadedSource" in seen


def test_a_part_without_an_example_is_named() -> None:
    parts = {"Part": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}}
    with pytest.raises(NoExample, match=r"^Part\.name$"):
        Examples(parts).of({"$ref": "#/components/schemas/Part"})
