"""Double texting on a real store with real loops: calls that are given up, views that are read again, killed workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.contract.actions import CmdRunAction, CondensationAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.condenser_specs import NoOpCondenserSpec
from broker.contract.double_texting import InterruptedObservation, RolledBackObservation
from broker.contract.events import Event
from broker.coordination.membership import Membership
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from broker.runtime.errors import ConversationBusy, UsageError
from controller_worker.loop.conversation_loop import ConversationLoop
from controller_worker.loop.replay import replay
from controller_worker.memory.condensers.model_free import NoOpCondenser
from controller_worker.memory.conversation_memory import PromptOptions
from controller_worker.model.prompt_history import PromptHistory
from deckhands.client.client import Client
from tests.broker_parts import lapse
from tests.conversation_hands import BASH, CID, THINK, Hands, is_asking
from tests.polling import until

OTHER = "controller-2"
FINISH: dict[str, Any] = {"tool_calls": [{"name": "finish", "arguments": {"message": "ok"}}]}


async def is_waiting_for_tool(hands: Hands) -> bool:
    return isinstance((await hands.events())[-1], CmdRunAction)


def of(events: list[Event], kind: type[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


async def check(hands: Hands, loop: ConversationLoop) -> str:
    """Check the log, and return the prompt of its end as the loop and as a reader of the whole log make it."""
    events = await hands.events()
    assert find_violations(events, conversation_id=CID, is_strict=True) == []
    assert replay(events).divergence is None
    show_all = (NoOpCondenser(NoOpCondenserSpec()), PromptOptions(max_message_chars=1_000))
    read = str(await PromptHistory(hands.log, CID).build_prompt(len(events), *show_all))
    assert read == str(await loop._log.recollection.build_prompt(len(events), *show_all))
    return read


async def test_an_interruption_gives_up_the_call_and_the_action(hands: Hands) -> None:
    await hands.begin(BASH, FINISH, double_texting="interrupt")
    loop = await hands.go()
    assert await is_waiting_for_tool(hands)
    await hands.say("stop that")
    await hands.wake(loop)
    events = await hands.events()
    assert len(of(events, InterruptedObservation)) == 1
    assert fold_status(events).state is AgentState.FINISHED
    await check(hands, loop)


async def test_a_call_that_is_interrupted_is_not_waited_for(hands: Hands) -> None:
    await hands.begin(THINK, latency=3600.0, double_texting="interrupt")
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: is_asking(loop), what="the call")
    first = loop._call._task._task
    assert first is not None
    await hands.say("rather this")
    loop.wake()
    await until(first.done, what="the end of the call")
    await until(lambda: is_asking(loop) and loop._call._task._task is not first, what="the next call")
    assert of(await hands.events(), InterruptedObservation)
    loop.drop()


async def test_rollback_is_neither_in_view_nor_in_state(hands: Hands) -> None:
    await hands.begin(THINK, BASH, FINISH, double_texting="rollback")
    loop = await hands.go()
    assert await is_waiting_for_tool(hands)
    await hands.say("something else")
    await hands.wake(loop)
    events = await hands.events()
    assert len(of(events, RolledBackObservation)) == 1
    assert fold_status(events).state is AgentState.FINISHED
    prompt = await check(hands, loop)
    assert "something else" in prompt
    assert "hm" not in prompt
    assert "'task'" not in prompt


async def test_a_fork_of_such_a_log_continues_like_its_origin(hands: Hands) -> None:
    await hands.begin(BASH, FINISH, double_texting="rollback")
    loop = await hands.go()
    await hands.say("something else")
    await hands.wake(loop)
    fork_id = await Client(hands.store).fork(CID)
    state = (await hands.go(fork_id)).state
    assert state.inbox.last_message_id == loop.state.inbox.last_message_id
    assert state.usage.iteration == loop.state.usage.iteration
    assert state.lifecycle.agent_state is AgentState.FINISHED
    events = await hands.log.read(fork_id)
    assert replay(events).divergence is None


async def test_one_of_racing_messages_to_an_idle_agent_is_taken(hands: Hands) -> None:
    await hands.begin(FINISH, double_texting="reject")
    await hands.go()
    client = Client(hands.store)
    told = await asyncio.gather(*(client.send_message(CID, f"{n}") for n in range(20)), return_exceptions=True)
    assert [isinstance(one, ConversationBusy) for one in told].count(False) == 1
    assert len(of(await hands.events(), MessageAction)) == 2


async def test_no_message_can_ask_for_a_rollback_alone(hands: Hands) -> None:
    await hands.begin(FINISH)
    with pytest.raises(UsageError, match="submit the conversation with it"):
        await Client(hands.store).send_message(CID, "x", double_texting="rollback")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["enqueue", "interrupt", "rollback"])
@pytest.mark.parametrize("moment", ["deck_append", "deck_snapshot", "deck_release"])
async def test_a_worker_that_dies_in_between_is_continued(hands: Hands, policy: str, moment: str) -> None:
    """Its calls are made to fail at a moment, and another worker takes over what the store has then."""
    await hands.begin(BASH, FINISH, double_texting=policy)
    loop = await hands.go()
    await hands.say("something else")

    async def die() -> None:
        loop.drop()
        raise asyncio.CancelledError

    hands.wire.before[moment] = die
    loop.wake()
    if policy == "enqueue":  # nothing is appended before the action is answered
        action = of(await hands.events(), CmdRunAction)[0]
        await hands.observe(action.id)
    await until(lambda: loop.is_idle, what="the death")
    await lapse(hands.store, "controller-1")
    await Membership(hands.store, OTHER, "controller", ttl_seconds=3600.0).beat(1)
    if await hands.owner() == "":
        other = await hands.claim(worker=OTHER)
        other.wake(has_new_events=False)
        await hands.at_rest(other)
    events = await hands.events()
    assert find_violations(events, conversation_id=CID, is_strict=True) == []
    assert replay(events).divergence is None
    assert fold_status(events).state is AgentState.FINISHED
    number = {"enqueue": 0, "interrupt": 1, "rollback": 1}[policy]
    assert len(of(events, InterruptedObservation)) + len(of(events, RolledBackObservation)) == number


async def test_events_forgotten_by_rolled_back_condensation_are_shown_again(hands: Hands) -> None:
    long = "x" * 40_000 + "MIDDLE" + "z" * 40_000  # kept beside the log
    await hands.begin(FINISH, FINISH, BASH, FINISH, double_texting="rollback")
    await hands.go()
    for text in (long, "third"):
        await hands.say(text)
        loop = await hands.go()
    assert await is_waiting_for_tool(hands)
    (said,) = [event.id for event in await hands.events() if getattr(event, "content", "").startswith("xxx")]
    forgetting = CondensationAction(forgotten_event_ids=(said,), summary="A SUMMARY", summary_offset=1)
    await hands.log.append(CID, [forgetting])
    await hands.say("something else")
    await hands.wake(loop)
    prompt = await check(hands, loop)
    assert "MIDDLE" in prompt
    assert "A SUMMARY" not in prompt
    assert "third" not in prompt
