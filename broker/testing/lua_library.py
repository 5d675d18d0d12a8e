"""A function library of the store, run in this process: the real Lua source, in Lua 5.1 as embedded in the servers.

Holds: values are converted between Lua and replies by the rules of Redis: false is nil, numbers are truncated to
integers, an array ends at its first nil. An error in a command ends the function and keeps its earlier writes.
Does not: sandbox the source, which is our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
from hiredis import ReplyError

from broker.testing.keyspace import Arguments, Status

Call = Callable[[Arguments], Any]


class LuaLibrary:
    """One loaded library."""

    def __init__(self, source: bytes, call: Call) -> None:
        """Run the source, which registers its functions.

        Args:
            source: starts with `#!lua name=<name>`.
            call: performs a command for `redis.call`.
        """
        import lupa.lua51

        shebang, _, body = source.partition(b"\n")
        self.name = shebang.partition(b"name=")[2].strip()
        self.functions: dict[bytes, Any] = {}
        self._call = call
        self._lua = lupa.lua51.LuaRuntime(encoding=None, register_eval=False)
        redis = {b"call": self._redis_call, b"pcall": self._redis_pcall}
        redis[b"register_function"] = self.functions.__setitem__
        self._lua.globals()[b"redis"] = self._lua.table_from(redis)
        self._lua.globals()[b"cmsgpack"] = self._lua.table_from({b"unpack": self._unpack})
        self._lua.execute(b"\n" + body)  # the empty line preserves the line numbers of errors

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
        return self._to_lua(self._call([_argument(part) for part in command]))

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
        if isinstance(reply, Status):
            return self._lua.table_from({b"ok": bytes(reply)})
        if isinstance(reply, list):
            return self._lua.table_from([self._to_lua(item) for item in reply])
        return reply

    def _to_reply(self, value: Any) -> Any:
        if value is None or value is False:
            return None
        if isinstance(value, bytes):
            return value
        if isinstance(value, int | float):
            return int(value)
        items, position = [], 1
        while (item := value[position]) is not None:
            items.append(self._to_reply(item))
            position += 1
        return items


def _argument(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    assert type(value) in (int, float), "commands take strings and numbers"
    return b"%d" % value if value == int(value) else b"%.17g" % value
