"""The original's golden traces of delegation (OpenHands appendix A, 5 to 10), as they stand in the parent's log.

What differs throughout, on purpose (docs/parity.md): the delegate's own events are in its own log; the parent's holds the
report of its end, and an observation that has the action as its cause.
"""

from __future__ import annotations

import json
from typing import Any

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, DelegateEnded, EventSource, Limits
from broker.contract.observations import AgentDelegateObservation
from controller_worker.core.effects import AwaitDelegates, CallModel, Effect, Rest
from tests.controller_parts import Core, call, finish, started, traced


def delegating(task: str = "look", limits: Limits | None = None) -> tuple[Core, Effect]:
    core = started(agent=AgentSpec(enable_delegation=True), limits=limits)
    arguments = json.dumps({"agent": "Child", "task": task})
    return core, core.reply(call("delegate", arguments, "d1"))


def end(core: Core, state: AgentState, content: str, outputs: dict[str, Any], **used: Any) -> Effect:
    report = DelegateEnded(
        delegate_id=8,
        conversation_id="child",
        agent_state=state,
        content=content,
        outputs=outputs,
        source=EventSource.AGENT,
        **used,
    )
    core.put(report)
    return core.run()


def trace(core: Core) -> list[str]:
    return [traced(event) for event in core.events[7:]]


def observation(core: Core) -> AgentDelegateObservation:
    (found,) = [event for event in core.events if isinstance(event, AgentDelegateObservation)]
    return found


def test_5_a_delegate_that_finishes() -> None:
    core, effect = delegating()
    assert effect == AwaitDelegates((8,))
    assert end(core, AgentState.FINISHED, "Child finishes task with a: 1", {"a": 1}, iterations=2) == CallModel(2, 1)
    assert core.reply(finish()) == Rest()
    assert trace(core) == [
        "8 AgentDelegateAction(agent)",
        "9 DelegateEnded(agent)",
        "10 AgentDelegateObservation(agent, cause 8)",
        "11 ModelReply(agent)",
        "12 Finish(agent)",
        "13 SC finished",
    ]
    assert observation(core).content == "Delegated agent finished with result:\n\nChild finishes task with a: 1"
    assert core.state.usage.iteration + core.state.delegation.iterations == 4


def test_6_a_delegate_that_rejects() -> None:
    core, _ = delegating()
    assert end(core, AgentState.REJECTED, "Child finishes task with reason: no", {"reason": "no"}) == CallModel(2, 1)
    assert observation(core).content == "Delegated agent finished with result:\n\nChild finishes task with reason: no"


def test_7_a_delegate_that_fails() -> None:
    core, _ = delegating()
    text = "Child encountered an error during execution. RuntimeError: oops"
    assert end(core, AgentState.ERROR, text, {}) == CallModel(2, 1)
    assert (observation(core).content, observation(core).outputs) == (
        f"Delegated agent finished with result:\n\n{text}",
        {},
    )


def test_8_a_delegate_without_a_task() -> None:
    """Differs (B7): the original stands still."""
    core, effect = delegating(task="")
    assert effect == CallModel(2, 1)
    assert trace(core) == ["8 AgentDelegateAction(agent)", "9 ErrorObs(agent, cause 8)"]


def test_9_a_delegate_at_its_iteration_limit() -> None:
    """Differs (B5): the original's parent waits for ever. A parent keeps a share of the limits for itself."""
    core, _ = delegating(limits=Limits(max_iterations=4))
    assert core.state.delegation.delegates[0].iterations == 1
    text = "Child encountered an error during execution. RuntimeError: Agent reached maximum iteration."
    assert end(core, AgentState.ERROR, text, {}, iterations=1) == CallModel(2, 1)
    assert core.states() == ["running"]
    assert observation(core).content == f"Delegated agent finished with result:\n\n{text}"


def test_10_a_delegate_that_exceeds_the_budget() -> None:
    core, _ = delegating(limits=Limits(max_budget_usd=1.0))
    text = "Child encountered an error during execution. RuntimeError: Agent reached maximum budget for conversation."
    assert end(core, AgentState.ERROR, text, {}, cost_usd=0.8) == Rest()
    assert trace(core) == [
        "8 AgentDelegateAction(agent)",
        "9 DelegateEnded(agent)",
        "10 AgentDelegateObservation(agent, cause 8)",
        "11 SC error",
    ]
    assert core.state.lifecycle.error_code == "max_budget"
