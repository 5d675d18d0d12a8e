"""Where a library that makes its own requests may send them, through each of the clients that litellm uses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from controller_worker.providers.wires.egress import EgressGuard, install_guard

NAME = "rebound.example.com"
PUBLIC = "93.184.216.34"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
LIMITS = httpx.Timeout(30, connect=1)  # no test needs the connection to another machine

Get = Callable[[str], Awaitable[Any]]


async def get_by_httpcore(url: str) -> Any:
    async with httpx.AsyncClient(timeout=LIMITS) as client:
        return await client.get(url)


async def get_by_aiohttp(url: str) -> Any:
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

    client = AsyncHTTPHandler(timeout=LIMITS)
    try:
        return await client.get(url)
    finally:
        await client.close()


async def get_in_a_thread(url: str) -> Any:
    return await asyncio.to_thread(httpx.get, url, timeout=LIMITS)


CLIENTS: list[Get] = [get_by_httpcore, get_by_aiohttp, get_in_a_thread]


class Listener:
    """A server of this machine that counts what reaches it, and keeps the first line of each request."""

    def __init__(self) -> None:
        self.reached = 0
        self.asked: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reached += 1
        self.asked.append(await reader.readline())
        writer.write(ANSWER)
        await writer.drain()
        writer.close()


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    install_guard(httpx)
    made = Listener()
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as server:
        made.port = server.sockets[0].getsockname()[1]
        yield made


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that `NAME` has, one for each time that it is looked up; the last one stays."""
    addresses, real = [PUBLIC, "127.0.0.1"], socket.getaddrinfo

    def look_up(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host not in (NAME, NAME.encode()):
            return real(host, port, *arguments, **options)
        address = addresses.pop(0) if len(addresses) > 1 else addresses[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port or 0)))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return addresses


@pytest.mark.parametrize("get", CLIENTS)
async def test_a_name_is_looked_up_once(listener: Listener, resolver: list[str], get: Get) -> None:
    with EgressGuard(None).within(), pytest.raises(Exception):  # noqa: B017, PT011  (each client has its own)
        await get(f"http://{NAME}:{listener.port}/")
    assert (listener.reached, resolver) == (0, ["127.0.0.1"])


@pytest.mark.parametrize("get", CLIENTS)
async def test_a_name_of_this_machine_is_refused(listener: Listener, resolver: list[str], get: Get) -> None:
    del resolver[0]
    egress = EgressGuard(None)
    with egress.within(), pytest.raises(Exception):  # noqa: B017, PT011
        await get(f"http://{NAME}:{listener.port}/")
    assert (listener.reached, egress.refused) == (0, NAME)


@pytest.mark.parametrize("get", CLIENTS)
async def test_address_of_the_settings_has_a_port_and_a_scheme(listener: Listener, get: Get) -> None:
    address = f"http://127.0.0.1:{listener.port}"
    for base_url in (
        f"http://127.0.0.1:{listener.port - 1}/v1",
        "http://127.0.0.1/v1",
        address.replace("http", "https"),
    ):
        egress = EgressGuard(base_url)
        with egress.within(), pytest.raises(Exception):  # noqa: B017, PT011
            await get(f"{address}/x")
        assert (listener.reached, egress.refused) == (0, "127.0.0.1")
    with EgressGuard(f"{address}/v1").within():
        assert (await get(f"{address}/x")).status_code == 200
    assert listener.reached == 1


@pytest.mark.parametrize("get", CLIENTS)
async def test_a_proxy_of_the_environment_may_be_private(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, get: Get
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{listener.port}")
    with EgressGuard(None).within():
        assert (await get(f"http://{NAME}/")).status_code == 200
    # The variable is the process's: what other threads ask for at that time comes here too.
    assert [line for line in listener.asked if NAME.encode() in line] == [f"GET http://{NAME}/ HTTP/1.1\r\n".encode()]
