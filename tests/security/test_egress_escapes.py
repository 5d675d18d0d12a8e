"""Ways to a host that is not on a workspace's list, each tried from a real sandbox through its real proxy."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from broker.contract.allowed_hosts import parse_host_rules
from broker.contract.specs import WorkspaceSpec
from broker.runtime.addresses import AddressRules
from tests.integration.workspace_hosts import Terminal, opened
from tests.security import egress_client
from tool_worker.sandbox.egress.proxy import EgressProxy, EgressRules
from tool_worker.sandbox.sandbox import find_interpreter
from tool_worker.workspace.launch.egress_gate import EgressGate

ALLOWED, FORBIDDEN = "127.0.0.2", "127.0.0.1"
LIMIT_SECONDS = 60.0


@dataclass
class Origin:
    """A server that keeps every byte it gets, and answers each connection once."""

    port: int = 0
    received: list[bytes] = field(default_factory=list)
    answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(4096):
                self.received.append(chunk)
                if b"\r\n\r\n" in b"".join(self.received):
                    writer.write(self.answer)
                    writer.write_eof()
                    await reader.read()  # bytes beyond a request would be visible
                    break
        finally:
            writer.close()


@asynccontextmanager
async def origin(address: str, port: int = 0) -> AsyncIterator[Origin]:
    served = Origin()
    server = await asyncio.start_server(served.serve, address, port)
    async with server:
        served.port = server.sockets[0].getsockname()[1]
        yield served


def get(target: str, *headers: str, method: str = "GET", body: str = "") -> str:
    lines = [f"{method} {target} HTTP/1.1", *(headers or ("Host: x",)), "", body]
    return "\r\n".join(lines)


def to_forbidden(port: int) -> dict[str, str]:
    """Return requests for a server at the machine's loopback, in many notations."""
    hosts = {
        "plain": "127.0.0.1", "name": "localhost", "upper_case": "LOCALHOST", "dot": "localhost.", "dotted": "127.0.0.1.",
        "decimal": "2130706433", "hex": "0x7f000001", "octal": "0177.0.0.1", "short": "127.1", "hex_part": "0x7f.0.0.1",
        "octal_long": "017700000001", "zeros": "127.000.000.001", "zero": "0", "any": "0.0.0.0", "v6": "[::1]",
        "v6_any": "[::]", "mapped": "[::ffff:127.0.0.1]", "mapped_hex": "[::ffff:7f00:1]", "compatible": "[::127.0.0.1]",
        "nat64": "[64:ff9b::7f00:1]", "six_to_four": "[2002:7f00:1::]", "zone": "[::1%25lo]", "expanded": "[0:0:0:0:0:0:0:1]",
        "loopback_7": "127.0.0.7", "full_width": "\uff11\uff12\uff17.0.0.1", "ideographic_dot": "127\u30020\u30020\u30021", "circled": "\u246027.0.0.1",
        "nul": "127.0.0.1\0.allowed.test", "encoded": "127%2e0%2e0%2e1", "suffix": f"{ALLOWED}.127.0.0.1.nip.test",
        "tab": "127.0.0.1\t", "comma": f"127.0.0.1,{ALLOWED}", "ip6_localhost": "ip6-localhost",
        "metadata": "169.254.169.254", "metadata_name": "metadata.google.internal", "gateway": "172.17.0.1",
    }  # fmt: skip
    found = {}
    for name, host in hosts.items():
        found[f"{name}_get"] = get(f"http://{host}:{port}/", f"Host: {ALLOWED}")
        found[f"{name}_connect"] = get(f"{host}:{port}", f"Host: {ALLOWED}", method="CONNECT")
    return found


def through_allowed(port: int, forbidden: int, unlisted: int) -> dict[str, str]:
    """Return requests that mention what is allowed and mean something else."""
    allowed, secret = f"{ALLOWED}:{port}", f"{FORBIDDEN}:{forbidden}"
    return {
        "user_is_allowed": get(f"http://{allowed}@{secret}/"),
        "user_and_password": get(f"http://{ALLOWED}:{port}@{FORBIDDEN}:{forbidden}/"),
        "user_is_forbidden": get(f"http://{secret}@{allowed}/"),
        "user_in_connect": get(f"{allowed}@{secret}", method="CONNECT"),
        "backslash": get(f"http://{allowed}\\@{secret}/"),
        "backslash_host": get(f"http://{secret}\\.{allowed}/"),
        "hash_host": get(f"http://{secret}#@{allowed}/"),
        "query_host": get(f"http://{secret}?@{allowed}/"),
        "encoded_at": get(f"http://{allowed}%40{secret}/"),
        "three_slashes": get(f"http:///{secret}/"),
        "no_slashes": get(f"http:{secret}/"),
        "scheme_relative": get(f"//{secret}/"),
        "origin_form": get("/", f"Host: {secret}"),
        "star": get("*", f"Host: {secret}", method="OPTIONS"),
        "https": get(f"https://{secret}/"),
        "ftp": get(f"ftp://{secret}/"),
        "file": get("file:///etc/passwd"),
        "gopher": get(f"gopher://{secret}/_GET"),
        "connect_url": get(f"http://{secret}/", method="CONNECT"),
        "connect_no_port": get(FORBIDDEN, method="CONNECT"),
        "connect_port_zero": get(f"{ALLOWED}:0", method="CONNECT"),
        "connect_port_wraps": get(f"{ALLOWED}:{65536 + forbidden}", method="CONNECT"),
        "connect_port_sign": get(f"{ALLOWED}:+{port}", method="CONNECT"),
        "connect_two_ports": get(f"{ALLOWED}:{port}:{forbidden}", method="CONNECT"),
        "other_port_connect": get(f"{ALLOWED}:{unlisted}", method="CONNECT"),
        "other_port_get": get(f"http://{ALLOWED}:{unlisted}/"),
        "ssh_port": get(f"{ALLOWED}:22", method="CONNECT"),
        "no_host": get(f"http://:{port}/"),
        "empty": get("", method="CONNECT"),
        "two_hosts": get(f"http://{allowed}/", f"Host: {allowed}", f"Host: {secret}"),
        "both_lengths": get(
            f"http://{allowed}/", "Host: x", "Content-Length: 4", "Transfer-Encoding: chunked",
            method="POST", body="0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n",
        ),
        "two_lengths": get(
            f"http://{allowed}/", "Host: x", "Content-Length: 0", "Content-Length: 30",
            method="POST", body="GET /smuggled HTTP/1.1\r\n\r\n",
        ),
        "odd_encoding": get(f"http://{allowed}/", "Host: x", "Transfer-Encoding: \x0bchunked", method="POST"),
        "space_before_colon": get(f"http://{allowed}/", "Host : x", f"Host: {secret}"),
        "space_in_target": get(f"http://{allowed}/ /x"),
        "long_head": get(f"http://{allowed}/", "Host: x", "X: " + "a" * 70_000),
        "socks": "\x05\x01\x00",
        "tls": "\x16\x03\x01\x00\x05hello",
    }  # fmt: skip


def passed_on(port: int, forbidden: int) -> dict[str, str]:
    """Return requests that are forwarded, but perhaps not as their author meant."""
    allowed = f"{ALLOWED}:{port}"
    return {
        "plain": get(f"http://{allowed}/plain"),
        "upper_scheme": get(f"HTTP://{allowed}/upper"),
        "other_host": get(f"http://{allowed}/other", f"Host: {FORBIDDEN}:{forbidden}"),
        "two_in_one": get(f"http://{allowed}/first", body=get("/smuggled", f"Host: {FORBIDDEN}:{forbidden}")),
        "body_too_long": get(
            f"http://{allowed}/long", "Host: x", "Content-Length: 2", method="POST",
            body="ab" + get("/smuggled", f"Host: {FORBIDDEN}"),
        ),
        "named_hop": get(f"http://{allowed}/hop", "Host: x", "Connection: x-secret", "X-Secret: smuggled"),
        "upgrade": get(f"http://{allowed}/up", "Host: x", "Connection: upgrade", "Upgrade: smuggled"),
        "proxy_key": get(f"http://{allowed}/key", "Host: x", "Proxy-Authorization: smuggled"),
    }  # fmt: skip


async def answers(root: Path, requests: dict[str, str], allow: Sequence[str]) -> dict[str, str]:
    """Send raw requests from within a workspace and return the first lines of the answers."""
    gate = EgressGate(private=(f"{ALLOWED}/32",))
    async with opened(root, sandbox="bwrap", gate=gate) as workspaces:
        run = Terminal(await workspaces.open("conversation", WorkspaceSpec(allow=tuple(allow))))
        workspace = root / "conversation" / "workspace"
        shutil.copy(egress_client.__file__, workspace)
        written = {name: base64.b64encode(text.encode()).decode() for name, text in requests.items()}
        (workspace / "requests.json").write_text(json.dumps(written))
        command = f"{find_interpreter()} -I -S egress_client.py requests.json > answers.json"
        answer = await run(command, blocking=True, timeout=LIMIT_SECONDS)
        assert (answer.content, answer.exit_code) == ("", 0)
        return json.loads((workspace / "answers.json").read_text())


async def test_nothing_that_is_not_on_the_list_is_reached(tmp_path: Path) -> None:
    async with origin(FORBIDDEN) as forbidden, origin(ALLOWED) as allowed, origin(ALLOWED) as unlisted:
        requests = to_forbidden(forbidden.port) | through_allowed(allowed.port, forbidden.port, unlisted.port)
        assert len(requests) > 100
        # The names of this machine are on the list: they fail by their addresses.
        listed = (f"{ALLOWED}:{allowed.port}", *(f"{name}:{forbidden.port}" for name in ("localhost", "ip6-localhost")))
        found = await answers(tmp_path, requests, listed)
        assert forbidden.received == []
        assert unlisted.received == []
        assert allowed.received == []
        got_through = {name: line for name, line in found.items() if line.startswith(("HTTP/1.1 2", "HTTP/1.1 3"))}
        assert got_through == {}
        # And they were refused, not lost: the proxy serves on.
        assert {line.split()[1] for line in found.values() if line} <= {"400", "403", "431", "501", "502"}
        assert "localhost" in found["name_get"]
        assert "DECKHANDS_EGRESS_PRIVATE" in found["name_get"]
        assert "127.0.0.1" in found["plain_connect"]
        assert "its `allow`" in found["plain_connect"]


async def test_listed_host_is_reached_with_one_request_only(tmp_path: Path) -> None:
    async with origin(FORBIDDEN) as forbidden, origin(ALLOWED) as allowed:
        requests = passed_on(allowed.port, forbidden.port)
        found = await answers(tmp_path, requests, (f"{ALLOWED}:{allowed.port}",))
        assert set(found.values()) == {"HTTP/1.1 200 OK"}
        received = b"".join(allowed.received)
        assert received.count(b" HTTP/1.1\r\n") == len(requests)
        assert received.lower().count(b"host: %b:%d\r\n" % (ALLOWED.encode(), allowed.port)) == len(requests)
        assert b"smuggled" not in received
        assert forbidden.received == []


class Flipping:
    """A resolver whose answer changes: first what may be reached, then what may not."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        return self.answers.pop(0)


async def asked(proxy: EgressProxy, request: str) -> bytes:
    listener = socket.create_server((FORBIDDEN, 0))
    async with await proxy.serve(listener), asyncio.timeout(LIMIT_SECONDS):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(request.encode())
        answer = await reader.read()
        writer.close()
        return answer


def proxy(resolve: Flipping, port: int) -> EgressProxy:
    rules = EgressRules(parse_host_rules([f"*:{port}"]), AddressRules.parse([f"{ALLOWED}/32"]), connections=2)
    return EgressProxy(rules, lambda *_: None, resolve)


async def test_name_is_resolved_once_and_the_judged_address_used() -> None:
    async with origin(ALLOWED) as allowed, origin(FORBIDDEN, allowed.port) as forbidden:
        resolve = Flipping([ALLOWED], [FORBIDDEN])
        flipping = proxy(resolve, allowed.port)
        request = get(f"http://rebinding.test:{allowed.port}/")
        assert b" 200 OK" in await asked(flipping, request)
        assert b" 403 rebinding.test" in await asked(flipping, request)
        assert resolve.answers == []
        assert (len(allowed.received), forbidden.received) == (1, [])


async def test_non_public_addresses_are_omitted() -> None:
    async with origin(ALLOWED) as allowed, origin(FORBIDDEN, allowed.port) as forbidden:
        mixed = proxy(Flipping(["::1", FORBIDDEN, "169.254.169.254", ALLOWED]), allowed.port)
        assert b" 200 OK" in await asked(mixed, get(f"http://mixed.test:{allowed.port}/"))
        assert forbidden.received == []


async def test_a_redirect_is_not_followed_but_told() -> None:
    async with origin(ALLOWED) as allowed, origin(FORBIDDEN) as forbidden:
        allowed.answer = (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/\r\nContent-Length: 0\r\n\r\n" % forbidden.port
        )
        answer = await asked(proxy(Flipping([ALLOWED]), allowed.port), get(f"http://a.test:{allowed.port}/"))
        assert answer.startswith(b"HTTP/1.1 302 Found")
        assert forbidden.received == []


@pytest.mark.parametrize(
    "answer",
    [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"HTTP/1.1 200"],
)
async def test_a_server_that_answers_nonsense_costs_its_request_only(answer: bytes) -> None:
    async with origin(ALLOWED) as allowed:
        one = proxy(Flipping([ALLOWED], [ALLOWED]), allowed.port)
        request = get(f"http://a.test:{allowed.port}/")
        good, allowed.answer = allowed.answer, answer
        assert b"200 OK" not in await asked(one, request)
        allowed.answer = good
        assert b" 200 OK" in await asked(one, request)
