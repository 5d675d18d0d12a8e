"""The ASGI application of a server: its routes, behind the guard."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import cast

from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from broker.runtime import SYSTEM_CLOCK
from deckhands.server import (
    cluster,
    conversations,
    encryption,
    evaluations,
    events,
    files,
    live,
    reasons,
    runs,
    schedules,
    steering,
    verification,
    webhooks,
)
from deckhands.server.dependencies import Needs
from deckhands.server.gateway import Gateway
from deckhands.server.guard import Guard
from deckhands.server.openapi.document import document_of, operation_id
from deckhands.server.openhands import conversations as openhands_conversations
from deckhands.server.openhands import events as openhands_events
from deckhands.server.openhands import server_routes as openhands_server
from deckhands.server.openhands import sockets as openhands_sockets
from deckhands.server.openhands import workspace as openhands_workspace
from deckhands.server.openhands.parts import OpenHandsParts
from deckhands.server.problems import add_problems
from deckhands.server.protocols import a2a, chat, mcp_route, responses
from deckhands.server.protocols.agent_tools import AgentTools
from deckhands.server.web import pages
from deckhands.server.web.overviews import Overviews

VERSION = "1"
ROUTERS = (
    cluster.routes,
    conversations.routes,
    steering.routes,
    reasons.routes,
    verification.routes,
    events.routes,
    live.routes,
    runs.routes,
    files.routes,
    files.uploads,
    schedules.routes,
    encryption.routes,
    evaluations.routes,
    webhooks.routes,
    chat.routes,
    responses.routes,
    mcp_route.routes,
    a2a.routes,
    pages.routes,
)
OPENHANDS_ROUTERS = (
    openhands_events.routes,
    openhands_workspace.routes,
    openhands_workspace.own_routes,
    openhands_conversations.routes,
    openhands_sockets.routes,
    openhands_server.routes,
    openhands_server.rest,
)
"""The API of OpenHands' agent server, for servers that speak it."""
DESCRIPTION = """Conversations with AI agents that work in a cluster of Deckhands.

Errors are problem details (RFC 9457) with a stable `code`. Requests that change something take an `Idempotency-Key`
where one is named. Streams resume after any event."""


def make_app(gateway: Gateway) -> FastAPI:
    """Return the application without its guard."""
    app = FastAPI(
        title="Deckhands",
        version=VERSION,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        generate_unique_id_function=operation_id,
        lifespan=_lifespan,
    )
    app.state.gateway = gateway
    app.state.agent_tools = AgentTools(gateway)
    app.state.overviews = Overviews(SYSTEM_CLOCK)
    app.state.openhands = OpenHandsParts()
    for router in (*ROUTERS, *(OPENHANDS_ROUTERS if gateway.options.openhands else ())):
        app.include_router(router)
    add_problems(app, [*routes_of(), *app.routes])
    app.openapi = lambda: document_of(app, needs_by_operation())  # type: ignore[method-assign]
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Run the MCP session manager while the server runs."""
    async with app.state.agent_tools.manager.run():
        yield


def with_guard(gateway: Gateway) -> ASGIApp:
    """Return the application behind its guard, as it is served."""
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
    """Return every route of the application except the one of its API document."""
    found = [route for router in (*ROUTERS, *OPENHANDS_ROUTERS) for route in router.routes]
    assert all(isinstance(route, APIRoute | APIWebSocketRoute) for route in found)
    return cast("list[APIRoute | APIWebSocketRoute]", found)


def needs_by_operation() -> dict[str, Needs | None]:
    """Return what each operation of the document needs."""
    return {operation_id(route): scope_of(route) for route in routes_of() if isinstance(route, APIRoute)}


def scope_of(route: APIRoute | APIWebSocketRoute) -> Needs | None:
    """Return the scope that a route needs; None if it is public."""
    wanted = [route.dependant]
    while wanted:
        dependant = wanted.pop(0)
        if isinstance(dependant.call, Needs):
            return dependant.call
        wanted += dependant.dependencies
    return None
