"""What an agent says last is whole in every summary, however long it is, also of an archived conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.contract.actions import AgentFinishAction, MessageAction
from broker.contract.events import EventSource
from broker.store.store import Store
from deckhands.client.archive.storage import ArchiveStorage
from deckhands.server.conversations import result_of
from deckhands.server.gateway import Gateway
from deckhands.server.streams import EventStream
from tests.archive_parts import begin_ended, retired
from tests.server_parts import add_principal

ANSWER = " ".join(map(str, range(20_000)))
OUTPUTS = {"text": "x" * 100_000}


async def ends_of(gateway: Gateway, name: str, after: int) -> list[object]:
    """What the end of a stream says."""
    stream = EventStream(gateway, await add_principal(gateway.client.store), name, after=after, until_settled=True)
    items = [item async for batch in stream.batches() for item in batch]
    return [item.content["summary"]["message"] for item in items if item.kind == "end"]


async def test_a_long_answer_is_whole_in_every_summary(valkey_store: Store, tmp_path: Path) -> None:
    gateway = Gateway(valkey_store, str(tmp_path / "archive"))
    client = gateway.client
    await begin_ended(client, "said", AgentFinishAction(final_thought=ANSWER, outputs=OUTPUTS))
    await begin_ended(client, "asked", MessageAction(content=ANSWER, source=EventSource.AGENT))
    for name in ("said", "asked"):
        words = next(event for event in await client.events(name) if ANSWER[:100] in str(event))
        assert len(str(words)) < len(ANSWER), "the log has its head and tail"
        last_id = await client.log.load_last_id(name)
        assert await ends_of(gateway, name, 0) == await ends_of(gateway, name, last_id) == [ANSWER]
    outputs = {"said": OUTPUTS, "asked": {}}
    for place in ("store", "archive"):
        for name in ("said", "asked"):
            summary = await client.summary(name)
            assert (summary.message, summary.outputs) == (ANSWER, outputs[name]), place
            assert await client.wait_until_settled(name, timeout_seconds=30) == summary
            assert await client.cancel(name) == summary
            assert (await result_of(client, name)).summary == summary.as_json()
        await retired(valkey_store, tmp_path / "archive", tmp_path)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_unreadable_long_answer_is_shown_as_head_and_tail(
    valkey_store: Store, tmp_path: Path, is_lost: bool
) -> None:
    place = tmp_path / "archive"
    client = Gateway(valkey_store, str(place)).client
    await begin_ended(client, "said", AgentFinishAction(final_thought=ANSWER))
    references = [ref for event in await client.events("said") for ref in (event.blobs or {}).values()]
    blobs = [valkey_store.keys("said").blob(ref.sha256) for ref in references]
    await valkey_store.connection.call("DEL", *blobs)
    if is_lost:
        file = Path(ArchiveStorage(str(place)).path("said"))
        file.parent.mkdir(parents=True)
        file.write_bytes(b"damaged")
    else:
        await valkey_store.connection.call_many([("HSET", key, "another", "type") for key in blobs])
    summary = await client.summary("said")
    assert ANSWER[:100] in summary.message
    assert len(summary.message) < len(ANSWER)
