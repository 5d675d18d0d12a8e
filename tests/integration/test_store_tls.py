"""A store behind TLS: what its URL names is used, and what of it cannot be used is named."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.celery.app import make_connection_settings
from broker.runtime.errors import StoreMisconfigured, StoreUnavailable, UsageError
from broker.store.connection import MultiplexedConnection
from tests.certificates import certificate_in
from tests.stores import redis_program, running


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate that has signed itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate_in(folder)
    return folder


@pytest.fixture(scope="module")
def url(files: Path) -> Iterator[str]:
    """A server that wants a certificate of its clients, as Redis does by default."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    certificate, key = files / "cert.pem", files / "key.pem"
    options = ["--tls-port", str(port), "--tls-ca-cert-file", certificate, "--tls-cert-file", certificate]
    for _ in running(redis_program(), *map(str, options), "--tls-key-file", str(key)):
        yield f"rediss://127.0.0.1:{port}/0"


async def answer(url: str) -> object:
    connection = MultiplexedConnection(url)
    try:
        return await connection.call("PING")
    finally:
        await connection.aclose()


async def test_a_client_shows_the_certificate_that_the_url_names(url: str, files: Path) -> None:
    trusted = f"{url}?ssl_ca_certs={files}/cert.pem"
    shown = f"{trusted}&ssl_certfile={files}/cert.pem&ssl_keyfile={files}/key.pem"
    assert await answer(shown) == b"PONG"
    host = shown.replace("127.0.0.1", "localhost")
    with pytest.raises(StoreUnavailable, match="ostname mismatch"):
        await answer(host)
    assert await answer(f"{host}&ssl_check_hostname=false") == b"PONG"
    with pytest.raises(StoreUnavailable):
        await answer(trusted)


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
@pytest.mark.parametrize("name", ["nowhere.pem", "key.pem"])
def test_a_certificate_that_cannot_be_used_is_named(files: Path, option: str, name: str) -> None:
    with pytest.raises(StoreMisconfigured, match=f"{option}={files}/{name}"):
        MultiplexedConnection(f"rediss://h/0?{option}={files}/{name}")


@pytest.mark.parametrize("option", ["ssl_cert_reqs=maybe", "ssl_ca_certs=/nowhere.pem", "ssl_certfile=/nowhere.pem"])
def test_store_and_broker_refuse_the_same_tls_options(option: str) -> None:
    with pytest.raises(StoreMisconfigured, match=f"{option} cannot be used"):
        MultiplexedConnection(f"rediss://h/0?{option}")
    with pytest.raises(UsageError, match=f"{option} cannot be used"):
        make_connection_settings(f"rediss://h/0?{option}")


async def test_no_error_shows_the_password_of_a_key(url: str) -> None:
    with pytest.raises(StoreUnavailable) as refused:
        await answer(f"{url}?ssl_password=secret")
    assert "secret" not in str(refused.value)


async def test_the_store_takes_celerys_name_of_no_verification(url: str, files: Path) -> None:
    shown = f"ssl_certfile={files}/cert.pem&ssl_keyfile={files}/key.pem"
    for check in ("none", "CERT_NONE"):
        assert await answer(f"{url}?{shown}&ssl_cert_reqs={check}") == b"PONG"
