"""A model that repeats a secret: neither the log, nor the snapshot, nor the next prompt has it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from broker.contract.actions import AgentDelegateAction
from broker.contract.events import AgentSpec, LLMSpec
from broker.log.event_log import EventLog
from broker.secrets.masking import MASK, forms
from broker.secrets.secrets import Secrets
from controller_worker.core.controller import fold
from controller_worker.core.state import State, state_from
from controller_worker.loop.delegates import conversation_id_of
from tests.conversation_hands import CID, Hands

CANARY = "c4n4ry/Pa+ss w0rd=9f8e7d6c"


@pytest.fixture
async def guarded(hands: Hands) -> Hands:
    secrets = Secrets(hands.store, lambda: bytes(32))
    await secrets.put(CID, "TOKEN", CANARY)
    hands.log = EventLog(hands.store, secrets)
    hands.services = replace(hands.services, log=hands.log)
    return hands


async def test_what_a_model_repeats_is_hidden_before_it_is_folded(guarded: Hands) -> None:
    thought = {"tool_calls": [{"name": "think", "arguments": {"thought": f"It is {CANARY}."}}]}
    await guarded.begin(thought, {"text": f"The token: {CANARY}"})
    loop = await guarded.go()
    events = await guarded.events()
    texts = json.dumps([event.wire() for event in events], default=str, ensure_ascii=False)
    assert texts.count(MASK) >= 2
    assert [form for form in forms(CANARY) if form in texts] == []
    assert [form for form in forms(CANARY) if form in repr(loop.state)] == []
    snapshot = state_from(await guarded.owners.load_snapshot(CID))
    assert snapshot is not None
    assert snapshot == fold(State(), events[: snapshot.version])


async def test_a_delegate_knows_its_parents_secrets_from_its_first_event_on(guarded: Hands) -> None:
    delegated = {"name": "delegate", "arguments": {"agent": "CodeActAgent", "task": f"Use {CANARY}."}}
    script = guarded.folder / "script.json"
    agent = AgentSpec(llm=LLMSpec(model=f"scripted/{script}"), enable_delegation=True)
    await guarded.begin({"tool_calls": [delegated]}, agent=agent)
    await guarded.go()
    (action,) = (event for event in await guarded.events() if isinstance(event, AgentDelegateAction))
    delegate_id = conversation_id_of(CID, action.id)
    created, message, *_ = await guarded.log.read(delegate_id)
    for event in (created, message):
        assert [form for form in forms(CANARY) if form in json.dumps(event.export())] == []
    secrets = Secrets(guarded.store, lambda: bytes(32))
    assert await secrets.wanted_by(delegate_id, "curl $TOKEN") == {"TOKEN": CANARY}
    assert (await secrets.masker(delegate_id)).text(CANARY) == MASK
