"""The OpenAPI 3.1 document: FastAPI's document with scopes, problems and complete examples added.

Holds: a JSON body has an example that fits its schema, if all of its parts have one; no value in it is invented: each
is an example, a default or the only choice of a schema. Every error answer has the error format of its path.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from deckhands.server.dependencies import Needs
from deckhands.server.guard import PUBLIC
from deckhands.server.problems import MEDIA_TYPE, OPENAI_PATHS, TYPE

JSON = "application/json"
_log = logging.getLogger(__name__)
PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "retryable", "remedy"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "retryable": {"type": "boolean"},
        "remedy": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["in", "code", "detail"],
                "properties": {"in": {"type": "string"}, "code": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
    },
    "example": {
        "type": f"{TYPE}unknown_conversation",
        "title": "Unknown conversation",
        "status": 404,
        "detail": "No conversation with the id 'x' in this store.",
        "code": "unknown_conversation",
        "retryable": False,
        "remedy": "`deckhands ls` lists all conversations.",
    },
}
OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
    "example": {
        "error": {
            "message": "No conversation with the id 'x' in this store.",
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_conversation",
        }
    },
}
RPC_ERROR = {
    "type": "object",
    "required": ["jsonrpc", "error"],
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "id": {"type": ["string", "integer", "null"]},
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": {"type": "integer"}, "message": {"type": "string"}, "data": {}},
        },
    },
    "example": {"jsonrpc": "2.0", "id": 1, "error": {"code": -32602, "message": "Invalid params"}},
}
SCHEMAS = {"Problem": PROBLEM, "OpenAIError": OPENAI_ERROR, "RpcError": RPC_ERROR}
RPC_PATHS = ("/mcp", "/a2a")


def operation_id(route: APIRoute) -> str:
    """Return the id of an operation for generated clients: its router and its function."""
    return f"{route.tags[0] if route.tags else 'server'}_{route.name}".replace("-", "_")


def document_of(app: FastAPI, needed: Mapping[str, Needs | None]) -> dict[str, Any]:
    """Return the document of an application. It is built once.

    Args:
        needed: the requirement of each operation, by operation id.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    found = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, openapi_version="3.1.0"
    )
    components = found.setdefault("components", {})
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "an API key, `dh_…`"}}
    components["schemas"] |= SCHEMAS
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    found["security"] = [{"key": []}]
    for path, _, operation in operations_in(found):
        operation["responses"].pop("422", None)
        operation["responses"]["default"] = {"description": "an error", "content": errors_of(path)}
        for answer in operation["responses"].values():
            if answer["description"] == "Successful Response":
                answer["description"] = "it is done"
        needs = needed.get(operation["operationId"])
        if path in PUBLIC:
            operation["security"] = []
        elif needs is not None:
            operation["x-scope"] = str(needs.scope)
    add_examples(found)
    app.openapi_schema = found
    return found


def operations_in(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each operation with its path and its method."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method, operation


def errors_of(path: str) -> dict[str, Any]:
    """Return the content of an error answer."""
    if path.startswith(OPENAI_PATHS):
        return {JSON: {"schema": {"$ref": "#/components/schemas/OpenAIError"}}}
    found = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    if path.startswith(RPC_PATHS):
        found[JSON] = {"schema": {"$ref": "#/components/schemas/RpcError"}}
    return found


def bodies_in(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the content of each JSON body of requests and answers."""
    for path, method, operation in operations_in(document):
        bodies = {"request": operation.get("requestBody", {}), **operation["responses"]}
        for name, body in bodies.items():
            for kind, content in body.get("content", {}).items():
                if kind in (JSON, MEDIA_TYPE):
                    yield f"{method.upper()} {path} {name} {kind}", content


def add_examples(document: dict[str, Any]) -> None:
    """Add an example to each JSON body. A body with a part without an example gets none; a test reports it."""
    examples = Examples(document["components"]["schemas"])
    for name, content in bodies_in(document):
        if "example" not in content and "examples" not in content:
            try:
                content["example"] = examples.of(content.get("schema", {}))
            except NoExample as error:
                _log.debug("%s has no example: %s", name, error)


PARTS = "#/components/schemas/"


class NoExample(Exception):
    """A part has no example; the text names the part."""


class Examples:
    """Builds examples for the schemas of a document.

    Args:
        schemas: the components of the document, by name.
    """

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas

    def of(self, schema: Mapping[str, Any], where: str = "body") -> Any:
        """Return an example of a schema.

        Raises:
            NoExample: a required part has none.
        """
        if "$ref" in schema:
            name = str(schema["$ref"]).removeprefix(PARTS)
            return self.of({**self._schemas[name], **{k: v for k, v in schema.items() if k != "$ref"}}, name)
        for found in ("example", "const", "default"):
            if found in schema:
                return copy.deepcopy(schema[found])
        for several in ("examples", "enum"):
            if schema.get(several):
                return copy.deepcopy(schema[several][0])
        for choices in ("anyOf", "oneOf", "allOf"):
            if choices in schema:
                return self.of(schema[choices][0], where)
        if schema.get("type") == "object" and "properties" in schema:
            return self._object(schema, where)
        if schema.get("type") == "array" and "items" in schema:
            return [self.of(schema["items"], f"{where}[]")]
        if schema.get("type") == "boolean":
            return True
        if schema.get("type") == "null":
            return None
        raise NoExample(where)

    def _object(self, schema: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the required properties, and the optional ones that have an example."""
        needed = schema.get("required", ())
        shown = {
            name: part
            for name, part in schema["properties"].items()
            if name in needed or {"example", "examples"} & part.keys()
        }
        return {name: self.of(part, f"{where}.{name}") for name, part in shown.items()}
