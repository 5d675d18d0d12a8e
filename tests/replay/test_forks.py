"""A conversation can be forked at any of its events, and continues from there."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction, LoopRecoveryAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, ConversationCreated, EventSource, Limits, Observation
from broker.contract.policies import ConfirmationPolicy, LoopPolicy
from broker.log.append_call import Appended, Duplicate
from broker.log.entries import parse_lines
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from broker.log.status import Status, fold_status
from broker.store.store import Store
from controller_worker.core.controller import fold, next_effect
from controller_worker.core.effects import Append, AwaitTools, CallModel
from controller_worker.core.state import State
from controller_worker.loop.replay import replay
from deckhands.client.forking import build_fork, copy_events
from tests.controller_parts import CID, Core, bash, finish, messages_of, started
from tests.replay.test_replay import GOLDEN, recorded

NOW = datetime(2027, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
async def test_a_golden_log_forked_at_each_of_its_events(path: Path, memory_store: Store) -> None:
    events, log = recorded(path), EventLog(memory_store)
    for at in range(1, len(events) + 1):
        created = build_fork(events[:at], f"fork-{at}", model="acme/large")
        assert await log.create_from(created, copy_events(events[:at], model="acme/large"), key="fork") == Appended(
            1, at
        )
        assert await log.create_from(created, events[1:at], key="fork") == Duplicate(1, at)
        fork = await log.read(f"fork-{at}")
        assert [event.export() for event in fork[1:]] == [event.export() for event in events[1:at]]
        assert replay(fork).divergence is None
        state = fold(State(), fork)
        assert state.setup.agent.llm.model == "acme/large"
        effect = next_effect(state, NOW)
        if isinstance(effect, AwaitTools):
            answered = {event.cause for event in fork if isinstance(event, Observation)}
            assert not set(effect.action_ids) & answered
        if isinstance(effect, CallModel):
            check_prompt(fork)


BAD_EDIT = {"state": AgentState.USER_CONFIRMED, "edited": {"bogus": 1}}
CONFIRM = AgentSpec(confirmation=ConfirmationPolicy(mode="always"))


def confirmed_and_edited() -> Core:
    core = started(agent=CONFIRM)
    core.reply(bash("one", "c1"), bash("two", "c2"))
    edited = {"command": "other"}
    core.put(answer_of(AgentState.USER_CONFIRMED, edited=edited))
    core.run()
    core.observe(core.state.confirmation.confirmed_id)
    return core


def rejected(**answer: Any) -> Core:
    core = started(agent=CONFIRM)
    core.reply(bash("one", "c1"), bash("two", "c2"))
    core.put(answer_of(**{"state": AgentState.USER_REJECTED} | answer))
    core.run()
    return core


def recovered(option: int) -> Core:
    core = started(agent=AgentSpec(loop_policy=LoopPolicy(responses=("park",))))
    for _ in range(4):
        core.reply(bash())
        core.observe(core.state.tools.pending[0].id)
    core.put(LoopRecoveryAction(option=option, source=EventSource.USER))
    core.run()
    return core


def answer_of(state: AgentState, **fields: Any) -> ChangeAgentStateAction:
    return ChangeAgentStateAction(agent_state=state, source=EventSource.USER, **fields)


@pytest.mark.parametrize(
    "origin",
    [confirmed_and_edited, rejected, partial(rejected, **BAD_EDIT), partial(recovered, 1), partial(recovered, 2)],
    ids=["edited", "rejected", "edited into nothing", "recovered and waiting", "recovered and going on"],
)
def test_a_fork_may_begin_between_events_that_belong_together(origin: Callable[[], Core]) -> None:
    events = origin().events
    created = events[0]
    assert isinstance(created, ConversationCreated)
    for at in range(2, len(events) + 1):
        fork = Core(task=None, agent=created.agent, forked_from=f"{CID}@{at}")
        fork.put(*events[1:at])
        at_rest = brought_to_rest(fork)
        assert not at_rest.is_unanswered, (at, fork.trace())
        fork.say("and now end it")
        assert brought_to_rest(fork).state == "finished", (at, fork.trace())
        assert find_violations(fork.events, conversation_id=CID, is_strict=True) == [], (at, fork.trace())


def brought_to_rest(core: Core) -> Status:
    """Let tools answer, the user agree and the model finish."""
    for _ in range(40):
        effect = core.run()
        if isinstance(effect, AwaitTools):
            core.observe(effect.action_ids[0])
        elif isinstance(effect, CallModel):
            core.reply(finish())
        elif core.state.confirmation.asked_id is not None:
            core.put(answer_of(AgentState.USER_CONFIRMED, action_id=core.state.confirmation.asked_id))
        else:
            break
    return fold_status(core.events)


def check_prompt(events: list) -> None:
    """Every call that is shown has a result."""
    open_calls: list[str] = []
    for message in messages_of(events):
        if message.role == "tool":
            open_calls.remove(message.tool_call_id)
        else:
            assert open_calls == []
            open_calls = [call.id for call in message.tool_calls]
    assert open_calls == []


async def test_actions_run_in_the_origin_are_settled_in_forks(memory_store: Store) -> None:
    path = next(path for path in GOLDEN if path.stem == "rate_limit_and_pause")
    events = parse_lines(path.read_text().splitlines(), source=path.name)
    await EventLog(memory_store).create_from(build_fork(events[:10], "fork-1"), events[1:10], key="fork")
    once = await memory_store.connection.call("HGETALL", memory_store.known_keys("fork-1").once)
    assert sorted(name.decode() for name in once[::2]) == ["create:fork", "o:8"]


def test_a_forks_time_counts_from_when_it_began() -> None:
    core = started(limits=Limits(max_seconds=60.0))
    begun = core.now + timedelta(hours=2)
    created = build_fork(core.events, "fork").model_copy(update={"id": 1, "timestamp": begun})
    state = fold(State(), [created, *core.events[1:]])
    assert state.usage.deadline == begun + timedelta(seconds=60)
    assert next_effect(state, begun + timedelta(seconds=59)) == CallModel(1, 1)
    assert isinstance(next_effect(state, begun + timedelta(seconds=60)), Append)
