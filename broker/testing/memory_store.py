"""An in-memory store behind a `Connection`, for tests and simulations, with any event loop and clock.

Holds: commands and functions reply and write like a real server; tests compare the two. A blocked read is answered in
the same step in which its entry arrives, the longest waiting first. It times out by the loop's clock. A function that
touches keys of more than one slot fails, because a cluster refuses it.
Does not: survive the process; enforce limits, permissions and configuration of a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha1
from typing import Any

import msgpack
from hiredis import ReplyError

from broker.runtime import Clock, OutcomeUnknown, SystemClock
from broker.store import Argument, check_reply, find_slot
from broker.testing import keyspace, streams
from broker.testing.keyspace import Arguments, Keyspace, StatusReply
from broker.testing.streams import StreamRead

CommandCall = Callable[[Arguments], Any]


class MemoryServer:
    """The state shared by all `MemoryConnection`s of one store.

    Attributes:
        restarts: increase it after replacing the data by older data, to simulate a restart with a lost tail.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.restarts = 0
        self.keys = Keyspace(clock or SystemClock())
        self._libraries: dict[bytes, LuaLibrary] = {}
        self._blocked: dict[asyncio.Future[Any], StreamRead] = {}
        self._keys_in_function: set[bytes] = set()
        self._commands = {**keyspace.COMMANDS, **streams.COMMANDS}

    def execute(self, command: Arguments) -> Any:
        """Execute a command without waiting, and answer blocked reads of the entries that it added.

        Raises:
            ReplyError: the command was refused.
        """
        self.keys.drop_expired()
        try:
            return self._perform(command)
        finally:
            if self.keys.changed_streams:
                self._answer_blocked()

    def start_read(self, read: StreamRead) -> asyncio.Future[Any]:
        """Start a blocking read.

        It returns at once if entries exist, else on the next entry, or None on a timeout.
        """
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        reply = self._try_read(read)
        if reply is not None:
            future.set_result(reply)
            return future
        self._blocked[future] = read
        future.add_done_callback(lambda _: self._blocked.pop(future, None))
        if read.block_ms:
            timer = loop.call_later(read.block_ms / 1000, end_read, future)
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def _perform(self, command: Arguments) -> Any:
        name = command[0]
        run = self._commands.get(name) or self._commands.get(name.upper())
        if run is not None:
            return run(self.keys, command[1:])
        if name.upper() == b"FCALL":
            return self._call_function(command[1:])
        if name.upper() == b"FUNCTION":
            return self._administer_functions(command[1:])
        raise ReplyError(f"ERR unknown command '{name.decode()}'")

    def _call_function(self, args: Arguments) -> Any:
        name = args[0]
        number = int(args[1])
        key_names = args[2 : 2 + number]
        for library in self._libraries.values():
            if name in library.functions:
                self._keys_in_function = set(key_names)
                try:
                    return library.run(name, key_names, args[2 + number :])
                finally:
                    is_crossing = len(set(map(_slot_of, self._keys_in_function))) > 1
                    assert not is_crossing, f"{name.decode()} touches keys of several slots, which a cluster refuses"
        raise ReplyError("ERR Function not found")

    def _perform_in_function(self, command: Arguments) -> Any:
        name = command[0]
        if name not in _SPECIAL:
            self._keys_in_function.add(command[1])
        elif name in _SEVERAL_KEYS:
            self._keys_in_function.update(command[1:])
        elif name in _SUBCOMMANDS:
            self._keys_in_function.add(command[2])
        return self._perform(command)

    def _administer_functions(self, args: Arguments) -> Any:
        if args[0].upper() == b"LIST":
            wanted = args[2] if len(args) > 1 else None
            return [[b"library_name", name] for name in self._libraries if wanted in (None, name)]
        assert args[0].upper() == b"LOAD"
        library = LuaLibrary(args[-1], self._perform_in_function)
        if library.name in self._libraries and args[1].upper() != b"REPLACE":
            raise ReplyError(f"ERR Library '{library.name.decode()}' already exists")
        self._libraries[library.name] = library
        return library.name

    def _answer_blocked(self) -> None:
        grown, self.keys.changed_streams = self.keys.changed_streams, set()
        for future, read in list(self._blocked.items()):
            if not future.done() and not grown.isdisjoint(read.streams):
                reply = self._try_read(read)
                if reply is not None:
                    future.set_result(reply)

    def _try_read(self, read: StreamRead) -> Any:
        try:
            return read.run(self.keys)
        except ReplyError as error:
            return error


_SEVERAL_KEYS = (b"RENAME", b"DEL", b"UNLINK", b"EXISTS")
_SUBCOMMANDS = (b"XGROUP", b"XINFO")
_KEYLESS = (b"TIME", b"INFO")
_SPECIAL = frozenset((*_SEVERAL_KEYS, *_SUBCOMMANDS, *_KEYLESS))


@lru_cache(maxsize=65_536)
def _slot_of(key: bytes) -> int:
    return find_slot(key)


@lru_cache(maxsize=4)
def _compile(source: bytes) -> bytes:
    """Return the compiled source: simulations load it again and again."""
    import lupa.lua51

    lua = lupa.lua51.LuaRuntime(encoding=None, register_eval=False)
    body = b"\n" + source.partition(b"\n")[2]  # the empty line preserves the line numbers of errors
    compiled: bytes = lua.eval(b"function(body) return string.dump(assert(loadstring(body))) end")(body)
    return compiled


_SAME_IN_LUA = (bytes, int)
"""Replies that Lua gets as they are."""


class LuaLibrary:
    """A function library, run in this process: the real Lua source, in Lua 5.1 as embedded in the servers.

    Holds: values are converted between Lua and replies by the rules of Redis: false is nil, numbers are truncated to
    integers, an array ends at its first nil. An error in a command ends the function and keeps its earlier writes.
    Does not: sandbox the source, which is our own.
    """

    def __init__(self, source: bytes, call: CommandCall) -> None:
        """Run the source, which registers its functions.

        Args:
            source: starts with `#!lua name=<name>`.
            call: performs a command for `redis.call`.
        """
        import lupa.lua51

        shebang = source.partition(b"\n")[0]
        self.name = shebang.partition(b"name=")[2].strip()
        self.functions: dict[bytes, Any] = {}
        self._call = call
        self._lua = lupa.lua51.LuaRuntime(encoding=None, register_eval=False)
        redis = {b"call": self._redis_call, b"pcall": self._redis_pcall, b"sha1hex": _hash_text}
        redis[b"register_function"] = self.functions.__setitem__
        self._table = self._lua.table_from
        self._statuses: dict[bytes, Any] = {}
        """Status reply → its table, which no function changes."""
        self._lua.globals()[b"redis"] = self._lua.table_from(redis)
        self._lua.globals()[b"cmsgpack"] = self._lua.table_from({b"unpack": self._unpack})
        self._lua.globals()[b"loadstring"](_compile(source))()

    def run(self, name: bytes, keys: Arguments, arguments: Arguments) -> Any:
        """Call a function and return its reply.

        Raises:
            ReplyError: the function does not exist, or a command in it failed.
        """
        function = self.functions.get(name)
        if function is None:
            raise ReplyError("ERR Function not found")
        return self._to_reply(function(self._lua.table_from(keys), self._lua.table_from(arguments)))

    def _redis_call(self, *command: Any) -> Any:
        reply = self._call([part if type(part) is bytes else _to_argument(part) for part in command])
        kind = type(reply)
        if kind is bytes or kind is int:
            return reply
        return False if reply is None else self._to_lua(reply)

    def _redis_pcall(self, *command: Any) -> Any:
        try:
            return self._redis_call(*command)
        except ReplyError as error:
            return self._lua.table_from({b"err": str(error).encode()})

    def _unpack(self, packed: bytes) -> Any:
        return self._lua.table_from(msgpack.unpackb(packed, raw=True), recursive=True)

    def _to_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if type(reply) is list:
            return self._table([item if type(item) in _SAME_IN_LUA else self._to_lua(item) for item in reply])
        if type(reply) is StatusReply:
            if reply not in self._statuses:
                self._statuses[reply] = self._table({b"ok": bytes(reply)})
            return self._statuses[reply]
        return reply

    def _to_reply(self, value: Any) -> Any:
        if value is None or value is False:
            return None
        if isinstance(value, bytes):
            return value
        if isinstance(value, int | float):
            return int(value)
        items = []
        position = 1
        while (item := value[position]) is not None:
            items.append(self._to_reply(item))
            position += 1
        return items


class MemoryConnection:
    """A `Connection` to a `MemoryServer`."""

    is_cluster = False

    def __init__(self, server: MemoryServer | None = None) -> None:
        self.server = server or MemoryServer()
        self._blocked: set[asyncio.Future[Any]] = set()

    @property
    def connects(self) -> int:
        """See `Connection.connects`."""
        return self.server.restarts + 1

    async def call(self, *command: Argument) -> Any:
        """See `Connection.call`."""
        return (await self.call_many([command]))[0]

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """See `Connection.call_many`."""
        await asyncio.sleep(0)  # like a network, let other tasks run before the execution and before the reply
        replies = [await self.reply_to(command) for command in commands]
        await asyncio.sleep(0)
        return [check_reply(reply) for reply in replies]

    async def reply_to(self, command: Sequence[Argument]) -> Any:
        """Return the reply to a command at once, an error as a value; only a blocking read waits."""
        packed = [part if isinstance(part, bytes) else str(part).encode() for part in command]
        read = StreamRead.parse(packed)
        if read is None or read.block_ms is None:
            try:
                return self.server.execute(packed)
            except ReplyError as error:
                return error
        future = self.server.start_read(read)
        self._blocked.add(future)
        future.add_done_callback(self._blocked.discard)
        return await future

    def another(self, *, reply_timeout_seconds: float) -> MemoryConnection:  # noqa: ARG002  (nothing is ever lost)
        """See `Connection.another`."""
        return MemoryConnection(self.server)

    async def aclose(self) -> None:
        """See `Connection.aclose`."""
        for future in list(self._blocked):
            if not future.done():
                future.set_exception(OutcomeUnknown("The connection to the store was closed before the reply."))


def _hash_text(text: bytes) -> bytes:
    return sha1(text, usedforsecurity=False).hexdigest().encode()


def end_read(future: asyncio.Future[Any]) -> None:
    """Answer a blocked read whose time is over."""
    if not future.done():
        future.set_result(None)


def _to_argument(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    assert type(value) in (int, float), "commands take strings and numbers"
    return b"%d" % value if value == int(value) else b"%.17g" % value
