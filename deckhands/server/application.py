"""The ASGI application of a server: its routes, behind the guard."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, cast

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from deckhands.doors import chat, mcp_route
from deckhands.doors.agent_tools import AgentTools
from deckhands.reasons import routes as reasons
from deckhands.server import cluster, conversations, events, files, live, runs, schedules, steering
from deckhands.server.dependencies import Needs
from deckhands.server.gateway import Gateway
from deckhands.server.guard import PUBLIC, Guard
from deckhands.server.problems import MEDIA_TYPE, TYPE, add_problems
from deckhands.web import routes as web
from deckhands.webhooks import routes as webhooks

VERSION = "1"
ROUTERS = (
    cluster.routes,
    conversations.routes,
    steering.routes,
    reasons.routes,
    events.routes,
    live.routes,
    runs.routes,
    files.routes,
    schedules.routes,
    webhooks.routes,
    chat.routes,
    mcp_route.routes,
    web.routes,
)
DESCRIPTION = """Conversations with AI agents that work in a cluster of Deckhands.

Errors are problem details (RFC 9457) with a stable `code`. Requests that change something take an `Idempotency-Key`
where one is named. Streams resume behind any event."""
PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "retryable", "remedy"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "retryable": {"type": "boolean"},
        "remedy": {"type": "string"},
        "errors": {"type": "array", "items": {"type": "object"}},
    },
    "example": {
        "type": f"{TYPE}unknown_conversation",
        "title": "Unknown conversation",
        "status": 404,
        "detail": "No conversation with the id 'x' in this store.",
        "code": "unknown_conversation",
        "retryable": False,
        "remedy": "`deckhands ls` lists those there are.",
    },
}


def make_app(gateway: Gateway) -> FastAPI:
    """Return the application without its guard."""
    app = FastAPI(
        title="Deckhands",
        version=VERSION,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        generate_unique_id_function=_operation_id,
        lifespan=_running,
    )
    app.state.gateway = gateway
    app.state.agent_tools = AgentTools(gateway)
    for router in ROUTERS:
        app.include_router(router)
    add_problems(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@contextlib.asynccontextmanager
async def _running(app: FastAPI) -> AsyncGenerator[None]:
    """Answer MCP while the server runs."""
    async with app.state.agent_tools.manager.run():
        yield


def guarded(gateway: Gateway) -> ASGIApp:
    """Return the application as it is served."""
    app: ASGIApp = Guard(make_app(gateway), gateway)
    if gateway.options.origins:
        app = CORSMiddleware(
            app,
            allow_origins=gateway.options.origins,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "Idempotency-Key",
                "If-Match",
                "If-None-Match",
                "Last-Event-ID",
            ],
            expose_headers=["ETag", "Location", "Retry-After", "Idempotency-Replayed", "Deckhands-Left-Out"],
            max_age=600,
        )
    return app


def routes_of() -> list[APIRoute | APIWebSocketRoute]:
    """Return every route of the application, but for the document of its API."""
    found = [route for router in ROUTERS for route in router.routes]
    assert all(isinstance(route, APIRoute | APIWebSocketRoute) for route in found)
    return cast("list[APIRoute | APIWebSocketRoute]", found)


def scope_of(route: APIRoute | APIWebSocketRoute) -> Needs | None:
    """Return what a route needs; None: nothing, it is for everybody."""
    wanted = [route.dependant]
    while wanted:
        dependant = wanted.pop(0)
        if isinstance(dependant.call, Needs):
            return dependant.call
        wanted += dependant.dependencies
    return None


def _operation_id(route: APIRoute) -> str:
    """Name an operation after its router and its function, for generated clients."""
    return f"{route.tags[0] if route.tags else 'server'}_{route.name}".replace("-", "_")


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is not None:
        return app.openapi_schema
    found = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, openapi_version="3.1.0"
    )
    components = found.setdefault("components", {})
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "an API key, `dh_…`"}}
    components["schemas"]["Problem"] = PROBLEM
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    found["security"] = [{"key": []}]
    needed = {_operation_id(route): scope_of(route) for route in routes_of() if isinstance(route, APIRoute)}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            answers["default"] = {
                "description": "problem details",
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            }
            needs = needed.get(operation["operationId"])
            if path in PUBLIC:
                operation["security"] = []
            elif needs is not None:
                operation["x-scope"] = str(needs.scope)
    app.openapi_schema = found
    return found
