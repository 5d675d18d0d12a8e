"""The proxy of a workspace as programs use it: bodies both ways, tunnels, and bounds."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

from broker.contract.allowed_hosts import parse_host_rules
from broker.runtime.addresses import AddressRules
from tool_worker.sandbox.egress.proxy import EgressProxy, EgressRules
from tool_worker.workspace.launch.egress_gate import start_proxy

HOST = "127.0.0.2"
LIMIT_SECONDS = 60.0
LARGE = 64 * 2**20


class Pages(http.server.BaseHTTPRequestHandler):
    """Echoes what is posted, and gives as many bytes as are asked for, chunked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201, "Made")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Of-The-Origin", "yes")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        left = int(self.path[1:])
        while left:
            piece = b"x" * min(65536, left)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            left -= len(piece)
        self.wfile.write(b"0\r\n\r\n")

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "77")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer((HOST, 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{HOST}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@asynccontextmanager
async def serving(host: str, refused: list[str] | None = None, **bounds: float) -> AsyncIterator[int]:
    rules = EgressRules(parse_host_rules([host]), AddressRules.parse([HOST]), **bounds)  # type: ignore[arg-type]
    proxy = EgressProxy(rules, lambda _, why: (refused if refused is not None else []).append(why))
    listener = socket.create_server(("127.0.0.1", 0))
    async with await proxy.serve(listener):
        yield listener.getsockname()[1]


def asked(port: int, method: str, url: str, **options: object) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_SECONDS)
    try:
        connection.request(method, url, **options)  # type: ignore[arg-type]
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


async def test_bodies_of_every_kind_go_both_ways() -> None:
    with site() as host:
        async with serving(host) as port:
            url = f"http://{host}"
            status, headers, body = await asyncio.to_thread(asked, port, "POST", f"{url}/", body=b"sent")
            assert (status, body, headers["x-of-the-origin"]) == (201, b"sent", "yes")
            pieces = {"body": iter([b"in ", b"pieces"]), "encode_chunked": True}
            chunked = {"Transfer-Encoding": "chunked"}
            status, _, body = await asyncio.to_thread(asked, port, "POST", f"{url}/", headers=chunked, **pieces)
            assert (status, body) == (201, b"in pieces")
            status, _, body = await asyncio.to_thread(asked, port, "GET", f"{url}/1000000")
            assert (status, len(body)) == (200, 1_000_000)
            status, headers, body = await asyncio.to_thread(asked, port, "HEAD", f"{url}/")
            assert (status, headers["content-length"], body) == (200, "77", b"")


async def test_old_client_gets_a_body_ended_by_the_connection() -> None:
    with site() as host:
        async with serving(host) as port, asyncio.timeout(LIMIT_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET http://{host}/3 HTTP/1.0\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert body == b"xxx"
            assert b"chunked" not in head
            writer.close()


async def test_tunnel_passes_early_data_and_closes_each_way_separately() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all of " + await reader.read())  # answers only when nothing more will come
        writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as server, asyncio.timeout(LIMIT_SECONDS):
        host = f"{HOST}:{server.sockets[0].getsockname()[1]}"
        async with serving(host) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\nearly ".encode())
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"and late")
            writer.write_eof()
            assert await reader.read() == b"all of early and late"
            writer.close()


async def test_bytes_and_connections_are_bounded() -> None:
    refused: list[str] = []
    with site() as host:
        async with serving(host, refused, limit_bytes=100_000) as port:
            url = f"http://{host}/1000"
            assert (await asyncio.to_thread(asked, port, "GET", url))[0] == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"CONNECT {host} HTTP/1.1\r\nHost: x\r\n\r\nGET /9000000 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert len(await reader.read()) < 1_000_000
            writer.close()
            status, _, body = await asyncio.to_thread(asked, port, "GET", url)
            assert (status, b"DECKHANDS_EGRESS_BYTES" in body) == (403, True)
            assert len(refused) == 2
        async with serving(host, refused, connections=1) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"CONNECT {host} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            assert (await asyncio.to_thread(asked, port, "GET", f"http://{host}/1"))[0] == 429
            writer.close()


async def test_silence_ends_a_connection() -> None:
    with socket.create_server((HOST, 0)) as silent:  # the kernel connects, and no program accepts
        host = f"{HOST}:{silent.getsockname()[1]}"
        async with serving(host, silence_seconds=0.1) as port, asyncio.timeout(LIMIT_SECONDS):
            for request in (
                f"CONNECT {host} HTTP/1.1\r\nHost: x\r\n\r\n",
                f"GET http://{host}/ HTTP/1.1\r\nHost: x\r\n\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request.encode())
                await reader.read()
                writer.close()


async def test_connections_that_say_nothing_keep_nobody_out() -> None:
    refused: list[str] = []
    with site() as host:
        async with serving(host, refused, waiting=20) as port, asyncio.timeout(LIMIT_SECONDS):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
            for _, writer in silent[::2]:
                writer.write(b"GET http://")  # and no more of it
            for _ in range(10):
                status, _, body = await asyncio.to_thread(asked, port, "GET", f"http://{host}/7")
                assert (status, body) == (200, b"xxxxxxx")
            # Those that waited longest were let go.
            assert await silent[0][0].read() == b""
            assert refused == []
            for _, writer in silent:
                writer.close()


async def test_silent_tunnels_make_room_for_used_ones() -> None:
    with site() as host:
        tunnel = f"CONNECT {host} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        async with serving(host, connections=2, idle_seconds=0.0) as port, asyncio.timeout(LIMIT_SECONDS):
            first, second = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, writer in (first, second):
                writer.write(tunnel)
                await reader.readuntil(b"\r\n\r\n")
            first[1].write(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n")
            await first[0].readuntil(b"\r\n\r\n")
            assert (await asyncio.to_thread(asked, port, "GET", f"http://{host}/1"))[0] == 200
            assert await second[0].read() == b""  # it was the one that was silent for longest
            first[1].write(b"GET /2 HTTP/1.1\r\nHost: x\r\n\r\n")
            await first[0].readuntil(b"2\r\nxx\r\n0\r\n\r\n")
            for _, writer in (first, second):
                writer.close()


async def test_large_download_costs_no_memory_and_proxy_ends_with_control(tmp_path: Path) -> None:
    with site() as host, socket.create_server(("127.0.0.1", 0)) as listener:
        ours, theirs = socket.socketpair()
        settings = {"allow": [host], "private": [HOST], "limit_bytes": 2**40}
        process = psutil.Process(
            start_proxy(theirs.fileno(), listener.fileno(), settings, log=tmp_path / "log", name="test")
        )
        theirs.close()
        port = listener.getsockname()[1]
        status, _, body = await asyncio.to_thread(asked, port, "GET", f"http://{host}/{LARGE}")
        assert (status, len(body)) == (200, LARGE)
        assert process.memory_info().rss < 48 * 2**20
        ours.close()
        await asyncio.to_thread(process.wait, LIMIT_SECONDS)
