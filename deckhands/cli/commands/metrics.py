"""`deckhands metrics`: the metrics of the cluster, for Prometheus."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import click

from broker.celery import make_connection_settings, redis_url
from broker.runtime import BrokerSettings, UsageError, make_celery_url
from broker.store import MultiplexedConnection, open_store
from deckhands.cli.command_group import with_options
from deckhands.client import note, print_text, store_url
from deckhands.cluster import Home
from deckhands.server import load_token
from deckhands.settings import CliSettings

SECTION = "Operate a cluster"
SUMMARIES = {"metrics": "Serve the cluster's metrics for Prometheus."}

DEFAULT_PORT = 9465
REPLY_LIMIT_SECONDS = 10.0
CELERY_LIMIT_SECONDS = 3.0
MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 4_096


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Options of `metrics`."""

    host: str
    port: int
    token_file: Path | None
    is_once: bool


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(1, 65_535), default=DEFAULT_PORT, show_default=True)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file with the token that Prometheus must send; by default DECKHANDS_HOME/metrics.token, which is created.",
)
@click.option("--once", "is_once", is_flag=True, help="Print the metrics, and exit.")
@with_options(MetricsOptions)
def metrics(options: MetricsOptions) -> None:
    """Serve the metrics of the cluster at http://HOST:PORT/metrics, for Prometheus.

    One such process serves for the whole cluster: it reads the store at DECKHANDS_URL, where all workers report their
    figures, and Celery's broker. It needs the packages of deckhands[metrics].
    """
    try:
        from deckhands.operations import make_server  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Metrics need packages that are not installed: {error}.", remedy="pip install 'deckhands[metrics]'"
        ) from error
    asyncio.run(_serve(options, CliSettings.from_env()))


async def _serve(options: MetricsOptions, settings: CliSettings) -> None:
    from deckhands.operations import PATH, Exposition, make_server, metrics_app

    token_file = options.token_file or Home(settings.home).metrics_token
    token = ""
    if not options.is_once:
        token = _token(token_file) if options.token_file is not None else load_token(token_file)
    url = store_url(settings)
    is_named = settings.url is not None
    celery_url = BrokerSettings.from_env(settings.environment).celery_url if is_named else make_celery_url(url)
    make_connection_settings(celery_url)  # a clear error if there is no broker
    celery = MultiplexedConnection(redis_url(celery_url), reply_timeout_seconds=CELERY_LIMIT_SECONDS)
    store = await open_store(url, patience_seconds=0.0, deploys=False)
    try:
        exposition = Exposition(store, celery)
        if options.is_once:
            print_text((await exposition.text()).decode().rstrip("\n"))
            return
        server = make_server(metrics_app(exposition, token=token), options.host, options.port)
        note(f"Metrics are at http://{options.host}:{options.port}{PATH}. The token is in {token_file}.")
        await server.serve()
    finally:
        await celery.aclose()
        await store.aclose()


def _token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        UsageError: it cannot be read, or holds no token.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", remedy="Name a text file with one token.") from error
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise UsageError(
            f"{path} holds no token.",
            remedy=f"Write {MIN_TOKEN_CHARS} or more letters and digits into it.",
        )
    return token
