"""Whatever a producer adds to the inbox is answered or put aside without its secrets, and ends no ingress."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping

import pytest

from broker.coordination.quarantine import Quarantine
from broker.runtime.errors import StoreRefused
from broker.store import keys
from broker.store.store import Store
from deckhands.client.tasks.tasks import derive_conversation_id
from deckhands.ingress.context import IngressContext
from deckhands.ingress.inbox import InboxReader
from tests.inbox_parts import put, replies
from tests.ingress_parts import Producer, saying
from tests.integration.test_inbox_edges import NoResults, serving, until_empty
from tests.polling import unhurried, until

SEED = 20261125
AT_ONCE = 100
VALUES: tuple[object, ...] = (
    *(None, True, -1, 0, 1e308, 10**400, "", " ", "x", "\ud800", "\udfff\ud800", "\x00", "../..", "/a\x00b"),
    *("[", "é" * 300),
    *([], {}, [[]], {"": ""}, {"\ud800": 1}, ["\udc00"], {"kind": "x"}, "x" * 5_000, "git+https://[::1/x#y", "*" * 500),
    *(float("nan"), float("inf"), {"path": "/a\x00b"}, {"type": "object", "title": "\udc00"}, ["nosuch/\ud800"]),
)
FIELDS = (
    *("id", "task", "agent", "model", "workspace", "limits", "tools", "output", "secrets", "headless", "tenant"),
    *("experiment", "priority", "title", "labels", "idempotency_key", "odd", "\ud800"),
)
RAW = (b"", b"{", b"null", b"[" * 50_000, b"\xff\xfe", b'{"a":' * 5_000, b'{"id":"\\ud800","task":"x"}', b"1" * 10_000)
NAMES = (b"shop", b"string", b"hash", b"set", b"", b"..:x", b"\xff", b"a b", b"x" * 65, b"\xed\xa0\x80")


def hostile_entries(seed: int, count: int) -> Iterator[tuple[bytes, ...]]:
    """Fields and values of entries that no producer of ours sends; all name an unknown agent, or worse."""
    chance = random.Random(seed)
    for _ in range(count):
        text = chance.choice(RAW) if chance.random() < 0.2 else _request(chance)
        fields = [(b"v", b"1"), (b"request", text), (b"reply_to", chance.choice(NAMES))]
        if chance.random() < 0.1:
            fields[chance.randrange(3)] = (chance.choice((b"", b"\xff", b"v", b"request")), chance.randbytes(20))
        if chance.random() < 0.05:
            fields = fields * chance.randint(2, 50)
        yield tuple(part for field in fields for part in field)


def _request(chance: random.Random) -> bytes:
    request: dict[str, object] = {"task": "x", "agent": "NobodyAgent", "id": chance.choice(("a", "taken", "b"))}
    for name in chance.sample(FIELDS, chance.randint(1, 4)):
        request[name] = chance.choice(VALUES)
    if chance.random() < 0.05:
        deep: object = 1
        for _ in range(chance.choice((31, 33, 400))):
            deep = {"a": deep}
        request["output"] = deep
    return json.dumps(request).encode()


@pytest.mark.parametrize(
    "count", [pytest.param(2_000, id="some"), pytest.param(20_000, id="many", marks=pytest.mark.slow)]
)
async def test_no_hostile_entry_ends_an_ingress(producer: Producer, count: int) -> None:
    print(f"seed {SEED}")
    cluster, store = producer.cluster, producer.cluster.client.store
    call = store.connection.call
    others = (("SET", "string", "x"), ("HSET", "hash", "x", "y"), ("SADD", "set", "x"))
    for command, name, *rest in others:
        await call(command, keys.replies_key(name), *rest)
    for name in ("taken", "a"):
        await call("SET", store.known_keys(derive_conversation_id(f"inbox:shop:{name}")).caller, "no hash")
    entries = list(hostile_entries(SEED, count))
    for at in range(0, count, AT_ONCE):
        await store.connection.call_many([("XADD", keys.INBOX, "*", *fields) for fields in entries[at : at + AT_ONCE]])

    async def is_empty() -> bool:
        assert cluster.workers["d1"].poll() is None, cluster.log_of("d1")[-3000:]
        return not await call("XLEN", keys.INBOX)

    await until(is_empty, limit=unhurried(120.0 + count / 20), what="an empty inbox")
    for name in ("good", "string", "hash", "set"):
        await put(store, {"id": "good", "task": "do it", **producer.options(saying("done"))}, reply_to=name)

        async def is_settled(name: str = name) -> bool:
            return {"accepted", "settled"} <= {
                reply.event for reply in await replies(store, name) if reply.request_id == "good"
            }

        await until(is_settled, limit=unhurried(60.0), what=f"both answers to {name}")
    assert cluster.workers["d1"].poll() is None
    with pytest.raises(StoreRefused, match="WRONGTYPE"):
        await call("XLEN", f"{{{keys.replies_key('string')}}}:unreadable")


CANARY = "c4n4ry-of-the-inbox"
REQUEST = {"task": "deploy", "secrets": {"TOKEN": CANARY}}


@pytest.mark.parametrize(
    ("fields", "is_shown"),
    [
        ({"v": "1", "request": json.dumps(REQUEST | {"no_such_field": 1})}, True),
        ({"v": "1", "request": json.dumps([REQUEST])}, True),
        ({"v": "1", "request": json.dumps({"task": "", "agent": {"secrets": {"secrets": [CANARY]}}})}, True),
        ({"v": "1", "request": '{"task": "", "secr\\u0065ts": {"TOKEN": "' + CANARY + '"}}'}, True),
        ({"v": "1", "request": json.dumps(REQUEST)[:-1]}, False),
        ({"v": "1", "request": '{"secr\\u0065ts": {"TOKEN": "' + CANARY}, False),
        ({"v": "1", "Request": json.dumps(REQUEST)}, True),
        ({"v": "1", "request": json.dumps({"task": "", "Secrets": {"TOKEN": CANARY}})}, True),
        ({"v": "1", "task": "deploy", "secrets": json.dumps({"TOKEN": CANARY})}, True),
        ({"v": "2", "request": json.dumps(REQUEST)}, True),
        ({"v": "1", "request": json.dumps({"task": "deploy", "workspace": "nowhere"})}, True),
    ],
)
async def test_secrets_of_an_unusable_entry_are_not_kept(
    valkey_store: Store, fields: Mapping[str, str], is_shown: bool
) -> None:
    await valkey_store.connection.call("XADD", keys.INBOX, "*", *(part for item in fields.items() for part in item))
    async with serving(InboxReader(IngressContext(valkey_store, NoResults()), "d1").read()):  # type: ignore[arg-type]
        await until_empty(valkey_store)
    (kept,) = await Quarantine(valkey_store).list_items()
    assert CANARY not in kept.held
    assert ("task" in kept.held) is is_shown
