"""`deckhands mcp`: log in at MCP servers, for the tool workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import click

from broker.runtime import BrokerSettings, UsageError
from broker.secrets import load_secret_key
from broker.tools import ANSWER_SECONDS, McpServerSpec, McpTokens, log_in, read_servers
from deckhands.cli.authorship import author_options, recording
from deckhands.cli.command_group import with_options
from deckhands.client import Client, note, on_cluster, print_text
from deckhands.settings import CliSettings

if TYPE_CHECKING:
    from mcp.shared.auth import AuthorizationCodeResult

SECTION = "Operate a cluster"
SUMMARIES = {"mcp": "Log in at MCP servers that ask for it, or forget a login."}
MAX_REQUEST_BYTES = 8_192
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nYou may close this page.\n"


@dataclass(frozen=True, slots=True)
class LoginOptions:
    """Options of `mcp login`.

    Attributes:
        port: of the address to which the browser returns; 0 for any.
    """

    server: str
    file: str
    port: int


@dataclass(frozen=True, slots=True)
class LogoutOptions:
    """The argument of `mcp logout`."""

    server: str


@click.group()
def mcp() -> None:
    """Log in at MCP servers that ask for it, or forget a login."""


@mcp.command()
@click.argument("server")
@click.option(
    "--file",
    envvar="DECKHANDS_MCP",
    required=True,
    metavar="PATH",
    help="The file that names the servers; by default that of DECKHANDS_MCP.",
)
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="Port that the browser returns to; 0: any.")
@author_options
@with_options(LoginOptions)
def login(options: LoginOptions) -> None:
    """Log in at SERVER by OAuth, in a browser on this machine. Tool workers use the login within a minute."""
    servers = read_servers(Path(options.file).expanduser(), CliSettings.from_env().environment)
    server = next((found for found in servers if found.name == options.server), None)
    if server is None:
        names = ", ".join(found.name for found in servers) or "none"
        raise UsageError(f"{options.file} names no server {options.server!r}.", remedy=f"It names: {names}.")
    on_cluster(recording(lambda client: _login(client, server, options.port), "mcp.login", server.name))
    note(f"Tool workers are logged in at {server.name}.")


@mcp.command()
@click.argument("server")
@author_options
@with_options(LogoutOptions)
def logout(options: LogoutOptions) -> None:
    """Forget the login at SERVER. Workers that are connected use their token until it expires."""

    async def forget(client: Client) -> None:
        if not await _open_tokens(client).remove(options.server):
            raise UsageError(f"There is no login at {options.server!r}.")

    on_cluster(recording(forget, "mcp.logout", options.server))
    note(f"The login at {options.server} is forgotten.")


def _open_tokens(client: Client) -> McpTokens:
    settings = BrokerSettings.from_env(CliSettings.from_env().environment)
    return McpTokens(client.store, lambda: load_secret_key(settings, is_made=False))


async def _login(client: Client, server: McpServerSpec, port: int) -> None:
    """Log in at a server. Raises the errors of `log_in`."""

    async def show(address: str) -> None:
        note("Open this address in a browser on this machine:")
        print_text(address, err=True)

    async with _listen(port) as (redirect_uri, answer):

        async def read_answer() -> AuthorizationCodeResult:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer

        await log_in(server, _open_tokens(client), redirect_uri=redirect_uri, ask=show, read_answer=read_answer)


@asynccontextmanager
async def _listen(port: int) -> AsyncIterator[tuple[str, asyncio.Future[AuthorizationCodeResult]]]:
    """Yield an address on this machine, and a future for the answer that the browser brings to it."""
    from mcp.shared.auth import AuthorizationCodeResult

    answer: asyncio.Future[AuthorizationCodeResult] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            target = urlsplit(line.decode("latin-1").split(" ")[1])
            given = {name: values[0] for name, values in parse_qs(target.query).items()}
            if target.path == "/callback" and not answer.done():
                if "code" in given:
                    answer.set_result(AuthorizationCodeResult.model_validate(given))
                elif "error" in given:
                    answer.set_exception(
                        UsageError(f"The authorization server answered: {ascii(given['error'])[:200]}")
                    )
            writer.write(PAGE)
            await writer.drain()
        except (IndexError, ValueError, OSError):
            pass  # not a browser's request
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, limit=MAX_REQUEST_BYTES)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/callback", answer
