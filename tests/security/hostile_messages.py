"""Hostile messages for Celery's workers: seeded, and each a text that is pushed unchanged.

Holds: the same seed gives the same messages. No message is a permitted one that ends a worker, such as the command
`shutdown` where the broker has a password.
"""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

TASK = "celery.accumulate"
"""A task that every Celery worker has."""
COMMANDS = (
    *("ping", "stats", "conversations", "drain", "shutdown", "pool_restart", "pool_grow", "pool_shrink", "autoscale"),
    *("add_consumer", "cancel_consumer", "rate_limit", "time_limit", "revoke", "terminate", "election", "hello"),
    *("enable_events", "disable_events", "heartbeat", "conf", "report", "query_task", "registered", "active"),
    *("revoke_by_stamped_headers", "objgraph", "memdump", "memsample", "clock", "scheduled", "reserved", "revoked"),
    *("active_queues", "", "no such command", "__class__"),
)
DEEP = 2_000
LARGE = 200_000


def to_bytes(entry: str | bytes) -> bytes:
    return entry if isinstance(entry, bytes) else entry.encode("utf-8", "surrogatepass")


def plain_message(task: str = TASK, arguments: tuple[Any, ...] = (1, 2), *, name: str = "good") -> str:
    """A message as Celery's own producers write it."""
    return json.dumps(_message(_task_headers(task, name), json.dumps([list(arguments), {}, {}]), name))


def plain_command(method: str, **further: Any) -> str:
    """A remote control command as Celery's own clients write it."""
    body = {"method": method, "arguments": {}, "destination": None, "pattern": None, "matcher": None, **further}
    return json.dumps(_message({"clock": 1, "expires": 0}, json.dumps(body)))


CLASSICS = (
    *("[[], {}]", "null", "0", '"text"', '{"a": 1}', "{}", "not json", "", "\x00", "NaN", '{"body": "e30="}'),
    *('{"properties": null}', '{"properties": {}}', '{"properties": {"delivery_tag": "t"}}'),
    '{"properties": {"delivery_tag": ["t"], "delivery_info": {}}, "body": "x"}',
    '{"properties": {"delivery_tag": "t", "delivery_info": null}, "headers": null, "body": "x"}',
    '{"properties": {"delivery_tag": "t", "delivery_info": "x"}, "body": "x"}',
    *('{"__type__": "decimal", "__value__": "no number"}', '{"__type__": "uuid", "__value__": 7}'),
    *('{"__type__": "unheard of", "__value__": {}}', '{"properties": {"__type__": "decimal", "__value__": "x"}}'),
    *("[" * 100_000, '{"a":' * 100_000),
)
"""Whole entries of a queue, and payloads of a channel."""
UNDER_WAY = ("not json", "{}", "[1, 2]", '[[], "", "deckhands.tool"]', "[{}, [], {}]", "[" * 9_999)
"""What may stand among the messages that are under way."""


def hostile_tasks(seed: int, count: int) -> Iterator[str | bytes]:
    """Entries of a task queue: the classics, then mutations of a message that was good."""
    chance = random.Random(seed)
    yield from (classic for classic, _ in zip(CLASSICS, range(count), strict=False))
    for _ in range(count - len(CLASSICS)):
        yield _spoilt(chance, _message(_spoilt_headers(chance), _spoilt_body(chance), _tag(chance)))


def hostile_commands(seed: int, count: int, *, known: Sequence[str] = COMMANDS) -> Iterator[str | bytes]:
    """Payloads of the channel of remote control.

    Args:
        known: the commands that are among them.
    """
    chance = random.Random(seed)
    yield from (classic for classic, _ in zip(CLASSICS, range(count), strict=False))
    for _ in range(count - len(CLASSICS)):
        command = {
            "method": chance.choice(known) if chance.random() < 0.8 else _odd(chance),
            "arguments": _odd(chance) if chance.random() < 0.3 else _arguments(chance),
            "destination": _odd(chance) if chance.random() < 0.2 else None,
            "pattern": _odd(chance) if chance.random() < 0.2 else None,
            "matcher": chance.choice(("glob", "pcre", "no", 7, [])) if chance.random() < 0.2 else None,
        }
        if chance.random() < 0.6:
            command["reply_to"] = chance.choice((_odd(chance), _reply_to(chance)))
            command["ticket"] = _odd(chance)
        for name in list(command):
            if chance.random() < 0.05:
                del command[name]
        body = json.dumps(command) if chance.random() < 0.8 else _spoilt_body(chance)
        headers = {"clock": _odd(chance), "expires": _odd(chance)} if chance.random() < 0.3 else {"clock": 1}
        yield _spoilt(chance, _message(headers, body))


def _task_headers(task: Any, name: Any) -> dict[str, Any]:
    names = {"lang": "py", "task": task, "id": name, "root_id": name, "parent_id": None, "group": None}
    times = {"retries": 0, "eta": None, "expires": None, "timelimit": [None, None]}
    shown = {"argsrepr": "", "kwargsrepr": "", "origin": "test", "shadow": None}
    return names | times | shown | {"ignore_result": True, "stamped_headers": None, "stamps": {}}


def _message(headers: Any, body: str, tag: str = "") -> dict[str, Any]:
    return {
        "body": base64.b64encode(body.encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": {
            "correlation_id": "c",
            "reply_to": "r",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "deckhands.tool"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": tag,
        },
    }


def _tag(chance: random.Random) -> str:
    return "the same" if chance.random() < 0.1 else str(chance.getrandbits(32))


def _spoilt_headers(chance: random.Random) -> Any:
    headers = _task_headers(chance.choice((TASK, TASK, "celery.map", "celery.chord", "no.such.task")), _text(chance))
    for name in chance.sample(sorted(headers), chance.randint(0, 3)):
        if chance.random() < 0.3:
            del headers[name]
        else:
            headers[name] = _odd(chance)
    if chance.random() < 0.1:
        headers["compression"] = chance.choice(("application/x-gzip", "zlib", "bzip2", "no", 7))
    return _odd(chance) if chance.random() < 0.1 else headers


def _spoilt_body(chance: random.Random) -> str:
    match chance.randint(0, 6):
        case 0:
            return json.dumps([[], {}])
        case 1:
            return json.dumps(_odd(chance))
        case 2:
            return json.dumps([_odd(chance), _odd(chance), _odd(chance)])
        case 3:
            return "[" * chance.choice((3, DEEP, 100_000))
        case 4:
            link = {"task": _odd(chance), "args": _odd(chance), "kwargs": {}, "options": _odd(chance)}
            return json.dumps([[1], {}, {"callbacks": [link], "errbacks": _odd(chance), "chord": _odd(chance)}])
        case 5:
            return json.dumps({"task": TASK, "id": "x", "args": _odd(chance), "kwargs": _odd(chance)})
    return json.dumps([[1, 2], {}, {}])


def _spoilt(chance: random.Random, message: dict[str, Any]) -> str | bytes:
    """Spoil the envelope of some messages, and the text of a few."""
    if chance.random() < 0.4:
        for where in (message, message["properties"]):
            for name in chance.sample(sorted(where), chance.randint(0, 2)):
                if chance.random() < 0.4:
                    del where[name]
                else:
                    where[name] = _odd(chance)
            if not isinstance(message.get("properties"), dict):
                break
    if chance.random() < 0.1:
        message["content-type"] = chance.choice(("application/x-msgpack", "application/x-python-serialize", "", "yaml"))
    if chance.random() < 0.1:
        message["content-encoding"] = chance.choice(("binary", "utf-16", "rot13", "no such", ""))
    text = json.dumps(message)
    if chance.random() < 0.1:
        cut = chance.randrange(len(text))
        return text[:cut].encode() + chance.choice((b"", b"\xff\xfe", b"\x00", b"}}}}", b"\xc7\x01\x05x"))
    return text


def _odd(chance: random.Random) -> Any:
    """A value of an unexpected type or form."""
    match chance.randint(0, 13):
        case 0:
            return None
        case 1:
            return chance.choice((-1, 0, 1, 2**63, 10**400, 1e308, True))
        case 2:
            return float("nan")
        case 3:
            return []
        case 4:
            return {}
        case 5:
            return [_text(chance), {"a": None}]
        case 6:
            return {_text(chance): [1]}
        case 7:
            return "x" * LARGE if chance.random() < 0.02 else "\ud800"
        case 8:
            return _deep(chance.choice((3, 500)))
        case 9:
            kind = chance.choice(("decimal", "uuid", "datetime", "bytes", "date", "base64", "none such"))
            return {"__type__": kind, "__value__": chance.choice(("", "x", 7, None, {"hex": "z"}))}
        case 10:
            return chance.choice(("2024-13-99T99:99:99", "9999-12-31T23:59:59Z", "0001-01-01", "now", "1e999"))
    return _text(chance)


def _deep(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def _text(chance: random.Random) -> str:
    letters = string.ascii_letters + string.punctuation + "\x00\x1b\n é\x06\x16"
    return "".join(chance.choices(letters, k=chance.randint(0, 12)))


def _arguments(chance: random.Random) -> dict[str, Any]:
    names = ("task_id", "queue", "n", "task_name", "rate_limit", "signal", "terminate", "headers", "id", "topic", "max")
    names += ("modules", "reload", "from_node", "revoked", "with_defaults", "ids", "num", "type", "state", "samples")
    return {name: _odd(chance) for name in chance.sample(names, chance.randint(0, 2))}


def _reply_to(chance: random.Random) -> dict[str, Any]:
    exchange = chance.choice(("reply.celery.pidbox", "celery.pidbox", "", "celeryev", _odd(chance)))
    reply_to = {"exchange": exchange, "routing_key": chance.choice(("", "deckhands.tool", _odd(chance)))}
    if chance.random() < 0.2:
        del reply_to[chance.choice(("exchange", "routing_key"))]
    return reply_to
