"""Runs code under test in a process for itself, and lets tests in another process use it: `--subject` is the former.

Holds: tests compare values in a process that the code under test never enters. Values of plain types travel as values,
everything else as a handle, so neither its `__eq__` nor a patch of unittest has an effect.
Does not: keep the identity of lists and dictionaries, or serve several threads.
"""

from __future__ import annotations

import builtins
import json
import os
import struct
import subprocess
import sys
from datetime import date, datetime, timedelta, timezone
from datetime import time as day_time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
MESSAGE_LIMIT_BYTES = 64 * 2**20
_PLAIN_EXCEPTIONS = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}


class SubjectEnded(Exception):
    """The process of the code under test has ended."""


class Peer:
    """One end of the connection between tests and subject: calls objects of the other end, and serves its own.

    Values of plain types travel as values, and everything else as a handle. The end with the tests is careful: the
    other end can call what it was given and read the public attributes of objects of the tests' own classes, no more.
    """

    def __init__(self, reading: int, writing: int, *, is_careful: bool) -> None:
        self._reading = os.fdopen(reading, "rb")
        self._writing = os.fdopen(writing, "wb")
        self._is_careful = is_careful
        self._given: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Any] = {}
        self._classes: dict[int, type[BaseException]] = {}
        self.own_modules: set[str] = set()

    def ask(self, what: str, *parts: Any) -> Any:
        """Ask the other end, and serve it until it answers."""
        self._send(["ask", what, [self.encode(part) for part in parts]])
        while True:
            message = self._receive()
            if message[0] == "ask":
                self._serve(message)
                continue
            if message[0] == "raise":
                raise self.decode(message[1])
            for place, state in message[2]:
                _restore(parts[1][place], self.decode(state))
            return self.decode(message[1])

    def serve(self) -> None:
        """Serve the other end until it goes away."""
        while True:
            try:
                message = self._receive()
            except SubjectEnded:
                return
            self._serve(message)

    def _serve(self, message: list[Any]) -> None:
        try:
            _, what, coded = message
            parts = [self.decode(part) for part in coded]
            given = parts[1] if what == "call" else ()
            result = self._perform(what, parts)
            changed = []
            if not self._is_careful and what == "call":
                after = self.encode(given)["t"]
                before = coded[1]["t"]
                changed = [
                    [n, after[n]] for n, value in enumerate(given) if after[n] != before[n] and _is_mutable(value)
                ]
            self._send(["return", self.encode(result), changed])
        except SubjectEnded:
            raise
        except BaseException as error:
            self._send(["raise", self.encode(error)])

    def _perform(self, what: str, parts: list[Any]) -> Any:
        match what:
            case "call":
                called, arguments, named = parts
                return called(*arguments, **named)
            case "get":
                return self._attribute(parts[0], parts[1])
            case "method":
                thing, name, arguments = parts
                if self._is_careful and name not in ("__iter__", "__next__", "__len__", "__getitem__", "__contains__"):
                    raise AttributeError(name)
                if name in ("__iter__", "__bool__", "__str__", "__repr__"):
                    return {"__iter__": iter, "__bool__": bool, "__str__": str, "__repr__": repr}[name](thing)
                if not hasattr(type(thing), name):
                    raise TypeError(f"{type(thing).__name__} has no {name}")
                return getattr(type(thing), name)(thing, *arguments)
        if self._is_careful:
            raise AttributeError(what)
        match what:
            case "set":
                return setattr(*parts)
            case "import":
                __import__(parts[0])
                return sys.modules[parts[0]]
        raise AttributeError(what)

    def _attribute(self, thing: Any, name: str) -> Any:
        if self._is_careful:
            is_own = type(thing).__module__ in self.own_modules and not name.startswith("_")
            if not is_own or not (name in vars(thing) or callable(vars(type(thing)).get(name))):
                raise AttributeError(name)
        try:
            return getattr(thing, name)
        except AttributeError:
            if not isinstance(thing, ModuleType):
                raise
            try:
                __import__(f"{thing.__name__}.{name}")
            except ImportError:
                raise AttributeError(name) from None
            return getattr(thing, name)

    def encode(self, value: Any) -> Any:
        """Return a value as JSON has it."""
        if value is None or isinstance(value, TracebackType):
            return None
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            return {"i": hex(int(value))}
        if isinstance(value, float):
            return {"f": float.hex(float(value))}
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, (bytes, bytearray)):
            return {"b": bytes(value).hex(), "a": isinstance(value, bytearray)}
        if isinstance(value, tuple):
            return {"t": [self.encode(one) for one in tuple.__iter__(value)]}
        if isinstance(value, list):
            return {"l": [self.encode(one) for one in list.__iter__(value)]}
        if isinstance(value, dict):
            return {"d": [[self.encode(key), self.encode(one)] for key, one in dict.items(value)]}
        if isinstance(value, (set, frozenset)):
            return {"s": [self.encode(one) for one in value], "z": isinstance(value, frozenset)}
        if isinstance(value, range):
            return {"r": [value.start, value.stop, value.step]}
        if isinstance(value, datetime):
            offset = value.utcoffset()
            return {
                "m": value.replace(tzinfo=None).isoformat(),
                "o": None if offset is None else offset.total_seconds(),
            }
        if isinstance(value, date):
            return {"y": value.isoformat()}
        if isinstance(value, day_time) and value.tzinfo is None:
            return {"c": value.isoformat()}
        if isinstance(value, timedelta):
            return {"w": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, timezone):
            return {"u": value.utcoffset(None).total_seconds()}
        if isinstance(value, Decimal):
            return {"n": str(value)}
        if isinstance(value, Fraction):
            return {"q": [hex(value.numerator), hex(value.denominator)]}
        if isinstance(value, type) and issubclass(value, BaseException):
            return self._encode_class(value)
        if isinstance(value, BaseException):
            return self._encode_exception(value)
        handle = value.__dict__.get("_handle_of_peer") if type(value) is Proxy else None
        return {"mine": handle} if handle is not None else {"h": self._number(value)}

    def _encode_class(self, kind: type[BaseException]) -> Any:
        handle = kind.__dict__.get("_handle_of_peer")
        if handle is not None:
            return {"mine": handle}
        if _PLAIN_EXCEPTIONS.get(kind.__name__) is kind:
            return {"k": kind.__name__}
        bases = [self._encode_class(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        return {"h": self._number(kind), "kind": kind.__name__, "bases": bases}

    def _encode_exception(self, error: BaseException) -> Any:
        handle = error.__dict__.get("_handle_of_peer")
        if handle is not None:
            return {"mine": handle}
        attributes = {name: value for name, value in error.__dict__.items() if not name.startswith("_")}
        return {
            "e": self._encode_class(type(error)),
            "h": self._number(error),
            "args": self.encode(error.args),
            "d": self.encode(attributes),
        }

    def decode(self, coded: Any) -> Any:
        """Return the value of what `encode` has made at the other end."""
        if coded is None or isinstance(coded, (bool, str)):
            return coded
        match coded:
            case {"i": text}:
                return int(text, 16)
            case {"f": text}:
                return float.fromhex(text)
            case {"b": text, "a": is_array}:
                return bytearray.fromhex(text) if is_array else bytes.fromhex(text)
            case {"t": parts}:
                return tuple(map(self.decode, parts))
            case {"l": parts}:
                return list(map(self.decode, parts))
            case {"e": kind, "h": handle, "args": arguments, "d": attributes}:
                return self._decode_exception(kind, handle, self.decode(arguments), self.decode(attributes))
            case {"d": pairs}:
                return {self.decode(key): self.decode(value) for key, value in pairs}
            case {"s": parts, "z": is_frozen}:
                return (frozenset if is_frozen else set)(map(self.decode, parts))
            case {"r": parts}:
                return range(*map(int, parts))
            case {"m": text, "o": offset}:
                zone = None if offset is None else timezone(timedelta(seconds=offset))
                return datetime.fromisoformat(text).replace(tzinfo=zone)
            case {"y": text}:
                return date.fromisoformat(text)
            case {"c": text}:
                return day_time.fromisoformat(text)
            case {"w": [days, rest, micro]}:
                return timedelta(days, rest, micro)
            case {"u": offset}:
                return timezone(timedelta(seconds=offset))
            case {"n": text}:
                return Decimal(text)
            case {"q": [above, below]}:
                return Fraction(int(above, 16), int(below, 16))
            case {"k": name}:
                return _PLAIN_EXCEPTIONS[name]
            case {"mine": int(number)} if 0 <= number < len(self._given):
                return self._given[number]
            case {"h": int(handle), "kind": str(name), "bases": list(bases)}:
                return self._decode_class(handle, name, bases)
            case {"h": int(handle)}:
                if handle not in self._proxies:
                    self._proxies[handle] = proxy = Proxy()
                    proxy.__dict__.update(_handle_of_peer=handle, _peer=self)
                return self._proxies[handle]
        raise ValueError("what the other process has sent is not a value")

    def _decode_class(self, handle: int, name: str, bases: list[Any]) -> type[BaseException]:
        if handle not in self._classes:
            above = tuple(self.decode(base) for base in bases) or (Exception,)
            body = {"_handle_of_peer": handle, "_peer": self, "__getattr__": _attribute_of_exception}
            self._classes[handle] = type(name, above, body)
        return self._classes[handle]

    def _decode_exception(self, kind: Any, handle: int, arguments: tuple[Any, ...], attributes: Any) -> BaseException:
        found = self.decode(kind)
        error: BaseException = found.__new__(found, *arguments)
        error.args = arguments
        error.__dict__.update({**attributes, "_handle_of_peer": handle, "_peer": self})
        return error

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._given)
            self._given.append(value)  # kept, so that no other object gets its id
        return self._numbers[id(value)]

    def _send(self, message: Any) -> None:
        raw = json.dumps(message).encode()
        try:
            self._writing.write(struct.pack(">I", len(raw)) + raw)
            self._writing.flush()
        except (BrokenPipeError, ValueError) as error:
            raise SubjectEnded("The process of the code under test has ended.") from error

    def _receive(self) -> list[Any]:
        head = self._reading.read(4)
        size = struct.unpack(">I", head)[0] if len(head) == 4 else MESSAGE_LIMIT_BYTES + 1
        raw = self._reading.read(size) if size <= MESSAGE_LIMIT_BYTES else b""
        if len(raw) != size:
            raise SubjectEnded("The process of the code under test has ended.")
        message: list[Any] = json.loads(raw)
        return message


def _is_mutable(value: Any) -> bool:
    return isinstance(value, (list, dict, set, bytearray))


def _restore(value: Any, state: Any) -> None:
    """Give an argument the content that the call has left in it."""
    if isinstance(value, (list, bytearray)):
        value[:] = state
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(state)


def _attribute_of_exception(error: BaseException, name: str) -> Any:
    """Return an attribute of an exception of the other end: one that is computed."""
    if name.startswith("_") or "_handle_of_peer" not in error.__dict__:
        raise AttributeError(name)
    return error.__dict__["_peer"].ask("get", error, name)


class Proxy:
    """An object of the other end. It is equal to itself alone: whatever its `__eq__` says does not count."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["_peer"].ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_peer"].ask("set", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__dict__["_peer"].ask("call", self, arguments, named)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _forward(name: str) -> Any:
    def method(self: Proxy, *arguments: Any) -> Any:
        return self.__dict__["_peer"].ask("method", self, name, arguments)

    return method


for _name in (
    *("__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__bool__"),
    *("__enter__", "__exit__", "__str__", "__repr__", "__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(Proxy, _name, _forward(_name))


class RemoteModule(ModuleType):
    """A module of the subject."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["_thing"]._peer.ask("get", self.__dict__["_thing"], name)


class Subject:
    """The code under test, in a process for itself."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", str(Path(__file__).resolve()), "--subject"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        reading, writing = os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno())
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()
        self.peer = Peer(reading, writing, is_careful=True)

    def module(self, name: str) -> RemoteModule:
        """Import a module there, and return it as one of ours."""
        found = RemoteModule(name)
        found.__dict__["_thing"] = self.peer.ask("import", name)
        found.__dict__["__path__"] = []
        return found

    def end(self) -> None:
        """Kill it. What it has started is killed with the group of the tests."""
        self._process.kill()
        self._process.wait()


def _serve_subject() -> None:
    """Be the subject: import and call what the tests ask for."""
    reading, writing = os.dup(0), os.dup(1)
    for descriptor in (reading, writing):
        os.set_inheritable(descriptor, False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    sys.path.insert(0, str(HERE))
    from guarded import confine

    sys.path.pop(0)
    confine()
    sys.path.insert(0, str(Path.cwd()))
    sys.argv = [""]
    Peer(reading, writing, is_careful=False).serve()
    os._exit(0)


if __name__ == "__main__":
    _serve_subject()
