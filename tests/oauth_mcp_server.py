"""An MCP server that wants a token, with its authorization server, in the test's own process."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlencode

from aiohttp import web

from tests.scripted_mcp_server import served
from tests.task_mcp_server import TaskServer

CLIENT_ID = "client-1"
CLIENT_SECRET = "client-secret-1"


class OAuthServer:
    """Both servers, at one address.

    Attributes:
        mcp: the server behind the login.
        issuer: the authorization server that the metadata names.
        asked: how often each path, or grant of `/token`, was asked for.
        tokens: access tokens that are valid.
        expires_in: seconds that a new token is valid for, as told.
    """

    def __init__(self) -> None:
        self.mcp = TaskServer()
        self.url = self.base = self.issuer = ""
        self.asked: Counter[str] = Counter()
        self.tokens: list[str] = []
        self.refresh_tokens: list[str] = []
        self.challenge = ""
        self.expires_in = 3600

    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        self.asked[path] += 1
        if path == "/mcp":
            if request.headers.get("Authorization", "").removeprefix("Bearer ") in self.tokens:
                return await self.mcp.route(request)
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        if path.startswith("/.well-known/oauth-protected-resource"):
            return web.json_response({"resource": self.url, "authorization_servers": [self.issuer]})
        if path.startswith("/.well-known/oauth-authorization-server"):
            return web.json_response(self._describe())
        if path == "/register":
            known = await request.json()
            return web.json_response({**known, "client_id": CLIENT_ID}, status=201)
        if path == "/authorize":
            self.challenge = request.query["code_challenge"]
            back = urlencode({"code": "code-1", "state": request.query["state"]})
            return web.Response(status=302, headers={"Location": f"{request.query['redirect_uri']}?{back}"})
        if path == "/token":
            given = {name: values[0] for name, values in parse_qs(await request.text()).items()}
            return self._issue(given, request.headers.get("Authorization", ""))
        return web.Response(status=404)

    def _describe(self) -> dict[str, Any]:
        return {
            "issuer": self.base,
            "authorization_endpoint": f"{self.base}/authorize",
            "token_endpoint": f"{self.base}/token",
            "registration_endpoint": f"{self.base}/register",
            "response_types_supported": ["code"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["none", "client_secret_basic"],
        }

    def _issue(self, given: dict[str, str], authorization: str) -> web.Response:
        grant = given["grant_type"]
        self.asked[grant] += 1
        basic = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        digest = hashlib.sha256(given.get("code_verifier", "").encode()).digest()
        proof = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        is_valid = {
            "client_credentials": authorization == f"Basic {basic}",
            "authorization_code": given.get("code") == "code-1" and proof == self.challenge,
            "refresh_token": given.get("refresh_token") in self.refresh_tokens[-1:],
        }[grant]
        if not is_valid:
            return web.json_response({"error": "invalid_grant"}, status=400)
        number = len(self.tokens)
        self.tokens.append(f"access-token-{number}")
        issued: dict[str, Any] = {
            "access_token": self.tokens[-1],
            "token_type": "Bearer",
            "expires_in": self.expires_in,
        }
        if grant != "client_credentials":
            self.refresh_tokens.append(f"refresh-token-{number}")
            issued["refresh_token"] = self.refresh_tokens[-1]
        return web.json_response(issued)


@asynccontextmanager
async def oauth_server() -> AsyncIterator[OAuthServer]:
    server = OAuthServer()
    async with served(server.route) as url:
        server.url, server.base = url, url.removesuffix("/mcp")
        server.issuer = server.base
        yield server
