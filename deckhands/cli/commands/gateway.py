"""`deckhands serve`: the cluster over HTTP, for programs that cannot reach its store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from broker.runtime import StoreMisconfigured, UsageError, logs_json, start_logging
from broker.store import open_store
from broker.tools import McpServerSpec, read_servers
from deckhands.cli.command_group import with_options
from deckhands.cli.commands.open import entry_of, issue_entry, page_of, show_page
from deckhands.client import note, open_cluster
from deckhands.cluster import Home
from deckhands.server import load_api_key
from deckhands.settings import CliSettings

if TYPE_CHECKING:
    from deckhands.server import Gateway, ServerOptions

SECTION = "Operate a cluster"
SUMMARIES = {"serve": "Serve the cluster over HTTP: a web page, REST, server-sent events, WebSocket."}
LIBRARIES = ("fastapi", "prometheus_client", "uvicorn", "websockets")
PATIENCE_SECONDS = 5.0
"""How long a request waits for a store that does not answer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `serve`."""

    host: str
    port: int
    certificate: Path | None
    certificate_key: Path | None
    proxies: tuple[str, ...]
    origins: tuple[str, ...]
    needs_match: bool
    openhands: bool
    terminals: bool
    max_streams: int
    max_transfers: int
    max_connections: int
    tenant_percent: int


@click.command()
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Addresses that other machines reach need API keys.",
)
@click.option("--port", type=click.IntRange(0, 65_535), default=8900, show_default=True, help="0: any free port.")
@click.option(
    "--certificate", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A TLS certificate (PEM)."
)
@click.option(
    "--certificate-key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Its private key (PEM)."
)
@click.option(
    "--proxy", "proxies", multiple=True, metavar="ADDRESS", help="Trust the X-Forwarded headers of this address."
)
@click.option("--origin", "origins", multiple=True, metavar="URL", help="Pages of this origin may call the server.")
@click.option("--require-if-match", "needs_match", is_flag=True, help="Refuse changes without If-Match.")
@click.option("--openhands", is_flag=True, help="Also speak the API of OpenHands' agent server, below /api.")
@click.option(
    "--terminals", is_flag=True, help="Let operators open terminals in workspaces; what they type is recorded."
)
@click.option(
    "--max-streams",
    type=click.IntRange(1, 100_000),
    default=5_000,
    show_default=True,
    help="Maximum number of open streams and waiting requests.",
)
@click.option(
    "--max-transfers",
    type=click.IntRange(1, 10_000),
    default=64,
    show_default=True,
    help="Maximum number of files in transfer.",
)
@click.option(
    "--max-connections", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, help="Open connections."
)
@click.option(
    "--tenant-percent",
    type=click.IntRange(1, 100),
    default=50,
    show_default=True,
    help="The percentage of streams, transfers and connections that one tenant may use.",
)
@with_options(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve the cluster at DECKHANDS_URL, or the one that runs here, over HTTP.

    Every request needs an API key, because agents may reach this machine too. `deckhands key add` creates keys. If
    there are none yet, the server creates one for this machine and writes it to the file server.key in DECKHANDS_HOME.
    """
    require_server()
    from deckhands.server import ServerOptions

    chosen = ServerOptions(
        host=options.host,
        port=options.port,
        certificate=options.certificate,
        certificate_key=options.certificate_key,
        proxies=options.proxies,
        origins=options.origins,
        needs_match=options.needs_match,
        openhands=options.openhands,
        terminals=options.terminals,
        max_streams=options.max_streams,
        max_transfers=options.max_transfers,
        max_connections=options.max_connections,
        tenant_percent=options.tenant_percent,
        mcp_servers=_read_mcp_servers(),
    )
    asyncio.run(_serve(CliSettings.from_env(), chosen))


def _read_mcp_servers() -> tuple[McpServerSpec, ...]:
    """Return the MCP servers at which users of the page may log in."""
    environment = CliSettings.from_env().environment
    path = environment.get("DECKHANDS_MCP", "")
    return tuple(read_servers(Path(path).expanduser(), environment)) if path else ()


def require_server() -> None:
    """Check that the server's packages are installed.

    Raises:
        UsageError: one is missing.
    """
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"The server needs a package that is not installed: {missing[0]}.",
            remedy="Install it with `pip install 'deckhands[server]'`.",
        )


@contextlib.asynccontextmanager
async def page_of_cluster(url: str, archive: str, *, port: int, key_file: Path) -> AsyncGenerator[None]:
    """Serve a cluster of this machine on the loopback interface, and open its page, while the block runs.

    The page is opened by a one-time link, so no process argument and no log contains the key.
    """
    from deckhands.server import Gateway, ServerOptions, serve_in_loop

    start_logging("server", is_json=logs_json())
    store = await open_store(url, patience_seconds=PATIENCE_SECONDS, deploys=False)
    gateway = Gateway(store, archive, ServerOptions(port=port, openhands=True, mcp_servers=_read_mcp_servers()))
    try:
        async with serve_in_loop(gateway) as chosen:
            key_note = await _key_note(gateway, key_file)
            show_page(entry_of(page_of(f"http://127.0.0.1:{chosen}"), await issue_entry(store)))
            note(f"The link works once, within two minutes; `deckhands open --link` makes another. {key_note}")
            yield
    finally:
        await gateway.aclose()


async def _serve(settings: CliSettings, options: ServerOptions) -> None:
    from deckhands.server import Gateway
    from deckhands.server import serve as serve_gateway

    start_logging("server", is_json=logs_json())
    tell = _log.info if logs_json() else note
    store = await open_cluster(settings=settings, patience_seconds=PATIENCE_SECONDS)
    gateway = Gateway(store, settings.archive, options)
    key_note = await _key_note(gateway, Home(settings.home).server_key)

    def on_ready(port: int) -> None:
        scheme = "http" if options.certificate is None else "https"
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"{scheme}://{host}:{port}"
        tell(f"Serving at {address}, where its page is. Its API: {address}/openapi.json. Ctrl-C stops it.")
        tell(key_note)
        if options.certificate is None and not options.is_loopback and not options.proxies:
            tell("Keys travel unencrypted: pass --certificate, or name the proxy that encrypts by --proxy.")

    try:
        await serve_gateway(gateway, on_ready=on_ready)
    finally:
        await gateway.aclose()


async def _key_note(gateway: Gateway, key_file: Path) -> str:
    """Create the key of this machine if there is no key yet, and return the note to print about keys."""
    try:
        if gateway.options.is_loopback and (
            not await gateway.keys.has_any() or await asyncio.to_thread(key_file.exists)
        ):
            if not await load_api_key(gateway.keys, key_file):
                return f"The key in {key_file} was revoked; `deckhands key add` makes another one."
            return f"Requests need an API key; the key of this machine is in {key_file}."
    except StoreMisconfigured as error:  # the store user may not create keys
        _log.warning("cannot create a key for this machine: %s", error)
    return "Requests need an API key; `deckhands key add` makes one, and `deckhands open --link` opens the page."
