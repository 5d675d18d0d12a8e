"""Terminals of operators: over a WebSocket, through the store, to a shell in the sandbox of a workspace."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from broker.coordination.terminals import TerminalLink, Terminals
from broker.runtime.errors import StoreMisconfigured, StoreRefused
from broker.store.store import open_store
from deckhands.server.auth.api_keys import ApiKeys, Scope
from deckhands.server.terminals import TerminalRecord
from tests.browser_pages import CHROMIUM, TOO_WIDE
from tests.browser_pages import opened as opened_page
from tests.docker_image import image
from tests.forked_programs import ForkedProgram
from tests.kubernetes_api import running_cluster
from tests.polling import unhurried, until
from tests.served_stores import close_workspaces, environment_with, worker
from tests.server_parts import Served, add_principal, served, served_with_model
from tests.turns import bash, finish, script

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_SECONDS = 120.0
SCOPES = (Scope.READ, Scope.WRITE, Scope.OPERATE)
TURNS = [bash("echo from the agent > a.txt"), finish("done")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("terminals")
    async with served_with_model(folder, TURNS, options={"terminals": True}, DECKHANDS_SANDBOX="bwrap") as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cid(server: Served) -> str:
    return await finished(server)


async def finished(server: Served) -> str:
    cid = await server.client.submit("Write a file.", tenant="acme")
    await server.client.wait_until_settled(cid, timeout_seconds=unhurried(LIMIT_SECONDS))
    return cid


class Screen:
    """The reader of a terminal."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.output = b""
        self.texts: list[dict[str, Any]] = []

    async def type(self, text: str) -> None:
        await self.socket.send(text.encode())

    async def read_until(self, is_enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(unhurried(LIMIT_SECONDS)):
            while not is_enough():
                message = await self.socket.recv()
                if isinstance(message, bytes):
                    self.output += message
                else:
                    self.texts.append(json.loads(message))

    async def opens(self) -> None:
        await self.read_until(lambda: bool(self.texts))
        assert self.texts[0] == {"type": "opened"}

    async def shows(self, text: str) -> None:
        await self.read_until(lambda: text.encode() in self.output)

    async def ends(self) -> str:
        """Wait until the server closes the terminal, and return the reason."""
        with pytest.raises(ConnectionClosed) as closed:
            await self.read_until(lambda: False)
        return closed.value.rcvd.reason if closed.value.rcvd is not None else ""


@asynccontextmanager
async def opened(
    server: Served, cid: str, token: str, reason: str = "look at it", **options: Any
) -> AsyncIterator[Screen]:
    address = f"ws://127.0.0.1:{server.port}/conversations/{cid}/terminal?reason={quote(reason)}&columns=90&rows=30"
    async with connect(address, additional_headers={"Authorization": f"Bearer {token}"}, **options) as socket:
        yield Screen(socket)


async def recorded(server: Served, action: str, cid: str) -> list[str]:
    async with server.as_(await server.token("*")) as admin:
        found = (await admin.get("/operations?limit=1000")).json()
    return [one["reason"] for one in reversed(found) if one["action"] == action and one["target"] == cid]


async def until_ended(server: Served, cid: str, number: int = 1) -> str:
    """Wait until the record has the ends of so many terminals, and return the last one."""

    async def is_ended() -> bool:
        return len(await recorded(server, "terminal.end", cid)) >= number

    await until(is_ended, limit=LIMIT_SECONDS, what="the end in the record")
    return (await recorded(server, "terminal.end", cid))[number - 1]


async def test_operator_works_in_the_sandbox_and_is_recorded(server: Served, cid: str) -> None:
    async with opened(server, cid, await server.token("acme", SCOPES), "why is a.txt so short") as screen:
        await screen.opens()
        await screen.type("cat a.txt; stty size; tty\r")
        await screen.shows("from the agent")
        await screen.shows("30 90")
        await screen.shows("/dev/pts/")
        await screen.socket.send(json.dumps({"columns": 100, "rows": 40}))
        await screen.type("stty size; echo urls=$(env | grep -c DECKHANDS_URL)\r")
        await screen.shows("40 100")
        await screen.shows("urls=0")
        await screen.type("echo it sleeps $((40 + 1)); sleep 1000\r")
        await screen.shows("it sleeps 41")
        await screen.type("\x03")
        await screen.type("echo interrupted $?\r")
        await screen.shows("interrupted 130")
        await screen.type("exit 7\r")
        assert await screen.ends() == ""
        assert screen.texts[-1] == {"type": "ended", "exit_code": 7}
    assert await recorded(server, "terminal", cid) == ["why is a.txt so short"]
    await until_ended(server, cid)
    typed = "".join(await recorded(server, "terminal.input", cid))
    assert typed.startswith(r"cat a.txt; stty size; tty")
    assert typed.endswith(r"\x03echo interrupted $?\rexit 7\r")
    assert "from the agent" in "".join(await recorded(server, "terminal.output", cid))
    assert (await recorded(server, "terminal.end", cid))[0].startswith("the shell ended; ")


@pytest.mark.docker
async def test_operator_works_in_a_container(tmp_path: Path) -> None:
    settings = {"DECKHANDS_SANDBOX": "docker", "DECKHANDS_DOCKER_IMAGES": image()}
    async with served_with_model(tmp_path, TURNS, options={"terminals": True}, **settings) as server:
        await check_terminal_of_a_container(server)


async def test_operator_works_in_a_pod(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "kubernetes", tmp_path / "home") as kubernetes:
        settings = kubernetes.environment()
        async with served_with_model(tmp_path, TURNS, options={"terminals": True}, **settings) as server:
            await check_terminal_of_a_container(server)


async def check_terminal_of_a_container(server: Served) -> None:
    """The terminal is in the container of the agent, has a size and job control, and ends whole."""
    cid = await finished(server)
    async with opened(server, cid, await server.token("acme", SCOPES)) as screen:
        await screen.opens()
        await screen.type("cat a.txt; echo columns=$COLUMNS urls=$(env | grep -c DECKHANDS_URL)\r")
        await screen.shows("from the agent")
        await screen.shows("columns=90 urls=0")
        await screen.socket.send(json.dumps({"columns": 100, "rows": 40}))
        await screen.type("id -u > user.txt; echo columns=$COLUMNS\r")
        await screen.shows("columns=100")
        await screen.type("echo it sleeps $((40 + 1)); sleep 1000\r")
        await screen.shows("it sleeps 41")
        await screen.type("\x03")
        await screen.type("echo interrupted $?\r")
        await screen.shows("interrupted 130")
        done = await server.client.execute(
            cid, "[ $(id -u) = $(cat user.txt) ] || echo other user", timeout_seconds=60.0
        )
        assert done.output.strip() == ""
        await screen.type("exit 7\r")
        assert await screen.ends() == ""
        assert screen.texts[-1] == {"type": "ended", "exit_code": 7}
    async with opened(server, cid, await server.token("acme", SCOPES)) as screen:
        await screen.type("echo $$ > pid; echo on$((1 + 1))line; sleep 1000\r")
        await screen.shows("on2line")
    pid = (await server.client.files.read(cid, "pid")).strip().decode()

    async def is_gone() -> bool:
        return (await server.client.execute(cid, f"kill -0 {pid}", timeout_seconds=60.0)).exit_code != 0

    await until(is_gone, limit=LIMIT_SECONDS, what="the end of the shell whose reader has left")


async def test_key_without_a_right_opens_no_terminal(server: Served, cid: str) -> None:
    before = await recorded(server, "terminal", cid)
    with pytest.raises(InvalidStatus) as refused:
        async with opened(server, cid, await server.token("acme", {*SCOPES} - {Scope.OPERATE})):
            pass
    assert refused.value.response.status_code == 403
    for missing in (Scope.READ, Scope.WRITE):
        token = await server.token("acme", {*SCOPES} - {missing})
        async with opened(server, cid, token) as screen:
            assert await screen.ends() == "terminals_off"
            assert f"lacks the scope {missing.value}" in screen.texts[0]["content"]["detail"]
    async with server.as_(token) as client:
        offer = (await client.get(f"/conversations/{cid}/terminal")).json()
    assert offer == {"is_offered": False, "why": "The key lacks the scope write."}
    assert await recorded(server, "terminal", cid) == before


async def test_other_tenant_finds_no_conversation_to_open(server: Served, cid: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with opened(server, cid, await server.token("other", SCOPES)):
            pass
    assert refused.value.response.status_code == 404


async def test_revoked_key_ends_its_terminal(server: Served, cid: str) -> None:
    keys = ApiKeys(server.client.store)
    key, token = await keys.add("leaver", tenant="acme", scopes=SCOPES)
    async with opened(server, cid, token) as screen:
        await screen.type("echo on$((1 + 1))line\r")
        await screen.shows("on2line")
        await keys.revoke(key.id)
        assert await screen.ends() == "key_revoked"


async def test_endless_output_is_bounded_and_ends_with_its_reader(server: Served, cid: str) -> None:
    async with opened(server, cid, await server.token("acme", SCOPES)) as screen:
        await screen.type("echo $$ > pid; exec yes\r")
        await screen.read_until(lambda: len(screen.output) > 1_000_000)
        lengths = await stream_lengths(server, cid)
        assert lengths
        assert max(lengths) <= 70
    pid = (await server.client.files.read(cid, "pid")).strip().decode()

    async def is_gone() -> bool:
        done = await server.client.execute(cid, f"kill -0 {pid}", timeout_seconds=60.0)
        return done.exit_code != 0

    await until(is_gone, limit=LIMIT_SECONDS, what="the end of the program")


async def stream_lengths(server: Served, cid: str) -> list[int]:
    store = await open_store(server.log.admin)
    try:
        found = await store.call("KEYS", f"{(await store.locate(cid)).shard.root}:terminal_*:{cid}:*")
        return [await store.call("XLEN", key) for key in found]
    finally:
        await store.aclose()


async def test_store_cannot_read_input_and_output(server: Served, cid: str) -> None:
    async with opened(server, cid, await server.token("acme", SCOPES)) as screen:
        await screen.type("echo pass''word-of-the-operator\r")
        await screen.shows("password-of-the-operator")
        store = await open_store(server.log.admin)
        try:
            keys = await store.call("KEYS", f"{(await store.locate(cid)).shard.root}:terminal_*:{cid}:*")
            assert len(keys) >= 2
            for key in keys:
                assert b"word-of-the-operator" not in b"".join(
                    part for _, fields in await store.call("XRANGE", key, "-", "+") for part in fields
                )
        finally:
            await store.aclose()


async def test_hostile_roles_open_no_terminal_and_type_in_none(server: Served, cid: str) -> None:
    for role in ("ingress", "controller", "jobs", "tool"):
        store = await open_store(server.log.role(role))
        try:
            names = await store.locate(cid)
            for command in (
                ("HSET", names.terminal("a" * 32), "request", "{}"),
                ("XADD", names.terminal_input("a" * 32), "1-0", "m", "x"),
            ):
                with pytest.raises(StoreMisconfigured, match="NOPERM"):
                    await store.call(*command)
        finally:
            await store.aclose()
    store = await open_store(server.log.tool)
    try:
        # An order without a request starts nothing, and does not disturb the worker.
        node = (await store.call("HGET", names.meta, "node")).decode()
        stream = names.shard.actions(f"node:{node}")
        for token in ("b" * 32, "../x", ""):
            await store.call("XADD", stream, "*", "c", cid, "a", 0, "x", "terminal", "t", token)
    finally:
        await store.aclose()
    async with opened(server, cid, await server.token("acme", SCOPES)) as screen:
        await screen.type("echo still $((40 + 2))\r")
        await screen.shows("still 42")
    admin = await open_store(server.log.admin)  # what the tool worker's user was refused is no fault of the server
    try:
        await admin.call("ACL", "LOG", "RESET")
    finally:
        await admin.aclose()


async def test_ticket_for_streams_opens_no_terminal(server: Served, cid: str) -> None:
    address = f"ws://127.0.0.1:{server.port}/conversations/{cid}"
    async with server.as_(await server.token("acme", SCOPES)) as client:

        async def ticket(**asked: str) -> str:
            answer = await client.post("/tickets", json=asked) if asked else await client.post("/tickets")
            assert answer.status_code == 201
            return str(answer.json()["ticket"])

        for path, found in (("terminal?reason=x&", await ticket()), ("ws?", await ticket(purpose="terminal"))):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(f"{address}/{path}ticket={found}"):
                    pass
            assert refused.value.response.status_code == 401
        assert (await client.post("/tickets", json={"purpose": "x"})).status_code == 422
        async with connect(f"{address}/terminal?reason=x&ticket={await ticket(purpose='terminal')}") as socket:
            assert json.loads(await socket.recv()) == {"type": "opened"}


async def test_input_waits_until_the_program_reads(server: Served, cid: str) -> None:
    size = 160 * 2**10
    async with opened(server, cid, await server.token("acme", SCOPES)) as screen:
        await screen.type("rm -f go; stty raw -echo; echo ready$((1 + 1)); until [ -e go ]; do sleep 0.1; done; ")
        await screen.type(f"head -c {size} | wc -c; stty sane\r")
        await screen.shows("ready2")
        for _ in range(size // 2**12):
            await screen.socket.send(b"x" * 2**12)

        async def is_full() -> bool:
            return sum(map(len, await recorded(server, "terminal.input", cid))) > size

        await until(is_full, limit=LIMIT_SECONDS, what="the input in the record")
        assert (await server.client.execute(cid, "touch go", timeout_seconds=60.0)).exit_code == 0
        await screen.shows(str(size))


async def test_input_ends_where_the_record_is_full(server: Served) -> None:
    cid = await finished(server)
    token = await server.token("acme", SCOPES)
    for number, (message, times) in enumerate(((b"\r", 1_100), (b"x" * 1_000 + b"\r", 260)), 1):
        async with opened(server, cid, token) as screen:
            await screen.type("cat > /dev/null\r")

            async def type_on(screen: Screen = screen, message: bytes = message, times: int = times) -> None:
                with suppress(ConnectionClosed):
                    for _ in range(times):
                        await screen.socket.send(message)

            async with asyncio.TaskGroup() as group:
                group.create_task(type_on())
                assert await screen.ends() == "terminal_closed"
            assert "262,144 bytes of input are recorded" in screen.texts[-1]["content"]["detail"]
        assert (await until_ended(server, cid, number)).startswith("terminal_closed; ")
    # Output is not recorded with each line, but every two seconds.
    assert len(await recorded(server, "terminal.output", cid)) < 300
    ends = await recorded(server, "terminal.end", cid)
    # Each line is an entry of the record, and counts 256 bytes more.
    assert [int(end.split()[1].replace(",", "")) for end in ends] == [16 + 1_018, 16 + 208 * 1_001]


async def test_workspace_has_four_terminals(server: Served) -> None:
    cid = await finished(server)
    token = await server.token("acme", SCOPES)
    async with AsyncExitStack() as stack:
        for _ in range(4):
            screen = await stack.enter_async_context(opened(server, cid, token))
            await screen.opens()
        async with opened(server, cid, token) as screen:
            assert await screen.ends() == "terminal_failed"
            assert "has 4 open terminals" in screen.texts[-1]["content"]["detail"]


async def test_reader_that_reads_nothing_ends_its_terminal(server: Served) -> None:
    cid = await finished(server)
    async with opened(server, cid, await server.token("acme", SCOPES), max_queue=1) as screen:
        await screen.type("yes\r")
        assert (await until_ended(server, cid)).startswith("terminal_closed; ")


async def test_idle_terminal_ends_in_spite_of_sizes_and_reports(tmp_path: Path) -> None:
    options = {"terminals": True, "terminal_idle_seconds": 3.0}
    async with served_with_model(tmp_path, TURNS, options=options, DECKHANDS_SANDBOX="bwrap") as server:
        cid = await finished(server)
        async with opened(server, cid, await server.token("acme", SCOPES)) as screen:
            await screen.type("cat > /dev/null\r")

            async def answer() -> None:
                for number in itertools.count():
                    await screen.socket.send(json.dumps({"columns": 80 + number % 2, "rows": 24}))
                    await screen.socket.send(b"\x1b[12;40R\x1b[?1;2c")
                    await asyncio.to_thread(threading.Event().wait, 0.5)

            answering = asyncio.create_task(answer())
            try:
                assert await screen.ends() == "terminal_closed"
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
            assert "No key was pressed" in screen.texts[-1]["content"]["detail"]


@asynccontextmanager
async def answered(server: Served, cid: str) -> AsyncIterator[Callable[[], Awaitable[TerminalLink]]]:
    """Be the tool worker of the node: yield what waits for a request, and accepts it."""
    store = await open_store(server.log.tool)
    admin = await open_store(server.log.admin)
    links: list[TerminalLink] = []
    names = await store.locate(cid)
    await admin.call("HSET", names.meta, "node", "played")

    async def accept() -> TerminalLink:
        found: list[bytes] = []

        async def is_there() -> bool:
            found[:] = await admin.call("KEYS", f"{names.shard.root}:terminal:{cid}:*")
            return bool(found)

        await until(is_there, limit=LIMIT_SECONDS, what="a request")
        accepted = await Terminals(store).accept(cid, found[0].decode().rpartition(":")[2])
        assert accepted is not None
        await admin.call("DEL", *found)
        links.append(accepted[1])
        return accepted[1]

    try:
        yield accept
    finally:
        for link in links:
            await link.aclose()
        await store.aclose()
        await admin.aclose()


async def test_hostile_exit_code_and_reader_that_leaves_early(tmp_path: Path) -> None:
    async with served(tmp_path / "log", environment_with(tmp_path), terminals=True) as server:
        cid = await server.client.submit("Write a file.", tenant="acme")
        token = await server.token("acme", SCOPES)
        async with answered(server, cid) as accept:
            for number, code in enumerate((b"--5", b"9" * 5_000), 1):
                async with opened(server, cid, token) as screen:
                    link = await accept()
                    await link.send("opened")
                    await link.send("ended", code)
                    assert await screen.ends() == ""
                    assert screen.texts[-1] == {"type": "ended", "exit_code": -1}
                assert (await until_ended(server, cid, number)).startswith("the shell ended; ")
            async with opened(server, cid, token):
                link = await accept()
            await link.send("opened")
            assert (await until_ended(server, cid, 3)).startswith("closed; ")
            assert (await link.receive()).kind == "close"


async def test_keys_that_run_a_line_are_recorded_first(tmp_path: Path) -> None:
    async with served(tmp_path / "log", environment_with(tmp_path), terminals=True) as server:
        cid = await server.client.submit("Write a file.", tenant="acme")
        async with answered(server, cid) as accept, opened(server, cid, await server.token("acme", SCOPES)) as screen:
            link = await accept()
            await link.send("opened")
            for key in ("\r", "\n", "\x0f"):
                await screen.type(key)
                assert (await link.receive()).content == key.encode()
                assert (await recorded(server, "terminal.input", cid))[-1] == repr(key)[1:-1]


async def test_input_that_the_store_refused_is_recorded_later(tmp_path: Path) -> None:
    async with served(tmp_path / "log", environment_with(tmp_path), terminals=True) as server:
        key = server.client.store.all_shards[0].operations
        admin = await open_store(server.log.admin)
        try:
            record = TerminalRecord(server.gateway, await add_principal(server.client.store), "conversation")
            await admin.call("SET", key, "of another type")
            await record.add_input(b"rm a.txt")
            record.add_output(b"gone")
            with pytest.raises(StoreRefused):
                await record.write()
            await admin.call("DEL", key)
            record.add_output(b"!")
            await record.write()
            found = [(one.action, one.reason) for one in await server.gateway.operations.latest()]
            assert found == [("terminal.output", "gone!"), ("terminal.input", "rm a.txt")]
            await record.write()
            assert len(await server.gateway.operations.latest()) == 2
        finally:
            await admin.aclose()


async def test_request_starts_one_shell_however_often_it_is_delivered(server: Served, cid: str) -> None:
    terminals = Terminals(server.client.store)
    names = await server.client.store.locate(cid)
    admin = await open_store(server.log.admin)
    before = set(await admin.call("KEYS", f"{names.shard.root}:terminal:{cid}:*"))
    link = await terminals.request(cid, columns=80, rows=24)
    try:
        (key,) = set(await admin.call("KEYS", f"{names.shard.root}:terminal:{cid}:*")) - before
        again = await terminals.accept(cid, key.decode().rpartition(":")[2])
        assert again is not None
        with pytest.raises(StoreRefused, match="equal or smaller"):
            await again[1].send("opened")
        await again[1].aclose()
        await link.send("keys", b"echo one$((1 + 1))\r")
        shown = b""
        async with asyncio.timeout(unhurried(LIMIT_SECONDS)):
            while b"one2" not in shown:
                shown += (await link.receive()).content
    finally:
        await link.aclose()
        await admin.aclose()


async def test_closed_workspace_ends_its_terminal(server: Served) -> None:
    cid = await finished(server)
    async with opened(server, cid, await server.token("acme", SCOPES)) as screen:
        await screen.type("echo on$((1 + 1))line\r")
        await screen.shows("on2line")
        async with server.as_(await server.token("*")) as admin:
            assert (await admin.post(f"/conversations/{cid}/close", json={"reason": "a test"})).status_code == 202
        assert await screen.ends() == "terminal_lost"
        assert "processes have ended" in screen.texts[-1]["content"]["detail"]


async def test_dead_or_stopped_worker_ends_its_terminal(tmp_path: Path) -> None:
    variables = {"DECKHANDS_SANDBOX": "bwrap", "DECKHANDS_HEARTBEAT_TTL_SECONDS": "3"}
    model = script(tmp_path / "default.json", *TURNS)
    async with served(tmp_path / "log", environment_with(tmp_path), terminals=True) as server:
        environment = server.environment(tmp_path / "home", LLM_MODEL=model, **variables)
        async with worker("controller_worker", environment, server.log):
            own = {**environment, "DECKHANDS_URL": server.log.tool}
            first = ForkedProgram("tool_worker", environment=own, output=None, errors=2)
            try:
                cid = await finished(server)
                token = await server.token("acme", SCOPES)
                async with opened(server, cid, token) as screen:
                    await screen.type("echo $$ > pid; echo on$((1 + 1))line\r")
                    await screen.shows("on2line")
                    first.kill()
                    await asyncio.to_thread(first.wait, LIMIT_SECONDS)
                    assert await screen.ends() == "terminal_lost"
                    assert screen.texts[-1]["content"]["retryable"]
                first = ForkedProgram("tool_worker", environment=own, output=None, errors=2)
                async with opened(server, cid, token) as screen:
                    await screen.type("kill -0 $(cat pid) 2>/dev/null; echo the old shell: $?\r")
                    await screen.shows("the old shell: 1")
                    first.terminate()
                    assert await screen.ends() == "terminal_lost"
                    assert "tool worker has stopped" in screen.texts[-1]["content"]["detail"]
                await asyncio.to_thread(first.wait, unhurried(LIMIT_SECONDS))
            finally:
                first.kill()
                await close_workspaces(tmp_path / "home" / "node")


async def test_missing_switch_and_missing_sandbox_are_named(tmp_path: Path) -> None:
    for name in ("off", "bare"):
        (tmp_path / name).mkdir()
    async with served_with_model(tmp_path / "off", TURNS) as server:
        cid = await finished(server)
        token = await server.token("acme", SCOPES)
        async with server.as_(token) as client:
            offer = (await client.get(f"/conversations/{cid}/terminal")).json()
            assert offer == {"is_offered": False, "why": "The server was started without --terminals."}
        async with opened(server, cid, token) as screen:
            assert await screen.ends() == "terminals_off"
    async with served_with_model(tmp_path / "bare", TURNS, options={"terminals": True}) as server:
        cid = await finished(server)
        async with opened(server, cid, await server.token("acme", SCOPES)) as screen:
            assert await screen.ends() == "terminal_failed"
            assert "No sandbox confines this workspace" in screen.texts[-1]["content"]["detail"]
        assert await until_ended(server, cid) == "not opened, terminal_failed; 0 bytes of input, 0 of output"


COLOURED = r"printf '\033[38;2;10;200;30mgreen\033[0m \033[1;31mbold\033[0m \033]0;evil\007\033]8;;https://evil.example/\007link\033]8;;\007\n'"


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
async def test_page_shows_a_terminal_within_its_policy(server: Served, cid: str, width: int) -> None:
    async with opened_page(f"{server.url}/#/c/{cid}", width=width, key=await server.token("acme", SCOPES)) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.wait_for_function("() => document.title.startsWith('Write a file.')")
        title = await page.title()
        await page.get_by_role("tab", name="Terminal").click()
        await page.get_by_role("button", name="Open a terminal…").click()
        await page.get_by_role("dialog").get_by_label("Reason").fill("a test")
        await page.get_by_role("dialog").get_by_role("button", name="Open").click()
        await page.get_by_text("A shell in the workspace").wait_for()
        await page.keyboard.type(f"clear; {COLOURED}\n")
        rows = page.locator(".xterm-rows")
        green = rows.locator("span", has_text="green").last
        await rows.get_by_text("link").last.wait_for()
        await page.wait_for_function("""() => [...document.querySelectorAll(".xterm-rows span")].some(
            (one) => one.textContent.startsWith("green") && getComputedStyle(one).color === "rgb(10, 200, 30)")""")
        assert await green.count() == 1
        assert await page.title() == title
        await page.keyboard.type("stty size\n")
        columns, lines = await page.evaluate("""async () => {
            const text = () => document.querySelector(".xterm-rows").innerText;
            for (;;) {
                const found = /(^|\\n)(\\d+) (\\d+)\\s*($|\\n)/.exec(text());
                if (found) return [Number(found[3]), Number(found[2])];
                await new Promise((resolve) => setTimeout(resolve, 50));
            }}""")
        assert 20 < columns < 300
        assert 5 < lines < 100
        assert await page.evaluate(TOO_WIDE) == []
        await page.get_by_role("tab", name="Log").click()
        await page.get_by_role("tab", name="Terminal").click()
        await page.keyboard.type("echo still $((40 + 2))\n")
        await rows.get_by_text("still 42").wait_for()
        await page.keyboard.type("exit 3\n")
        await page.get_by_text("The shell ended with exit code 3.").wait_for()
        await page.get_by_role("button", name="Open another terminal…").wait_for()
        assert not [url for url in asked if "evil.example" in url]


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")
async def test_page_names_a_revoked_key_and_a_missing_right(server: Served, cid: str) -> None:
    keys = ApiKeys(server.client.store)
    key, token = await keys.add("leaver", tenant="acme", scopes=SCOPES)
    async with opened_page(f"{server.url}/#/c/{cid}", key=token) as page:
        await page.get_by_role("tab", name="Terminal").click()
        await page.get_by_role("button", name="Open a terminal…").click()
        await page.get_by_role("dialog").get_by_label("Reason").fill("a test")
        await page.keyboard.press("Enter")
        await page.get_by_text("A shell in the workspace").wait_for()
        await keys.revoke(key.id)
        await page.locator("#terminal-says", has_text="revoked").wait_for()
    async with opened_page(f"{server.url}/#/c/{cid}", key=await server.token("acme", [Scope.READ])) as page:
        await page.get_by_role("tab", name="Files").wait_for()
        async with page.expect_response(lambda answer: answer.url.endswith("/terminal")) as asked:
            await page.reload()
        assert not (await (await asked.value).json())["is_offered"]
        assert await page.get_by_role("tab", name="Terminal").count() == 0
