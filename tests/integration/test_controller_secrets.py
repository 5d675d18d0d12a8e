"""A model that repeats a secret: neither the log, nor the snapshot, nor the next prompt has it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from broker.contract.actions import AgentDelegateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, LLMSpec
from broker.contract.observations import AgentStateChangedObservation
from broker.log.event_log import EventLog
from broker.log.live_text import LiveText
from broker.runtime.ids import make_delegate_id
from broker.secrets.masking import MASK, find_forms
from broker.secrets.secrets import Secrets
from controller_worker.core.controller import fold
from controller_worker.core.state import State, parse_snapshot
from tests.broker_parts import no_key
from tests.conversation_hands import CID, THINK, Hands
from tests.polling import until

CANARY = "c4n4ry/Pa+ss w0rd=9f8e7d6c"


@pytest.fixture
async def guarded(hands: Hands) -> Hands:
    secrets = Secrets(hands.store, lambda: bytes(32))
    await secrets.put(CID, "TOKEN", CANARY)
    hands.log = EventLog(hands.store, secrets)
    hands.services = replace(hands.services, log=hands.log)
    return hands


async def test_repeated_secret_is_masked_before_it_is_folded(guarded: Hands) -> None:
    thoughts = [
        {"tool_calls": [{"name": "think", "arguments": {"thought": f"It is {CANARY}, {n}."}}]} for n in range(6)
    ]
    await guarded.begin(*thoughts, {"text": f"The token: {CANARY}"})  # long enough for a snapshot
    loop = await guarded.go()
    events = await guarded.events()
    texts = json.dumps([event.wire() for event in events], default=str, ensure_ascii=False)
    assert texts.count(MASK) >= 2
    assert [form for form in find_forms(CANARY) if form in texts] == []
    assert [form for form in find_forms(CANARY) if form in repr(loop.state)] == []
    snapshot = parse_snapshot(await guarded.owners.load_snapshot(CID))
    assert snapshot is not None
    assert snapshot == fold(State(), events[: snapshot.version])


async def test_conversation_with_unreadable_secrets_ends_in_an_error(guarded: Hands) -> None:
    await guarded.begin(THINK)
    guarded.services = replace(guarded.services, log=EventLog(guarded.store, Secrets(guarded.store, no_key)))
    await guarded.go()
    await check_locked(guarded)


async def test_a_reply_that_cannot_be_shown_masked_ends_the_conversation(hands: Hands) -> None:
    """The secret came after the last event that was written, and this worker has not its key."""
    await hands.begin(THINK, latency=60.0)
    first = await hands.claim()
    first.wake(has_new_events=False)
    await until(lambda: any(task.get_name() == f"model {CID}" for task in asyncio.all_tasks()), what="the call")
    first.drop()
    hands.gone.clear()
    await Secrets(hands.store, lambda: bytes(32)).put(CID, "TOKEN", CANARY)
    await LiveText(hands.store, CID).register_watcher()
    hands.services = replace(hands.services, log=EventLog(hands.store, Secrets(hands.store, no_key)))
    await hands.take_over()
    await check_locked(hands)


async def check_locked(hands: Hands) -> None:
    """Check that the conversation rests in an error that says why."""
    change = (await hands.events())[-1]
    assert isinstance(change, AgentStateChangedObservation)
    assert change.agent_state is AgentState.ERROR
    assert change.reason.startswith("SecretsLocked: There are secrets, and no key for them")
    assert (hands.gone, await hands.owner()) == ([CID], "")


async def test_delegate_knows_its_parents_secrets_from_its_first_event(guarded: Hands) -> None:
    delegated = {"name": "delegate", "arguments": {"agent": "CodeActAgent", "task": f"Use {CANARY}."}}
    script = guarded.folder / "script.json"
    agent = AgentSpec(llm=LLMSpec(model=f"scripted/{script}"), enable_delegation=True)
    await guarded.begin({"tool_calls": [delegated]}, agent=agent)
    await guarded.go()
    (action,) = (event for event in await guarded.events() if isinstance(event, AgentDelegateAction))
    delegate_id = make_delegate_id(CID, action.id)
    created, message, *_ = await guarded.log.read(delegate_id)
    for event in (created, message):
        assert [form for form in find_forms(CANARY) if form in json.dumps(event.export())] == []
    secrets = Secrets(guarded.store, lambda: bytes(32))
    assert await secrets.find_named(delegate_id, "curl $TOKEN") == {"TOKEN": CANARY}
    assert (await secrets.load_masker(delegate_id)).mask_text(CANARY) == MASK
