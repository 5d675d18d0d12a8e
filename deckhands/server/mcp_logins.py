"""Logins at MCP servers over HTTP, for keys of operators: the page logs in as `deckhands mcp login` does.

Holds: the server waits for the answer of the browser, which may arrive at any server of the cluster. Only an answer
with the random state of a login that waits is stored, once. An operation is recorded before it is performed.
Does not: survive the end of its process: a login that waits then has to be started again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, Field
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse

from broker.runtime import BrokerSettings, DeckhandsError, UsageError
from broker.secrets import load_secret_key
from broker.tools import McpServerSpec, McpTokens, log_in
from deckhands.server.dependencies import MAX_REASON, AdminOfAll, GatewayOf, ReasonQuery
from deckhands.server.gateway import Gateway
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.problems import Problem

if TYPE_CHECKING:
    from mcp.shared.auth import AuthorizationCodeResult

CALLBACK = "/mcp-callback"
"""The path to which a browser returns. It needs no key: its state is the secret."""
START_SECONDS = 30.0
"""How long the server and its authorization server may take before there is an address for the user."""
MAX_FIELD = 4_000

routes = APIRouter(prefix="/mcp-logins", tags=["mcp-logins"])
returning = APIRouter(tags=["mcp-logins"])
ServerName = Annotated[str, Path(pattern=r"^[A-Za-z0-9_.-]{1,100}$", examples=["issues"])]
_log = logging.getLogger(__name__)


class McpLogins:
    """The logins that wait for a user at one server."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._running: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}

    def open_tokens(self) -> McpTokens:
        """Return the tokens in the store."""
        settings = BrokerSettings.from_env()
        return McpTokens(self._gateway.store, lambda: load_secret_key(settings, is_made=False))

    def find_server(self, name: str) -> McpServerSpec:
        """Return a server of the operator's file.

        Raises:
            Problem: it names no such server with a login.
        """
        for server in self.servers:
            if server.name == name:
                return server
        raise Problem(
            404,
            "unknown_mcp_server",
            f"There is no MCP server {name!r} with a login.",
            remedy="Name it, with `oauth`, in the file of DECKHANDS_MCP of this server.",
        )

    @property
    def servers(self) -> list[McpServerSpec]:
        """The servers that need the login of a user."""
        return [one for one in self._gateway.options.mcp_servers if one.oauth is not None and one.oauth.needs_person]

    def problem_of(self, name: str) -> str:
        """Return why the last login at a server has failed; empty if it has not."""
        return self._problems.get(name, "")

    async def start(self, server: McpServerSpec, redirect_uri: str) -> str:
        """Start a login, instead of an earlier one that still waits, and return the address for the user.

        Raises:
            UsageError: the server refuses.
            Problem: it does not answer.
        """
        if earlier := self._running.pop(server.name, None):
            earlier.cancel()
        shown: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(self._log_in(server, redirect_uri, shown))
        self._running[server.name] = running
        first: list[asyncio.Future[Any]] = [running, shown]
        await asyncio.wait(first, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if shown.done():
            return shown.result()
        if running.done():
            raise UsageError(self._problems.get(server.name) or f"The login at {server.name} was started again.")
        running.cancel()
        raise Problem(504, "login_failed", f"The MCP server {server.name} does not answer.", remedy="Try again later.")

    async def stop(self) -> None:
        """Stop waiting for users."""
        for running in self._running.values():
            running.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _log_in(self, server: McpServerSpec, redirect_uri: str, shown: asyncio.Future[str]) -> None:
        tokens, state = self.open_tokens(), ""

        async def show(address: str) -> None:
            nonlocal state
            state = parse_qs(urlsplit(address).query).get("state", [""])[0]
            await tokens.expect_answer(state)
            shown.set_result(address)

        async def read_answer() -> AuthorizationCodeResult:
            from mcp.shared.auth import AuthorizationCodeResult

            answer = await tokens.wait_for_answer(state)
            if "error" in answer:
                raise UsageError(f"The authorization server answered: {ascii(answer['error'])[:200]}")
            return AuthorizationCodeResult.model_validate(answer)

        self._problems.pop(server.name, None)
        try:
            await log_in(server, tokens, redirect_uri=redirect_uri, ask=show, read_answer=read_answer)
        except DeckhandsError as error:
            self._problems[server.name] = str(error)
            _log.warning("the login at the MCP server %s failed: %s", server.name, error)


async def logins_of(connection: HTTPConnection) -> McpLogins:
    """Return the logins that wait at this server."""
    found: McpLogins = connection.app.state.mcp_logins
    return found


LoginsOf = Annotated[McpLogins, Depends(logins_of)]


class ShownMcpLogin(BaseModel):
    """An MCP server that needs a login. `problem` is why the last login from this server has failed."""

    name: str = Field(examples=["issues"])
    url: str = Field(examples=["https://mcp.example.com/mcp"])
    is_logged_in: bool
    problem: str = Field(default="", examples=[""])


class NewMcpLogin(JsonBody):
    """A login to start."""

    return_to: str = Field(
        pattern=r"^https?://[^/\s?#@]{1,255}$",
        description="the origin of this server as the browser of the user reaches it",
        examples=["https://deckhands.example.com"],
    )
    reason: str = Field(min_length=1, max_length=MAX_REASON, examples=["the tracker is new"])


class StartedMcpLogin(BaseModel):
    """The address to open in the browser of the user, within ten minutes."""

    address: str = Field(examples=["https://auth.example.com/authorize?state=…"])


class ForgottenMcpLogin(BaseModel):
    """Whether there was a login."""

    is_forgotten: bool


@routes.get("", summary="List logins at MCP servers")
async def listing(_principal: AdminOfAll, logins: LoginsOf) -> list[ShownMcpLogin]:
    """List the MCP servers of this server's DECKHANDS_MCP that need the login of a user."""
    tokens = logins.open_tokens()
    return [
        ShownMcpLogin(
            name=one.name,
            url=one.url,
            is_logged_in=await tokens.load_sealed(one.name) is not None,
            problem=logins.problem_of(one.name),
        )
        for one in logins.servers
    ]


@returning.get(CALLBACK, response_class=PlainTextResponse, summary="Return from the authorization server")
async def callback(request: Request, logins: LoginsOf) -> PlainTextResponse:
    """Take the answer that the browser of a user brings: `code` or `error`, and the `state` of the login."""
    given = {name: value for name, value in request.query_params.items() if len(value) <= MAX_FIELD}
    answer: dict[str, str] = {name: given[name] for name in ("code", "state", "iss", "error") if name in given}
    if ("code" in answer) == ("error" in answer) or not await logins.open_tokens().store_answer(
        answer.get("state", ""), answer
    ):
        raise Problem(404, "no_login", "No login waits for this answer.", remedy="Start the login again.")
    return PlainTextResponse("You may close this page.\n")


@routes.post("/{name}", status_code=202, summary="Log in at an MCP server")
async def start(
    gateway: GatewayOf, principal: AdminOfAll, logins: LoginsOf, name: ServerName, asked: NewMcpLogin
) -> StartedMcpLogin:
    """Start a login by OAuth. Tool workers use it within a minute after the browser has returned."""
    server = logins.find_server(name)
    await gateway.record(principal, "mcp.login", name, asked.reason)
    return StartedMcpLogin(address=await logins.start(server, asked.return_to + CALLBACK))


@routes.delete("/{name}", summary="Forget a login at an MCP server")
async def forget(
    gateway: GatewayOf, principal: AdminOfAll, logins: LoginsOf, name: ServerName, reason: ReasonQuery
) -> ForgottenMcpLogin:
    """Forget a login. Workers that are connected use their token until it expires."""
    server = logins.find_server(name)
    await gateway.record(principal, "mcp.logout", name, reason)
    return ForgottenMcpLogin(is_forgotten=await logins.open_tokens().remove(server.name))
