"""Condensations in a running conversation: with and without a model, after an overflow, and through deaths."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.actions import CondensationAction
from broker.contract.agent_state import AgentState
from broker.contract.condenser_specs import (
    AmortizedForgettingCondenserSpec,
    BrowserOutputCondenserSpec,
    CondenserPipelineSpec,
    CondenserSpec,
    ConversationWindowCondenserSpec,
    LLMSummarizingCondenserSpec,
    NoOpCondenserSpec,
    ObservationMaskingCondenserSpec,
    RecentEventsCondenserSpec,
)
from broker.contract.events import ModelReply
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from controller_worker.loop.conversation_loop import ConversationLoop
from controller_worker.memory.condensers.registry import create_condenser
from controller_worker.memory.conversation_memory import PromptOptions
from controller_worker.model.prompt_history import PromptHistory
from controller_worker.providers.messages.messages import Message, TextPart
from tests.conversation_hands import CID, THINK, Hands, is_asking
from tests.polling import until

SMALL = LLMSummarizingCondenserSpec(keep_first=4, max_size=12)
NOTES = {"text": "The notes.", "cost_usd": 0.5}


def thoughts(count: int) -> list[dict[str, Any]]:
    return [
        {"tool_calls": [{"name": "think", "arguments": {"thought": f"thought {number}"}}]} for number in range(count)
    ]


async def condensations(hands: Hands) -> list[CondensationAction]:
    return [event for event in await hands.events() if isinstance(event, CondensationAction)]


async def ended(hands: Hands) -> AgentState | None:
    events = await hands.events()
    assert find_violations(events, conversation_id=CID, is_strict=True) == []
    return fold_status(events).state


async def test_a_long_conversation_is_summarised_and_goes_on(hands: Hands) -> None:
    await hands.begin(*thoughts(6), condenser=SMALL, condensation=NOTES)
    loop = await hands.go()
    assert await ended(hands) is AgentState.FINISHED
    replies = [event for event in await hands.events() if isinstance(event, ModelReply)]
    assert [reply.service for reply in replies] == [*["agent"] * 5, "condenser", *["agent"] * 2]
    (condensation,) = await condensations(hands)
    # Of 14 events the first 4 and the latest stay, and with the summary it is 6.
    assert len(condensation.forgotten) >= 9
    assert (condensation.summary, condensation.summary_offset) == ("The notes.", 4)
    assert (loop.state.usage.iteration, loop.state.usage.cost_usd) == (7, 0.5)
    history = PromptHistory(hands.log, CID)
    prompt = await history.build_prompt(condensation.id, create_condenser(NoOpCondenserSpec()), PromptOptions())
    assert isinstance(prompt, tuple)
    assert [message.role for message in prompt][:4] == ["system", "user", "user", "user"]
    assert prompt[3] == Message("user", (TextPart("\n\nThe notes."),))
    assert "thought 0" not in str(prompt)


async def test_overlong_prompt_is_condensed_and_the_step_made(hands: Hands) -> None:
    overflow = {"error": {"code": "context_window", "times": 2}, **THINK}
    await hands.begin(*thoughts(4), overflow)
    await hands.go()
    assert await ended(hands) is AgentState.FINISHED
    kinds = await hands.kinds()
    begin = kinds.index("model.failed")
    overflown = ["model.failed", "action.condensation_request", "action.condensation"]
    assert kinds[begin : begin + 7] == [*overflown, *overflown, "model.reply"]
    first, second = await condensations(hands)
    assert (first.summary, second.summary) == (None, None)
    assert first.forgotten
    assert second.forgotten
    assert not set(first.forgotten) & set(second.forgotten)


async def test_prompt_that_never_fits_ends_in_an_error(hands: Hands) -> None:
    await hands.begin(*thoughts(4), {"error": {"code": "context_window", "times": None, "text": "too long"}})
    loop = await hands.go()
    assert await ended(hands) is AgentState.ERROR
    assert loop.state.lifecycle.last_error == "LLMContextWindowExceedError: too long"
    assert len(await condensations(hands)) == 5


async def test_overlong_condenser_prompt_falls_back_to_the_window(hands: Hands) -> None:
    condenser = CondenserPipelineSpec(condensers=(ConversationWindowCondenserSpec(), SMALL))
    too_long = {"error": {"code": "context_window", "times": 1}}
    await hands.begin(*thoughts(6), condenser=condenser, condensation=NOTES | too_long)
    await hands.go()
    assert await ended(hands) is AgentState.FINISHED
    first, *_ = await condensations(hands)
    assert first.summary is None


async def test_a_condenser_whose_model_fails_for_good_ends_the_work(hands: Hands) -> None:
    failing = {"error": {"code": "authentication", "times": None}}
    await hands.begin(*thoughts(6), condenser=SMALL, condensation=NOTES | failing)
    await hands.go()
    assert await ended(hands) is AgentState.ERROR


async def thinking_about_notes(hands: Hands) -> ConversationLoop:
    """A conversation whose worker waits for the condenser's model."""
    await hands.begin(*thoughts(6), condenser=SMALL, condensation=NOTES | {"latency_seconds": 0.5})
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: loop.state.usage.iteration == 5 and is_asking(loop), what="the condenser's call")
    return loop


async def test_worker_that_dies_during_condensation_is_replaced(hands: Hands) -> None:
    loop = await thinking_about_notes(hands)
    before = await hands.events()
    loop.drop()
    await hands.take_over()
    events = await hands.events()
    assert events[: len(before)] == before
    assert await ended(hands) is AgentState.FINISHED
    assert [e.service for e in events if isinstance(e, ModelReply)].count("condenser") == 1
    assert len(await condensations(hands)) == 1


async def test_message_during_condensation_is_kept_and_answered(hands: Hands) -> None:
    loop = await thinking_about_notes(hands)
    await hands.say("hurry")
    loop.wake()
    await hands.at_rest(loop)
    assert await ended(hands) is AgentState.FINISHED
    (condensation,) = await condensations(hands)
    said = [event.id for event in await hands.events() if event.kind == "action.message"]
    assert said[-1] not in condensation.forgotten


@pytest.mark.parametrize(
    "condenser",
    [
        NoOpCondenserSpec(),
        AmortizedForgettingCondenserSpec(keep_first=2, max_size=8),
        RecentEventsCondenserSpec(keep_first=2, max_events=6),
        ObservationMaskingCondenserSpec(attention_window=4),
        CondenserPipelineSpec(
            condensers=(BrowserOutputCondenserSpec(), ObservationMaskingCondenserSpec(attention_window=3), SMALL)
        ),
    ],
    ids=lambda spec: str(getattr(spec, "type", "")),
)
async def test_new_owner_makes_the_same_grown_prompt(hands: Hands, condenser: CondenserSpec) -> None:
    await hands.begin(*thoughts(12), condenser=condenser, condensation=NOTES)
    await hands.go()
    events = await hands.events()
    grown, strategy = PromptHistory(hands.log, CID), create_condenser(condenser)
    for version in range(3, len(events) + 1):
        await grown.take_in(events[version - 1 : version])
        anew = await PromptHistory(hands.log, CID).build_prompt(version, strategy, PromptOptions())
        prompt = await grown.build_prompt(version, strategy, PromptOptions())
        if isinstance(prompt, tuple):
            assert prompt == anew
        else:
            assert type(prompt) is type(anew)
