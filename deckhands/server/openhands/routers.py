"""The routes of the API of OpenHands' agent server, in the order in which they are tried."""

from __future__ import annotations

from fastapi import APIRouter

from deckhands.server.openhands import conversations, events, server_routes, sockets, workspace

ROUTERS: tuple[APIRouter, ...] = (
    events.routes,
    workspace.routes,
    workspace.own_routes,
    conversations.routes,
    sockets.routes,
    server_routes.routes,
    server_routes.rest,
)
