"""A critic in a running conversation: its own model, its cost, its failures, and a worker that dies meanwhile."""

from __future__ import annotations

import json

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, LLMSpec, ModelReply
from broker.contract.observations import FinishVerdictObservation
from broker.contract.specs import CriticSpec, GoalSpec
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from controller_worker.loop.replay import replay
from deckhands.client.reading.summary import summarize
from tests.conversation_hands import CID, THINK, Hands, is_asking
from tests.polling import until

FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}], "cost_usd": 0.25}
NO = {"text": "REFUSED There is no test.", "cost_usd": 0.5, "usage": {"prompt_tokens": 9}}
YES = {
    "tool_calls": [{"name": "verdict", "arguments": {"accepted": True, "reason": "Tested."}}],
    "cost_usd": 0.5,
}


def agent_with(hands: Hands, critic: CriticSpec | None = None) -> AgentSpec:
    return AgentSpec(
        llm=LLMSpec(model=f"scripted/{hands.folder / 'script.json'}"), goal=GoalSpec(critic=critic or CriticSpec())
    )


async def test_a_finish_is_refused_mended_and_accepted(hands: Hands) -> None:
    await hands.begin(FINISH | {"critic": NO}, THINK, FINISH | {"critic": YES}, agent=agent_with(hands))
    await hands.go()
    events = await hands.events()
    assert find_violations(events, conversation_id=CID, is_strict=True) == []
    assert fold_status(events).state is AgentState.FINISHED
    verdicts = [(e.is_accepted, e.content) for e in events if isinstance(e, FinishVerdictObservation)]
    assert verdicts == [(False, "There is no test."), (True, "Tested.")]
    replies = [event for event in events if isinstance(event, ModelReply)]
    assert [(reply.service, reply.iteration) for reply in replies] == [
        *(("agent", 1), ("critic", 1), ("agent", 2), ("agent", 3), ("critic", 3)),
    ]
    summary = summarize(events)
    assert (summary.iterations, summary.cost_usd, summary.prompt_tokens) == (3, 1.5, 9)
    found = replay(events)
    assert found.divergence is None, found.divergence.to_diff()


async def test_a_critic_has_a_model_of_its_own(hands: Hands) -> None:
    other = hands.folder / "critic.json"
    other.write_text(json.dumps({"turns": [{"critic": YES | {"cost_usd": 2.0}}]}))
    critic = CriticSpec(llm=LLMSpec(model=f"scripted/{other}"))
    await hands.begin(FINISH | {"critic": NO}, agent=agent_with(hands, critic))
    await hands.go()
    summary = summarize(await hands.events())
    assert (summary.state, summary.cost_usd) == ("finished", 2.25)
    assert {name: found.accumulated_cost for name, found in summary.metrics.by_model().items()} == {
        f"scripted/{hands.folder / 'script.json'}": 0.25,
        f"scripted/{other}": 2.0,
    }


async def test_another_worker_asks_the_critic_when_its_worker_dies(hands: Hands) -> None:
    await hands.begin(FINISH | {"critic": YES | {"latency_seconds": 0.5}}, agent=agent_with(hands))
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(
        lambda: loop.state.lifecycle.ending is AgentState.FINISHED and is_asking(loop), what="the critic's call"
    )
    before = await hands.events()
    loop.drop()
    await hands.take_over()
    events = await hands.events()
    assert events[: len(before)] == before
    assert fold_status(events).state is AgentState.FINISHED
    assert [event.service for event in events if isinstance(event, ModelReply)] == ["agent", "critic"]
