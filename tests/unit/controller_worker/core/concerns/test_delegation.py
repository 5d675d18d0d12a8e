"""Delegation in the core: waits for delegates, their ends, their shares, and impossible delegations."""

import json
from typing import Any

import pytest

from broker.contract.actions import AgentDelegateAction, CondensationAction
from broker.contract.agent_state import AgentState
from broker.contract.codec import pack
from broker.contract.condenser_specs import ConversationWindowCondenserSpec
from broker.contract.events import AgentSpec, ConversationCreated, DelegateEnded, Limits, ModelToolCall, Parent, with_id
from broker.contract.observations import (
    AgentDelegateObservation,
    ErrorObservation,
    EventsLostObservation,
    SuccessObservation,
)
from broker.log.invariants import find_violations
from broker.runtime.ids import make_delegate_id
from controller_worker.agents.tool_calls import MAX_CALLS
from controller_worker.core.commit import Commit
from controller_worker.core.concerns.delegation import REPORTED_BYTES, DelegateOrder, find_side_effects
from controller_worker.core.concerns.lifecycle import Lifecycle
from controller_worker.core.concerns.limits import find_reached_limit
from controller_worker.core.concerns.setup import Setup
from controller_worker.core.controller import apply, fold, next_effect
from controller_worker.core.effects import (
    AwaitDelegates,
    AwaitTools,
    CallModel,
    Effect,
    NotifyDelegates,
    Rest,
    StartDelegate,
)
from controller_worker.core.state import State
from controller_worker.loop.delegates import is_over, make_delegate_spec
from controller_worker.memory.condensers.registry import create_condenser
from controller_worker.memory.conversation_memory import MAX_MESSAGE_CHARS, ConversationMemory
from controller_worker.memory.view import ViewFold
from controller_worker.model.permits.call_permit import sum_own_cost_usd
from controller_worker.providers.messages.messages import TextPart
from tests.controller_parts import CID, Core, bash, call, check_snapshots, finish, started, think
from tests.scenarios import play

ABLE = AgentSpec(enable_delegation=True)


def able(**limits: float) -> Core:
    return started(agent=ABLE, limits=Limits(**limits))


def delegate(call_id: str = "d1", **arguments: Any) -> ModelToolCall:
    return call("delegate", json.dumps({"agent": "CodeActAgent", "task": "look", **arguments}), call_id)


def report(delegate_id: int, content: str, **fields: Any) -> DelegateEnded:
    return DelegateEnded(
        delegate_id=delegate_id,
        conversation_id=make_delegate_id(CID, delegate_id),
        agent_state=AgentState.FINISHED,
        content=content,
        **fields,
    )


def ended(core: Core, delegate_id: int, content: str = "CodeActAgent finishes task with a: 1", **fields: Any) -> Effect:
    """Let a delegate report its end."""
    outcome = {"outputs": {"a": 1}, "iterations": 2, "cost_usd": 0.5, "prompt_tokens": 30} | fields
    core.put(report(delegate_id, content, **outcome))
    return core.run()


def results(core: Core) -> list[AgentDelegateObservation]:
    return [event for event in core.events if isinstance(event, AgentDelegateObservation)]


def in_background_at_work(core: Core, **arguments: Any) -> Effect:
    """Let the model start a background delegate, action 8, and the shell report that it works."""
    core.reply(delegate(background=True, **arguments))
    return started_in_background(core, core.state.delegation.delegates[-1].id)


def started_in_background(core: Core, delegate_id: int) -> Effect:
    action = core.event(delegate_id)
    return core.append(
        SuccessObservation(content="works", cause=delegate_id, tool_call_metadata=action.tool_call_metadata)
    )


# Waiting and ends


def test_a_delegate_is_waited_for_and_its_end_told_once() -> None:
    core = able()
    assert core.reply(delegate()) == AwaitDelegates((8,))
    assert ended(core, 8) == CallModel(2, 1)
    (result,) = results(core)
    assert (result.cause, result.delegate_id, result.outputs) == (8, 8, {"a": 1})
    assert result.content == "Delegated agent finished with result:\n\nCodeActAgent finishes task with a: 1"
    assert result.tool_call_metadata == core.event(8).tool_call_metadata
    assert core.state.delegation.delegates == ()
    assert ended(core, 8) == CallModel(2, 1)
    assert len(results(core)) == 1


def test_delegates_are_waited_for_together_behind_tools() -> None:
    core = able()
    assert core.reply(delegate("a"), delegate("b"), bash(), finish()) == AwaitTools((10,))
    assert core.observe(10) == AwaitDelegates((8, 9))
    assert ended(core, 9) == AwaitDelegates((8,))
    assert core.states() == ["running"]
    assert ended(core, 8) == Rest()
    assert core.states() == ["running", "finished"]


def test_any_of_several_is_enough_and_the_others_go_on() -> None:
    core = able()
    core.reply(delegate("a", join="any"), delegate("b", join="any"))
    assert ended(core, 9) == CallModel(2, 1)
    goes_on = core.event(-1, SuccessObservation)
    assert goes_on.cause == 8
    core.reply(think())
    assert ended(core, 8) == CallModel(3, 1)
    assert [(one.delegate_id, one.cause) for one in results(core)] == [(9, 9), (8, None)]


def test_background_end_is_reported_when_it_occurs() -> None:
    core = able()
    assert core.reply(delegate(background=True)) == AwaitDelegates((8,))
    assert started_in_background(core, 8) == CallModel(2, 1)
    play(core, "bash, ran")
    assert ended(core, 8) == CallModel(3, 1)
    (result,) = results(core)
    assert (result.cause, result.tool_call_metadata, result.delegate_id) == (None, None, 8)


# Impossible delegations


@pytest.mark.parametrize(
    ("limits", "task", "told"),
    [
        ({}, "", "The delegate was not started: its inputs hold no task."),
        ({}, "  ", "The delegate was not started: its inputs hold no task."),
        ({"max_delegate_level": 0}, "look", "0 levels deep"),
        ({"max_iterations": 3}, "look", "The delegate was not started: its parent has no iterations left to give it."),
    ],
    ids=["no task", "blank task", "too deep", "nothing left to give"],
)
def test_delegate_that_cannot_be_started_is_told(limits: dict[str, int], task: str, told: str) -> None:
    core = able(**limits)
    assert core.reply(delegate("a", task=task), delegate("b", task=task)) == CallModel(2, 1)
    answers = {event.cause: event.content for event in core.events if isinstance(event, ErrorObservation)}
    assert answers.keys() == {8, 9}
    assert all(told in answer for answer in answers.values())
    assert core.state.delegation.delegates == ()


def test_without_the_tool_nothing_is_delegated() -> None:
    core = started()
    core.reply(delegate())
    assert not any(isinstance(event, AgentDelegateAction) for event in core.events)


def test_the_level_of_a_delegate_is_its_parents() -> None:
    created = ConversationCreated(conversation_id="d1", parent=Parent(conversation_id=CID, delegate_id=8, level=2))
    state = apply(State(), with_id(created, 1))
    assert (state.setup.delegate_level, state.setup.parent) == (2, created.parent)


# Shares


def shares(core: Core) -> list[tuple[int | None, float | None, int | None]]:
    return [(one.iterations, one.budget_usd, one.tokens) for one in core.state.delegation.delegates]


def test_remainder_is_divided_with_a_share_for_the_parent() -> None:
    core = able(max_iterations=11, max_budget_usd=6.25, max_tokens=1_610)
    core.reply(delegate("a"), delegate("b"))
    assert shares(core) == [(3, 2.0, 500)] * 2
    ended(core, 8, iterations=3, cost_usd=1.0, prompt_tokens=100, has_unknown_cost=True)
    assert ended(core, 9, iterations=3, cost_usd=0.5, prompt_tokens=0) == CallModel(2, 1)
    usage = core.state.usage
    assert (usage.iteration, core.state.delegation.iterations, usage.cost_usd, usage.prompt_tokens) == (1, 6, 1.75, 200)
    assert usage.has_unknown_cost
    play(core, "think(0) -> model 3, think(1) -> model 4, think(2) -> model 5, think -> rest")
    assert core.state.lifecycle.last_error == (
        "RuntimeError: Agent reached maximum iteration. Current iteration: 11, max iteration: 11"
    )


def test_a_limit_that_delegates_have_used_up_grows_too() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=3), headless=False)
    core.reply(delegate())
    assert ended(core, 8, iterations=2) == Rest()
    assert core.state.lifecycle.error_code == "max_iterations"
    core.ask("running")
    assert core.run() == CallModel(2, 1)
    assert core.state.usage.max_iterations == 6


def test_possible_spending_of_earlier_delegates_is_reserved() -> None:
    core = able(max_iterations=9, max_budget_usd=4.25, max_tokens=1_110)
    in_background_at_work(core)
    core.reply(delegate("b"))
    assert shares(core) == [(4, 2.0, 500), (1, 0.875, 195)]


def test_costs_of_a_forks_origin_are_not_its_own() -> None:
    core = able()
    core.reply(delegate())
    ended(core, 8, cost_usd=0.5)
    inherited = len(core.events)
    core.reply(think())
    created = core.events[0].model_copy(update={"forked_from": f"{CID}@{inherited}"})
    state = fold(State(), [created, *core.events[1:]])
    assert (state.usage.cost_usd, state.usage.inherited_usd, sum_own_cost_usd(state)) == (1.0, 0.25, 0.25)


@pytest.mark.parametrize(
    "limits", [{"max_iterations": 5}, {"max_budget_usd": 1.0}, {"max_tokens": 400}], ids=["steps", "budget", "tokens"]
)
def test_parent_does_not_spend_what_background_delegates_may(limits: dict[str, float]) -> None:
    core = able(**limits)
    in_background_at_work(core)  # each reply costs 0.25 and 110 tokens
    assert limits.keys() != {"max_iterations"} or core.state.delegation.delegates[0].iterations == 2
    play(core, "think(a) -> model 3, think(b) -> delegates")
    assert find_reached_limit(core.state) is None
    assert ended(core, 8, iterations=1, cost_usd=0.0, prompt_tokens=0) == CallModel(4, 1)


# States down the tree


@pytest.mark.parametrize(
    ("scenario", "told"),
    [
        ("paused -> rest", AgentState.PAUSED),
        ("stopped -> rest", AgentState.STOPPED),
        ("paused, running -> delegates 8", AgentState.RUNNING),
    ],
)
def test_requests_of_a_person_reach_the_delegates(scenario: str, told: AgentState) -> None:
    core = able()
    core.reply(delegate())
    play(core, scenario)
    assert core.state.delegation.order == DelegateOrder(told, len(core.events))


def test_stop_answers_the_action_and_later_reports_have_no_cause() -> None:
    core = able()
    core.reply(delegate())
    play(core, "stopped")
    answer = core.event(-2, ErrorObservation)
    assert (answer.cause, answer.error_id) == (8, "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED")
    assert ended(core, 8, "CodeActAgent was stopped.") == Rest()
    assert [(one.delegate_id, one.cause) for one in results(core)] == [(8, None)]
    assert find_violations(core.events, conversation_id=CID, is_strict=True) == []


@pytest.mark.parametrize("asked", ["stopped", "paused"])
def test_unstartable_delegate_is_answered_once_despite_requests(asked: str) -> None:
    core = able()
    core.ask(asked)
    core.reply(delegate(task=""), bash())
    assert core.run() == Rest()
    assert [event.cause for event in core.events if event.cause == 9] == [9]
    assert core.state.delegation.delegates == ()
    core.ask("running")
    core.run()
    assert find_violations(core.events, conversation_id=CID, is_strict=True, is_over=False) == []


# The specification of a delegate


def test_delegate_follows_its_parents_specification_and_confirmation() -> None:
    small = AgentSpec(name="ReadOnlyAgent", llm={"model": "acme/small"})
    parent = AgentSpec(llm={"model": "acme/large"}, delegates={"scout": small}, confirmation={"mode": "always"})
    scout = make_delegate_spec(parent, "scout")
    assert (scout.name, scout.llm.model, scout.confirmation.mode) == ("ReadOnlyAgent", "acme/small", "always")
    same = make_delegate_spec(parent, "CodeActAgent")
    assert (same.name, same.llm.model) == ("CodeActAgent", "acme/large")


@pytest.mark.parametrize(
    ("state", "headless", "over"),
    [
        ("finished", True, True),
        ("error", False, True),
        ("stopped", True, True),
        ("awaiting_user_input", True, True),
        ("awaiting_user_confirmation", True, True),
        ("awaiting_user_input", False, False),
        ("paused", True, False),
        ("running", True, False),
    ],
)
def test_when_a_delegate_has_ended(state: str, headless: bool, over: bool) -> None:
    assert is_over(State(setup=Setup(headless=headless), lifecycle=Lifecycle(agent_state=AgentState(state)))) is over


def test_delegates_survive_snapshots() -> None:
    core = able()
    core.reply(delegate("a", join="any"), delegate("b", join="any"))
    ended(core, 9)
    core.reply(delegate("c", background=True))
    started_in_background(core, core.state.delegation.delegates[-1].id)
    play(core, "paused")
    ended(core, 8)
    check_snapshots(core)


def test_an_end_of_a_delegate_that_is_none_means_nothing() -> None:
    core = able()
    before = core.state.usage
    assert ended(core, 99) == CallModel(1, 1)
    assert results(core) == []
    assert core.state.usage == before


# Many at once


def all_ended(core: Core, *, first_id: int = 1, content: str = "") -> None:
    """Let every delegate that is at work report its end before the core is asked again."""
    for one in core.state.delegation.delegates:
        if one.id >= first_id:
            core.put(report(one.id, content or f"CodeActAgent finishes task with a: {one.id}", iterations=1))


def in_background(core: Core, count: int) -> list[int]:
    """Start background delegates, as many with each reply as a reply may hold; return their ids."""
    ids: list[int] = []
    while len(ids) < count:
        calls = range(min(MAX_CALLS, count - len(ids)))
        wanted = core.reply(*(delegate(f"d{n}", task=f"look at {n}", background=True) for n in calls))
        assert isinstance(wanted, AwaitDelegates)
        ids += wanted.delegate_ids
        for delegate_id in wanted.delegate_ids:
            started_in_background(core, delegate_id)
    return ids


def commits_of_run(core: Core) -> list[Commit]:
    """Let the core append pending events until it wants a model call; return its commits."""
    before = len(core.commits)
    assert isinstance(core.run(), CallModel)
    return core.commits[before:]


@pytest.mark.parametrize("count", [17, MAX_CALLS + 1])
def test_all_ends_that_are_due_enter_in_one_commit(count: int) -> None:
    core = able(max_iterations=10**10)
    ids = in_background(core, count)
    all_ended(core)
    assert len(commits_of_run(core)) == 1
    assert [one.delegate_id for one in results(core)] == ids
    assert core.state.delegation.delegates == ()
    assert find_violations(core.events, conversation_id=CID, is_strict=True, is_over=False) == []


def test_long_reports_enter_in_several_bounded_commits() -> None:
    core = able(max_iterations=10**40)
    ids = in_background(core, 2 * MAX_CALLS)
    all_ended(core, content="x" * 30_000)
    sizes = [sum(len(pack(event.wire())) for event in commit.events) for commit in commits_of_run(core)]
    assert [one.delegate_id for one in results(core)] == ids
    assert len(sizes) == 8
    assert max(sizes) <= REPORTED_BYTES + 10_000
    assert find_violations(core.events, conversation_id=CID, is_strict=True, is_over=False) == []


def test_a_long_report_of_any_answers_the_others_with_it() -> None:
    core = able(max_iterations=1_000)
    core.reply(*(delegate(f"d{n}", join="any") for n in range(40)))
    all_ended(core, first_id=44, content="x" * (REPORTED_BYTES - 1_000))
    assert [len(commit.events) for commit in commits_of_run(core)] == [1 + 36, 1, 1, 1]
    assert sorted(event.cause or 0 for event in core.events if event.cause and event.cause > 7) == list(range(8, 48))


def test_all_ends_of_a_turn_answer_in_one_commit() -> None:
    core = able(max_iterations=1_000)
    core.reply(*(delegate(f"d{n}") for n in range(MAX_CALLS)))
    all_ended(core)
    (commit,) = commits_of_run(core)
    assert commit.answers == {n: 8 + n for n in range(MAX_CALLS)}
    assert [(one.delegate_id, one.cause) for one in results(core)] == [(8 + n, 8 + n) for n in range(MAX_CALLS)]


def test_first_of_any_answers_the_others_once() -> None:
    core = able(max_iterations=1_000)
    core.reply(*(delegate(f"d{n}", join="any") for n in range(40)))
    all_ended(core, first_id=28)
    assert core.run() == CallModel(2, 1)
    assert sorted(event.cause or 0 for event in core.events if event.cause and event.cause > 7) == list(range(8, 48))
    assert [one.delegate_id for one in results(core)] == list(range(28, 48))
    all_ended(core)
    assert core.run() == CallModel(2, 1)
    assert [(one.delegate_id, one.cause) for one in results(core)[20:]] == [(n, None) for n in range(8, 28)]


def prompt_chars(core: Core) -> int:
    """Return how long the prompt is that the model would be sent."""
    fold = view_of(core)
    memory = ConversationMemory()
    for event in fold.list_events(fold.view().events):
        memory.add(event)
    parts = (part for message in memory.messages() for part in message.content)
    return sum(len(part.text) for part in parts if isinstance(part, TextPart))


def view_of(core: Core) -> ViewFold:
    fold = ViewFold()
    for event in core.events:
        fold.add(event)
    return fold


def test_reports_beyond_a_prompt_are_condensed_until_they_fit() -> None:
    """Each is cut as any observation; a model of 128,000 tokens takes about 500,000 characters."""
    spec = ConversationWindowCondenserSpec()
    agent = ABLE.model_copy(update={"condenser": spec})
    core = started(agent=agent, limits=Limits(max_iterations=10**10))
    in_background(core, 500)
    all_ended(core, content="x" * 40_000)
    assert isinstance(core.run(), CallModel)
    assert prompt_chars(core) > 500 * MAX_MESSAGE_CHARS
    while prompt_chars(core) > 500_000:
        core.fail("context_window", retry_in=None)
        assert isinstance(core.wants(), CallModel)
        condensed = create_condenser(spec).condense(view_of(core).view(overflows=core.state.calls.overflows))
        assert isinstance(condensed, CondensationAction)
        core.append(condensed)
    core.reply(finish())
    assert core.states() == ["running", "finished"]


# Side effects without events in the log


def test_side_effect_is_wanted_until_the_owner_has_run_it() -> None:
    core = able()
    assert in_background_at_work(core) == CallModel(2, 1)
    assert core.wants() == CallModel(2, 1)  # a commit and a replay see none
    assert next_effect(core.state, core.now, set()) == StartDelegate(8)
    decided = next_effect(core.state, core.now)
    assert next_effect(core.state, core.now, set(), decided=decided) == StartDelegate(8)
    assert next_effect(core.state, core.now, {StartDelegate(8)}, decided=decided) is decided
    play(core, "paused")
    order = core.state.delegation.order
    assert order is not None
    start, tell = StartDelegate(8), NotifyDelegates(AgentState.PAUSED, order.id)
    wanted = [next_effect(core.state, core.now, done) for done in (set(), {start}, {tell}, {start, tell})]
    assert wanted == [start, tell, start, Rest()]


@pytest.mark.parametrize("state", ["running", "paused", "stopped"])
def test_a_gap_takes_back_what_the_log_does_not_say(state: str) -> None:
    core = able()
    in_background_at_work(core)
    if state != "running":
        play(core, state)
    before = core.state.delegation.order
    core.put(EventsLostObservation(content="lost", last_id=core.state.version, known_id=99))
    tells = [effect for effect in find_side_effects(core.state) if isinstance(effect, NotifyDelegates)]
    if state == "running":
        assert tells == [NotifyDelegates(AgentState.RUNNING, core.state.version, takes_back=True)]
    else:
        assert before is not None
        assert tells == [NotifyDelegates(before.state, before.id)]


@pytest.mark.parametrize("scenario", ["stopped -> rest, trace 10: 11 SC stopped", "finish -> rest"])
def test_end_of_work_stops_background_delegates_and_answers_nothing(scenario: str) -> None:
    core = able()
    in_background_at_work(core)
    if scenario.startswith("stopped"):
        core.ask("stopped")
        core.run()
        assert core.trace(after=10) == ["11 SC stopped"]
    else:
        play(core, scenario)
    order = core.state.delegation.order
    assert order is not None
    assert list(find_side_effects(core.state)) == [NotifyDelegates(AgentState.STOPPED, order.id)]
