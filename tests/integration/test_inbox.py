"""The stream contract: entries of the inbox are answered, carried out once, and never dropped."""

from __future__ import annotations

import pytest

from broker.coordination.quarantine import Quarantine
from broker.store import keys
from deckhands.ingress.inbox import MAX_ENTRY_BYTES
from tests.inbox_parts import put, replies
from tests.ingress_parts import Producer, saying
from tests.polling import until

MALFORMED = {
    "no JSON": ("{", "The field request is not JSON."),
    "no object": ("[]", "The request cannot be used"),
    "an unknown field": ('{"task": "x", "colour": "red"}', "colour"),
    "too deep": ('{"task": "x", "output": ' + '{"a":' * 200 + "1" + "}" * 200 + "}", "nested"),
    "no task": ('{"id": "mine"}', "task: it is missing"),
    "an unknown agent": ('{"task": "x", "agent": "NobodyAgent"}', "NobodyAgent"),
    "a key": ('{"task": "x", "idempotency_key": "k"}', "Use the field id"),
    "too large": ('{"task": "' + "x" * MAX_ENTRY_BYTES + '"}', "larger than"),
    "far too many": ("[" * 100_000, "not JSON"),
}


async def until_empty(producer: Producer) -> None:
    connection = producer.cluster.client.store.connection

    async def is_empty() -> bool:
        return not await connection.call("XLEN", keys.INBOX)

    await until(is_empty, limit=60.0, what="an empty inbox")


async def test_an_entry_is_accepted_carried_out_and_settled(producer: Producer) -> None:
    store = producer.cluster.client.store
    request = {"id": "order-7", "task": "do it", **producer.options(saying("done"))}
    await put(store, request)

    async def is_settled() -> bool:
        return [reply.event for reply in await replies(store)] == ["accepted", "settled"]

    await until(is_settled, limit=60.0, what="both answers")
    accepted, settled = await replies(store)
    assert accepted.request_id == settled.request_id == "order-7"
    assert (accepted.n, settled.n) == ("1", "2")
    assert settled.content == (await producer.cluster.client.summary(accepted.conversation_id)).as_json()
    await put(store, request)  # a producer that lost the answers asks again
    await until_empty(producer)
    assert [reply.event for reply in await replies(store)] == ["accepted", "settled"] * 2
    assert len(await producer.cluster.client.recent()) == 1
    assert 0 < await store.connection.call("TTL", keys.replies_key("shop")) <= 7 * 24 * 3600


async def test_an_entry_without_an_answer_is_carried_out_too(producer: Producer) -> None:
    store = producer.cluster.client.store
    request = f'{{"task": "do it", "model": "{producer.options(saying("done"))["model"]}"}}'
    await store.connection.call("XADD", keys.INBOX, "*", "v", "1", "request", request)
    await until_empty(producer)
    (row,) = await producer.cluster.client.recent()
    await producer.cluster.settle([row.conversation_id])
    names = store.keys(row.conversation_id)
    assert await store.connection.call("EXISTS", names.caller) == 0
    assert await store.connection.call("ZCARD", names.shard.awaited) == 0


@pytest.mark.parametrize("what", MALFORMED)
async def test_what_cannot_be_used_is_answered_and_kept(producer: Producer, what: str) -> None:
    text, reason = MALFORMED[what]
    store = producer.cluster.client.store
    entry = await put(store, text)
    await until_empty(producer)
    (reply,) = await replies(store)
    assert reply.event == "rejected"
    assert reply.request_id == ("mine" if what == "no task" else entry)
    assert reply.content.keys() == {"code", "message", "remedy"}
    assert reason in reply.content["message"] + reply.content["remedy"]
    (kept,) = await Quarantine(store).list_items()
    assert (kept.key, kept.entry_id) == (keys.INBOX, entry)
    assert await producer.cluster.client.recent() == []


async def test_no_name_leads_to_another_key(producer: Producer) -> None:
    store = producer.cluster.client.store
    names = ("", "..:x", "a b", "x" * 65, "deck:inbox\n", "é")
    for name in names:
        await put(store, {"task": "x"}, reply_to=name)
    await put(store, {"task": "x"}, reply_to="v2", v="2")
    await store.connection.call("XADD", keys.INBOX, "*", "odd", b"\xff\xfe")
    await until_empty(producer)
    assert len(await Quarantine(store).list_items()) == len(names) + 2
    _, found = await store.connection.call("SCAN", "0", "MATCH", "deck:replies:*", "COUNT", "100000")
    assert found == [b"deck:replies:v2"]
    assert await producer.cluster.client.recent() == []


async def test_an_inbox_of_another_type_ends_no_ingress(producer: Producer) -> None:
    store = producer.cluster.client.store
    await store.connection.call("DEL", keys.INBOX)
    await store.connection.call("SET", keys.INBOX, "no stream")
    await until(lambda: "WRONGTYPE" in producer.cluster.log_of("d1"), limit=60.0, what="a line about the inbox")
    await store.connection.call("DEL", keys.INBOX)
    await put(store, {"task": "x", **producer.options(saying("done"))})
    await until(lambda: replies(store), limit=60.0, what="an answer")
    assert producer.cluster.workers["d1"].poll() is None
