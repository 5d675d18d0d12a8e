"""The multiplexed connection: order of replies, lost replies, silence, errors, addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.coordination.heartbeat_thread import send_beats
from broker.runtime.errors import OutcomeUnknown, StoreError, StoreMisconfigured, StoreRefused, StoreUnavailable
from broker.store.connection import MultiplexedConnection
from tests.polling import unhurried
from tests.stores import LossyWire, RealServer, emptied


@asynccontextmanager
async def serving(
    folder: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[str]:
    """Serve one connection on a unix socket; ends when the other side has closed it."""
    done = asyncio.Event()

    async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            done.set()

    server = await asyncio.start_unix_server(serve_once, str(folder / "s"))
    yield f"unix://{folder}/s"
    await asyncio.wait_for(done.wait(), 60)
    server.close()
    await server.wait_closed()


@pytest.fixture
async def connection(valkey_server: RealServer) -> AsyncIterator[MultiplexedConnection]:
    connection = MultiplexedConnection(await emptied(valkey_server.url))
    yield connection
    await connection.aclose()


@pytest.fixture
async def through_wire(lossy_wire: LossyWire) -> AsyncIterator[MultiplexedConnection]:
    connection = MultiplexedConnection(lossy_wire.url, reply_timeout_seconds=0.3)
    yield connection
    await connection.aclose()


async def test_each_caller_gets_its_own_reply(connection: MultiplexedConnection) -> None:
    replies = await asyncio.gather(*(connection.call("ECHO", f"{n}") for n in range(500)))
    assert replies == [f"{n}".encode() for n in range(500)]
    many = await connection.call_many([("SET", "a", 1), ("INCRBY", "a", 4), ("GET", b"a"), ("HGETALL", "h")])
    assert many == [b"OK", 5, b"5", []]
    assert await connection.call_many([]) == []


async def test_a_cancelled_caller_does_not_shift_replies(connection: MultiplexedConnection) -> None:
    await connection.call("SET", "n", 0)
    callers = [asyncio.ensure_future(connection.call("ECHO", f"{n}")) for n in range(100)]
    await asyncio.sleep(0)
    for caller in callers[::3]:
        caller.cancel()
    replies = await asyncio.gather(*callers, return_exceptions=True)
    for n, reply in enumerate(replies):
        assert isinstance(reply, asyncio.CancelledError) if n % 3 == 0 else reply == f"{n}".encode()
    group = asyncio.ensure_future(connection.call_many([("ECHO", "x"), ("ECHO", "y")]))
    await asyncio.sleep(0)
    group.cancel()
    assert await connection.call("ECHO", "z") == b"z"


async def test_an_error_reply_is_its_callers_alone(connection: MultiplexedConnection) -> None:
    wrong, right = await asyncio.gather(
        connection.call("NO_SUCH_COMMAND"), connection.call("ECHO", "x"), return_exceptions=True
    )
    assert isinstance(wrong, StoreError)
    assert str(wrong).startswith("The store answered: ERR unknown command")
    assert right == b"x"
    with pytest.raises(StoreError, match="wrong kind"):
        await connection.call_many([("SET", "a", "x"), ("HGET", "a", "f"), ("ECHO", "y")])


async def test_a_deleted_stream_is_no_demotion(tmp_path: Path) -> None:
    """Redis 7.0 answers a blocked read so; the connection stays."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"replication\r\n")  # the greeting's last command is INFO server replication
        writer.write(b"+OK\r\n+OK\r\n")
        await reader.readuntil(b"PING\r\n")
        writer.write(b"-UNBLOCKED the stream key no longer exists\r\n")
        await reader.readuntil(b"PING\r\n")
        writer.write(b"+PONG\r\n")
        await reader.read()

    async with serving(tmp_path, serve) as url:
        connection = MultiplexedConnection(url)
        with pytest.raises(StoreUnavailable):
            await connection.call("PING")
        assert await connection.call("PING") == b"PONG"
        assert connection.connects == 1
        await connection.aclose()


async def test_no_call_goes_to_a_primary_left_while_connecting(tmp_path: Path) -> None:
    """One connection hears of the fail-over while another one waits for the old primary's greeting."""
    greets, may_greet = asyncio.Event(), asyncio.Event()
    received: list[bytes] = []
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(b"")
        served.append(asyncio.current_task())
        number = len(received)
        await reader.readuntil(b"replication\r\n")  # the greeting's last command is INFO server replication
        if number == 2:
            greets.set()
            await may_greet.wait()
        about = b"run_id:old" if number < 3 else b"run_id:new"
        writer.write(b"+OK\r\n$%d\r\n%b\r\n" % (len(about), about))
        while command := await reader.read(4096):
            received[number - 1] += command
            writer.write(b"-READONLY You can't write.\r\n" if number < 3 else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_unix_server(serve, str(tmp_path / "s"))
    first = MultiplexedConnection(f"unix://{tmp_path}/s")
    second = first.another(reply_timeout_seconds=5.0)
    async with asyncio.timeout(10):
        await first.call_many([])
        waiting = asyncio.create_task(second.call("SET", "a", 1))
        await greets.wait()
        with pytest.raises(StoreUnavailable, match="READONLY"):
            await first.call("SET", "b", 1)
        may_greet.set()
        assert await waiting == b"OK"
    assert (received[1], b"SET" in received[2]) == (b"", True)
    for connection in (first, second):
        await connection.aclose()
    await asyncio.gather(*filter(None, served))
    server.close()


@pytest.mark.parametrize(
    ("text", "error_class"),
    [
        ("LOADING Redis is loading the dataset in memory", StoreUnavailable),
        ("MISCONF Errors writing to the AOF file", StoreUnavailable),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreUnavailable),
        ("READONLY You can't write against a read only replica.", StoreUnavailable),
        ("BUSY Redis is busy running a script.", StoreUnavailable),
        (
            "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
            StoreUnavailable,
        ),
        ("UNBLOCKED the stream key no longer exists", StoreUnavailable),
        ("MASTERDOWN Link with MASTER is down", StoreUnavailable),
        ("CLUSTERDOWN The cluster is down", StoreUnavailable),
        ("NOAUTH Authentication required.", StoreUnavailable),  # the login had succeeded
        ("WRONGPASS invalid username-password pair", StoreMisconfigured),
        ("NOPERM this user has no permissions", StoreMisconfigured),
        ("ERR something else", StoreRefused),
        ("BUSYGROUP Consumer Group name already exists", StoreRefused),
    ],
)
async def test_error_replies_are_told_apart(tmp_path: Path, text: str, error_class: type[StoreError]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"replication\r\n")  # the greeting's last command is INFO server replication
        writer.write(b"+OK\r\n+OK\r\n")
        await reader.readuntil(b"PING\r\n")
        writer.write(f"-{text}\r\n".encode())
        await reader.read()

    async with serving(tmp_path, serve) as url:
        connection = MultiplexedConnection(url)
        with pytest.raises(StoreError) as refused:
            await connection.call("PING")
        await connection.aclose()
    assert type(refused.value) is error_class
    assert text in str(refused.value)


async def test_a_swallowed_reply_is_an_unknown_outcome(
    through_wire: MultiplexedConnection, lossy_wire: LossyWire, connection: MultiplexedConnection
) -> None:
    await through_wire.call("SET", "n", 0)
    lossy_wire.swallow = lambda _: True
    with pytest.raises(OutcomeUnknown, match="connection to the store was lost before the reply"):
        await through_wire.call("INCR", "n")
    lossy_wire.swallow = lambda _: False
    assert await connection.call("GET", "n") == b"1"  # executed, and not a second time
    assert await through_wire.call("INCR", "n") == 2
    assert lossy_wire.connections == 2


async def test_all_who_wait_learn_of_a_loss(through_wire: MultiplexedConnection, lossy_wire: LossyWire) -> None:
    await through_wire.call("PING")
    lossy_wire.swallow = lambda _: True
    outcomes = await asyncio.gather(
        through_wire.call("PING"),
        through_wire.call("PING"),
        through_wire.call_many([("PING",), ("PING",)]),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown] * 3


async def test_silence_ends_with_the_time_limit(through_wire: MultiplexedConnection, lossy_wire: LossyWire) -> None:
    await through_wire.call("PING")
    lossy_wire.is_silent = True
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(OutcomeUnknown, match=r"no reply within 0\.3 s"):
        await through_wire.call("PING")
    assert 0.25 < loop.time() - started < 2.0
    lossy_wire.is_silent = False
    assert await through_wire.call("ECHO", "back") == b"back"


async def test_the_time_limit_is_each_replys_own(valkey_server: RealServer) -> None:
    connection = MultiplexedConnection(valkey_server.url, reply_timeout_seconds=2.0)
    for _ in range(2):
        assert await connection.call("BLPOP", "empty", 1.2) is None  # each within the limit, together beyond it
    await connection.aclose()


async def test_a_server_that_accepts_and_says_nothing_is_unavailable(tmp_path: Path) -> None:
    async def listen(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(tmp_path, listen) as url:
        connection = MultiplexedConnection(url, reply_timeout_seconds=0.1)
        with pytest.raises(StoreUnavailable, match=f"Cannot connect to the store at {tmp_path}/s"):
            await connection.call("PING")


async def test_a_call_that_waits_for_an_aborted_connection_ends(tmp_path: Path) -> None:
    accepted = asyncio.Event()

    async def silence(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read(1)
        accepted.set()
        await reader.read()

    async with serving(tmp_path, silence) as url:
        connection = MultiplexedConnection(url, reply_timeout_seconds=unhurried(600))
        calls = [asyncio.ensure_future(connection.call("PING")) for _ in range(3)]
        await accepted.wait()
        connection.abort(ConnectionResetError("it is not a primary any more"))
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, StoreUnavailable)
            assert "given up" in outcome.message
        await connection.aclose()


async def test_a_refused_login_leaves_no_socket_behind(valkey_server: RealServer, tmp_path: Path) -> None:
    connection = MultiplexedConnection(f"{valkey_server.url}?password=wrong")
    with pytest.raises(StoreMisconfigured, match="refused the login"):
        await connection.call("PING")
    await connection.aclose()


async def test_missing_server_is_unavailable(tmp_path: Path) -> None:
    connection = MultiplexedConnection(f"unix://{tmp_path}/nothing")
    with pytest.raises(StoreUnavailable, match="Start it, or set DECKHANDS_URL"):
        await connection.call("PING")
    with pytest.raises(StoreUnavailable, match=r"Cannot connect to the store at 127\.0\.0\.1:1/0"):
        await MultiplexedConnection("redis://127.0.0.1:1/0").call("PING")


async def test_many_first_callers_share_one_connection(lossy_wire: LossyWire) -> None:
    connection = MultiplexedConnection(lossy_wire.url)
    await asyncio.gather(*(connection.call("PING") for _ in range(50)))
    assert lossy_wire.connections == 1
    await connection.aclose()


async def test_another_connection_may_block_while_this_one_works(connection: MultiplexedConnection) -> None:
    other = connection.another(reply_timeout_seconds=10)
    blocked = asyncio.ensure_future(other.call("BLPOP", "list", 5))
    assert await connection.call("PING") == b"PONG"
    while await connection.call("CLIENT", "LIST") and not blocked.done():
        if await connection.call("LPUSH", "list", "x"):
            break
    assert await blocked == [b"list", b"x"]
    await other.aclose()


async def test_calls_under_way_end_when_it_is_closed(connection: MultiplexedConnection) -> None:
    other = connection.another(reply_timeout_seconds=10)
    await other.call("PING")
    blocked = asyncio.ensure_future(other.call("BLPOP", "list", 5))
    await asyncio.sleep(0)
    await other.aclose()
    with pytest.raises(OutcomeUnknown):
        await blocked


@pytest.mark.parametrize("url", ["http://h", "store", "redis://h:port/0"])
def test_an_address_that_cannot_be_used_is_named(url: str) -> None:
    with pytest.raises(StoreMisconfigured, match="cannot be used") as refused:
        MultiplexedConnection(url)
    assert "redis://host:6379/0" in str(refused.value)


@pytest.mark.parametrize(
    ("url", "error_class"),
    [("redis://user:s3cret@host:port/0", StoreMisconfigured), ("redis://:s3cret@127.0.0.1:1/0", StoreUnavailable)],
)
async def test_a_password_is_never_shown(url: str, error_class: type[StoreError]) -> None:
    with pytest.raises(error_class) as refused:
        await MultiplexedConnection(url).call("PING")
    assert "s3cret" not in str(refused.value)


async def test_a_silent_node_delays_no_next_beat(tmp_path: Path) -> None:
    async def silence(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(tmp_path, silence) as url:
        connection = MultiplexedConnection(url, reply_timeout_seconds=unhurried(600))
        with pytest.raises(TimeoutError):  # before the limit of a connection that is being opened
            await send_beats(connection, [("PING",)])
        await connection.aclose()
