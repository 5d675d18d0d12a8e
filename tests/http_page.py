"""docs/http.md, made of the server's OpenAPI document. `make docs` writes it, and a test compares it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from deckhands.server.application import document_of, list_routers, needs_by_operation, operation_id
from tests.class_reference import table

HEAD = ("request", "needs", "does", "query")
INTRODUCTION = """# HTTP requests

Every request of `deckhands serve`, in the order of the server's OpenAPI document (`/openapi.json`), which has the bodies and answers as well. `make docs` writes this page from it, and a test compares the two. [Serving](serving.md) explains keys, streams, errors and other protocols.

*Needs* is the scope of the key; `admin` is of a key for all tenants.

"""


def http_page() -> str:
    app = FastAPI(title="Deckhands", generate_unique_id_function=operation_id)
    for router in list_routers(has_openhands=False):
        app.include_router(router)
    paths: dict[str, Any] = document_of(app, needs_by_operation(has_openhands=False))["paths"]
    rows = [
        (f"`{method.upper()} {path}`", _needs(operation), _does(operation), _query(operation))
        for path, operations in paths.items()
        for method, operation in operations.items()
    ]
    return INTRODUCTION + table(HEAD, rows) + "\n"


def _needs(operation: dict[str, Any]) -> str:
    return f"`{operation['x-scope']}`" if "x-scope" in operation else "no key"


def _does(operation: dict[str, Any]) -> str:
    return " ".join(operation.get("description", operation.get("summary", "")).partition("\n\n")[0].split())


def _query(operation: dict[str, Any]) -> str:
    return ", ".join(f"`{one['name']}`" for one in operation.get("parameters", ()) if one["in"] == "query")
