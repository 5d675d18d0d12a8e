"""Helpers for tests of the inbox: entries as producers write them, and the replies that they read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from broker.store import keys
from broker.store.connection import decode_fields
from broker.store.store import Store

PAGE = 1_000


@dataclass(frozen=True, slots=True)
class Reply:
    request_id: str
    event: str
    n: str
    conversation_id: str
    content: dict[str, Any]


async def put(store: Store, request: dict[str, Any] | str, *, reply_to: str = "shop", v: str = "1") -> str:
    text = request if isinstance(request, str) else json.dumps(request)
    fields = ("v", v, "request", text, "reply_to", reply_to)
    entry = await store.retry(lambda: store.connection.call("XADD", keys.INBOX, "*", *fields))
    found: str = entry.decode()
    return found


async def replies(store: Store, name: str = "shop") -> list[Reply]:
    entries = []
    while True:
        after = f"({entries[-1][0].decode()}" if entries else "-"
        page = await store.retry(
            lambda after=after: store.connection.call("XRANGE", keys.replies_key(name), after, "+", "COUNT", PAGE)  # type: ignore[misc]
        )
        entries += page
        if len(page) < PAGE:
            break
    found = [decode_fields(fields) for _, fields in entries]
    assert all(reply["v"] == "1" for reply in found)
    return [
        Reply(reply["id"], reply["event"], reply["n"], reply["conversation_id"], json.loads(reply["json"]))
        for reply in found
    ]


async def answers(store: Store, name: str = "shop") -> int:
    """How many answers a producer has so far, repeats included."""
    found = await store.retry(lambda: store.connection.call("XLEN", keys.replies_key(name)))
    assert isinstance(found, int)
    return found
