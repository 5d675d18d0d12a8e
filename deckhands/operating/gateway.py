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

from broker.runtime.errors import UsageError
from broker.runtime.logs import begin_logging
from broker.runtime.settings import logs_json
from broker.store.store import open_store
from deckhands.cli.output import note
from deckhands.cli.verbs import options_as
from deckhands.client.running_cluster import open_cluster
from deckhands.settings import FaceSettings
from deckhands.web.open import page_of, show_page

if TYPE_CHECKING:
    from deckhands.server.gateway import ServerOptions

SECTION = "Operate a cluster"
VERBS = {"serve": "Serve the cluster over HTTP: a web page, REST, server-sent events, WebSocket."}
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


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; beyond this machine with keys only."
)
@click.option("--port", type=click.IntRange(0, 65_535), default=8900, show_default=True, help="0: any that is free.")
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
@options_as(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve the cluster at DECKHANDS_URL, or the one that runs here, over HTTP.

    While there are no API keys, programs on this machine may do everything, and others cannot reach the server. From
    the first `deckhands key add` on, every request needs a key.
    """
    require_server()
    from deckhands.server.gateway import ServerOptions

    chosen = ServerOptions(
        host=options.host,
        port=options.port,
        certificate=options.certificate,
        certificate_key=options.certificate_key,
        proxies=options.proxies,
        origins=options.origins,
        needs_match=options.needs_match,
    )
    asyncio.run(_serve(FaceSettings.from_env(), chosen))


def require_server() -> None:
    """Make sure that the server's packages are installed.

    Raises:
        UsageError: one is not.
    """
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"The server needs a package that is not installed: {missing[0]}.",
            remedy="Install it with `pip install 'deckhands[server]'`.",
        )


@contextlib.asynccontextmanager
async def page_of_cluster(url: str, archive: str, *, port: int) -> AsyncGenerator[None]:
    """Serve a cluster of this machine on the loopback, and open its page, as long as the block lasts."""
    from deckhands.server.gateway import Gateway, ServerOptions
    from deckhands.server.serving import serving

    begin_logging("server", is_json=logs_json())
    store = await open_store(url, patience_seconds=PATIENCE_SECONDS, deploys=False)
    gateway = Gateway(store, archive, ServerOptions(port=port))
    try:
        async with serving(gateway) as chosen:
            show_page(page_of(f"http://127.0.0.1:{chosen}"))
            yield
    finally:
        await gateway.aclose()


async def _serve(settings: FaceSettings, options: ServerOptions) -> None:
    from deckhands.server.gateway import Gateway
    from deckhands.server.serving import serve as serve_gateway

    begin_logging("server", is_json=logs_json())
    tell = _log.info if logs_json() else note
    store = await open_cluster(settings=settings, patience_seconds=PATIENCE_SECONDS)
    gateway = Gateway(store, settings.archive, options)
    has_keys = await gateway.keys.any()

    def on_ready(port: int) -> None:
        scheme = "http" if options.certificate is None else "https"
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"{scheme}://{host}:{port}"
        tell(f"Serving at {address}, where its page is. Its API: {address}/openapi.json. Ctrl-C stops it.")
        if not has_keys:
            tell("There are no API keys: every program of this machine may do everything.")
        elif options.certificate is None and not options.is_loopback and not options.proxies:
            tell("Keys travel unencrypted: pass --certificate, or name the proxy that encrypts by --proxy.")

    try:
        await serve_gateway(gateway, on_ready=on_ready)
    finally:
        await gateway.aclose()
