"""The ASGI application of a server: its routes, behind the guard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import cast

from fastapi import APIRouter, FastAPI
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
    keys,
    live,
    mcp_logins,
    prompts,
    reasons,
    rollouts,
    runs,
    schedules,
    search,
    steering,
    terminals,
    trajectories,
    verification,
    webhooks,
)
from deckhands.server.dependencies import Needs
from deckhands.server.gateway import Gateway
from deckhands.server.guard import Guard
from deckhands.server.openapi.document import document_of, operation_id
from deckhands.server.problems import add_problems
from deckhands.server.protocols import a2a, ag_ui, chat, mcp_route, responses
from deckhands.server.protocols.agent_tools import AgentTools
from deckhands.server.web import pages
from deckhands.server.web.overviews import Overviews

VERSION = "1"
ROUTERS: tuple[APIRouter, ...] = (
    cluster.routes,
    conversations.routes,
    search.routes,
    steering.routes,
    terminals.routes,
    reasons.routes,
    prompts.routes,
    trajectories.routes,
    verification.routes,
    events.routes,
    live.routes,
    runs.routes,
    files.routes,
    files.uploads,
    schedules.routes,
    keys.routes,
    encryption.routes,
    mcp_logins.routes,
    mcp_logins.returning,
    evaluations.routes,
    rollouts.routes,
    webhooks.routes,
    chat.routes,
    responses.routes,
    mcp_route.routes,
    a2a.routes,
    ag_ui.routes,
    pages.routes,
)
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
    app.state.mcp_logins = mcp_logins.McpLogins(gateway)
    app.state.overviews = Overviews(SYSTEM_CLOCK)
    has_openhands = gateway.options.openhands
    if has_openhands:
        from deckhands.server.openhands.parts import OpenHandsParts

        app.state.openhands = OpenHandsParts()
    for router in list_routers(has_openhands=has_openhands):
        app.include_router(router)
    add_problems(app, [*routes_of(has_openhands=has_openhands), *app.routes])
    app.openapi = lambda: document_of(app, needs_by_operation(has_openhands=has_openhands))  # type: ignore[method-assign]
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Run the MCP session manager and keep the history of the cluster while the server runs."""
    async with app.state.agent_tools.manager.run():
        keeping = asyncio.create_task(app.state.gateway.history.keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, app.state.mcp_logins.stop(), return_exceptions=True)


def with_guard(gateway: Gateway) -> ASGIApp:
    """Return the application wrapped in its guard, ready to be served."""
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


def list_routers(*, has_openhands: bool) -> tuple[APIRouter, ...]:
    """Return the routers of a server, including those of OpenHands' API if it is enabled."""
    if not has_openhands:
        return ROUTERS
    from deckhands.server.openhands import routers  # they need the optional package `interop`

    return ROUTERS + routers.ROUTERS


def routes_of(*, has_openhands: bool = True) -> list[APIRoute | APIWebSocketRoute]:
    """Return every route of the application except the one of its API document."""
    found = [route for router in list_routers(has_openhands=has_openhands) for route in router.routes]
    assert all(isinstance(route, APIRoute | APIWebSocketRoute) for route in found)
    return cast("list[APIRoute | APIWebSocketRoute]", found)


def needs_by_operation(*, has_openhands: bool = True) -> dict[str, Needs | None]:
    """Return the scope that each operation of the document needs."""
    routes = routes_of(has_openhands=has_openhands)
    return {operation_id(route): scope_of(route) for route in routes if isinstance(route, APIRoute)}


def scope_of(route: APIRoute | APIWebSocketRoute) -> Needs | None:
    """Return the scope that a route needs; None if it is public."""
    wanted = [route.dependant]
    while wanted:
        dependant = wanted.pop(0)
        if isinstance(dependant.call, Needs):
            return dependant.call
        wanted += dependant.dependencies
    return None
