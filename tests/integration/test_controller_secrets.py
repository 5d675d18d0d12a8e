"""A model that repeats a secret: neither the log, nor the snapshot, nor the next prompt has it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from broker.event_log import EventLog
from broker.masking import MASK, forms
from broker.secrets import Secrets
from controller_worker.controller import fold
from controller_worker.state import State, state_from
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
