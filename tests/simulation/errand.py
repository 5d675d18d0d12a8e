"""A conversation that uses more than tools: delegates, a note, a question, a check and a critic.

Two delegates of which one is enough, one in the background, a note; a command that a user edits and confirms; a
finish that the check accepts and the critic refuses, and one that both accept.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, ConversationCreated, DelegateEnded, Event, EventSource, LLMSpec
from broker.contract.notes import NoteObservation
from broker.contract.observations import AgentDelegateObservation, AgentStateChangedObservation
from broker.contract.policies import ConfirmationPolicy
from broker.contract.specs import CriticSpec, GoalSpec, MemorySpec
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from broker.log.status import Status
from broker.store.store import Store
from controller_worker.core.controller import fold
from controller_worker.core.state import State
from controller_worker.loop.replay import replay
from tests.simulation.canonical import CID, Outcome, Person, bash, said
from tests.simulation.checks import always_broken, has_lost_too_many, is_given_up

DELEGATES = 3
DELEGATE_TURNS = [
    {"tool_calls": [bash("look")]},
    {"tool_calls": [{"name": "finish", "arguments": {"message": "found"}}]},
]


def _delegate(**arguments: Any) -> dict[str, Any]:
    return {"name": "delegate", "arguments": {"agent": "Child", "task": "look for it", **arguments}}


FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
TURNS = [
    {
        "tool_calls": [
            _delegate(join="any"),
            _delegate(join="any"),
            {"name": "note", "arguments": {"command": "write", "text": "It is here."}},
        ]
    },
    {"tool_calls": [_delegate(background=True), bash("dangerous", security_risk="HIGH"), bash("harmless")]},
    FINISH | {"critic": {"text": "REFUSED There is no test."}},
    {"tool_calls": [bash("add a test")]},
    FINISH,
]


def sender(folder: Path) -> Person:
    """Return the user of this conversation; the scripts of its models are written into the folder."""
    models = {}
    for name, turns in (("parent", TURNS), ("child", DELEGATE_TURNS)):
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"latency_seconds": 0.1, "turns": turns}))
        models[name] = LLMSpec(model=f"scripted/{path}")
    agent = AgentSpec(
        llm=models["parent"],
        enable_delegation=True,
        delegates={"Child": AgentSpec(llm=models["child"])},
        confirmation=ConfirmationPolicy(mode="risky", analyzer="llm", confirm_unknown=False),
        memory=MemorySpec(project="errand"),
        goal=GoalSpec(check="check", critic=CriticSpec()),
        tool_concurrency=2,
    )

    async def person(store: Store, seen: list[Event], settled: asyncio.Future[None]) -> None:
        """Send the task, answer the questions, and watch until it has settled."""
        log = EventLog(store)
        created = ConversationCreated(conversation_id=CID, agent=agent, headless=False)
        await log.create(created, [said("<task>")], key="task")
        status = Status()
        async for event in log.tail(CID):
            seen.append(event)
            status = status.apply(event)
            if isinstance(event, AgentStateChangedObservation) and event.action_id is not None:
                await log.append(CID, [_confirmed(event.action_id)], key=f"answer {event.id}")
            if status.is_terminal and event.id == await log.load_last_id(CID):
                break
        if not settled.done():
            settled.set_result(None)

    return person


def _confirmed(action_id: int) -> ChangeAgentStateAction:
    return ChangeAgentStateAction(
        agent_state=AgentState.USER_CONFIRMED,
        action_id=action_id,
        edited={"command": "careful"},
        source=EventSource.USER,
    )


def broken_errand(outcome: Outcome) -> list[str]:
    """Return the violations, each with the id of its invariant if it has one."""
    found = always_broken(outcome)
    if not outcome.failure and not is_given_up(outcome):
        found += _errand(outcome)
    return found


def _errand(outcome: Outcome) -> Iterator[str]:
    written = [event for event in outcome.events if isinstance(event, NoteObservation) and event.written]
    if len(written) != 1:
        yield f"the note was written {len(written)} times"
    for kind in (DelegateEnded, AgentDelegateObservation):
        counts = Counter(event.delegate_id for event in outcome.events if isinstance(event, kind))
        if sorted(counts.values()) != [1] * DELEGATES:
            yield f"{kind.__name__} of each delegate: {dict(counts)}"
    for conversation_id, events in {CID: outcome.events, **outcome.others}.items():
        divergence = replay(events).divergence
        if divergence is not None:
            yield f"I7: {conversation_id} would be decided otherwise: {divergence.to_diff()}"
    for conversation_id, events in outcome.others.items():
        yield from (
            f"{broken.invariant}: {broken.text}"
            for broken in find_violations(events, conversation_id=conversation_id, is_strict=True)
        )
        state = fold(State(), events)
        is_lost = "crashed its worker" in state.lifecycle.last_error and has_lost_too_many(outcome)
        # The parent may end before its last delegate.
        if state.lifecycle.agent_state not in (AgentState.FINISHED, AgentState.STOPPED) and not is_lost:
            yield f"I1: the delegate {conversation_id} ended as {state.lifecycle.agent_state}"
