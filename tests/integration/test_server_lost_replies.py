"""Actions over HTTP whose outcome the store has lost: repeated under their key, they have the answer of the first."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import pytest

from broker.contract.agent_state import AgentState
from broker.contract.observations import AgentStateChangedObservation
from broker.store.store import open_store
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from tests.broker_parts import claim, command, enter
from tests.server_parts import add_key
from tests.stores import LossyWire


def loses(what: bytes) -> Callable[[bytes], bool]:
    return lambda chunk: what in chunk


@pytest.mark.parametrize("action", ["confirm", "reject"])
async def test_repeated_request_with_lost_reply_is_not_refused(lossy_wire: LossyWire, action: str) -> None:
    store = await open_store(lossy_wire.url, patience_seconds=0)
    gateway = Gateway(store, options=ServerOptions(port=0))
    log, cid = gateway.client.log, await gateway.client.submit("do it")
    await enter(store, "w1")
    ownership = await claim(store, "w1", cid)

    async def become(state: AgentState) -> None:
        last_id = await log.load_last_id(cid)
        events = [command(), AgentStateChangedObservation(agent_state=state, action_id=last_id + 1)]
        await log.append_as_owner(ownership, events, expected_last_id=last_id, fields={"state": state.value})

    await become(AgentState.AWAITING_USER_CONFIRMATION)
    path, body = f"/conversations/{cid}/{action}", {"reason": "test"}
    login = {"Authorization": f"Bearer {await add_key(store)}"}
    async with (
        serve_in_loop(gateway) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=login) as client,
    ):
        lossy_wire.swallow = loses(b"appended")
        lost = await client.post(path, json=body, headers={"Idempotency-Key": "once"})
        lossy_wire.swallow = loses(b"never")
        assert (lost.status_code, lossy_wire.swallowed) == (503, 1)
        await become(AgentState.RUNNING)
        again = await client.post(path, json=body, headers={"Idempotency-Key": "once"})
        assert (again.status_code, again.json()) == (
            202,
            {"conversation_id": cid, "version": await log.load_last_id(cid)},
        )
        other = await client.post(path, json=body, headers={"Idempotency-Key": "another"})
        assert (other.status_code, other.json()["code"]) == (409, "conflict")
        events = await log.read(cid)
        assert [event.kind for event in events].count("conversation.operator_acted") == 1
    await gateway.aclose()
