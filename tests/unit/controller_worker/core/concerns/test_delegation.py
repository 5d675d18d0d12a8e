"""Delegation in the core: waiting for delegates, their ends, their shares, and what cannot be delegated."""

from __future__ import annotations

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
from broker.log.delegates import make_delegate_id
from broker.log.invariants import find_violations
from controller_worker.agents.tool_calls import MAX_CALLS
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
from controller_worker.model.permits.budget_reservation import sum_own_cost_usd
from controller_worker.providers.messages.messages import TextPart
from tests.controller_parts import CID, Core, bash, call, check_snapshots, finish, started, think

ABLE = AgentSpec(enable_delegation=True)


def delegate(call_id: str = "d1", **arguments: Any) -> ModelToolCall:

    return call("delegate", json.dumps({"agent": "CodeActAgent", "task": "look", **arguments}), call_id)


def ended(core: Core, delegate_id: int, content: str = "CodeActAgent finishes task with a: 1", **fields: Any) -> Effect:
    """Let a delegate report its end."""
    event = DelegateEnded(
        delegate_id=delegate_id,
        conversation_id=make_delegate_id(CID, delegate_id),
        agent_state=AgentState.FINISHED,
        content=content,
        **{"outputs": {"a": 1}, "iterations": 2, "cost_usd": 0.5, "prompt_tokens": 30} | fields,
    )
    core.put(event)
    return core.run()


def results(core: Core) -> list[AgentDelegateObservation]:
    return [event for event in core.events if isinstance(event, AgentDelegateObservation)]


def started_in_background(core: Core, delegate_id: int) -> Effect:
    """Let the shell say that a background delegate has been begun."""
    action = core.event(delegate_id)
    return core.append(
        SuccessObservation(content="works", cause=delegate_id, tool_call_metadata=action.tool_call_metadata)
    )


# Waiting and ends


def test_a_delegate_is_waited_for_and_its_end_told_once() -> None:
    core = started(agent=ABLE)
    assert core.reply(delegate()) == AwaitDelegates((8,))
    assert ended(core, 8) == CallModel(2, 1)
    (result,) = results(core)
    assert (result.cause, result.delegate_id, result.outputs) == (8, 8, {"a": 1})
    assert result.content == "Delegated agent finished with result:\n\nCodeActAgent finishes task with a: 1"
    assert result.tool_call_metadata == core.event(8).tool_call_metadata
    assert core.state.delegation.delegates == ()
    assert ended(core, 8) == CallModel(2, 1)
    assert len(results(core)) == 1


def test_several_are_waited_for_together() -> None:
    core = started(agent=ABLE)
    assert core.reply(delegate("a"), delegate("b"), delegate("c")) == AwaitDelegates((8, 9, 10))
    assert ended(core, 9) == AwaitDelegates((8, 10))
    assert ended(core, 8) == AwaitDelegates((10,))
    assert ended(core, 10) == CallModel(2, 1)


def test_tools_of_the_turn_come_first_and_a_finish_waits() -> None:
    core = started(agent=ABLE)
    assert core.reply(delegate(), bash(), finish()) == AwaitTools((9,))
    assert core.observe(9) == AwaitDelegates((8,))
    assert core.states() == ["running"]
    assert ended(core, 8) == Rest()
    assert core.states() == ["running", "finished"]


def test_any_of_several_is_enough_and_the_others_go_on() -> None:
    core = started(agent=ABLE)
    core.reply(delegate("a", join="any"), delegate("b", join="any"))
    assert ended(core, 9) == CallModel(2, 1)
    goes_on = core.events[-1]
    assert isinstance(goes_on, SuccessObservation)
    assert goes_on.cause == 8
    core.reply(think())
    assert ended(core, 8) == CallModel(3, 1)
    assert [(one.delegate_id, one.cause) for one in results(core)] == [(9, 9), (8, None)]


def test_background_end_is_reported_when_it_occurs() -> None:
    core = started(agent=ABLE)
    assert core.reply(delegate(background=True)) == AwaitDelegates((8,))
    assert started_in_background(core, 8) == CallModel(2, 1)
    core.reply(bash())
    core.observe(core.state.tools.pending[0].id)
    assert ended(core, 8) == CallModel(3, 1)
    (result,) = results(core)
    assert (result.cause, result.tool_call_metadata, result.delegate_id) == (None, None, 8)


# What cannot be delegated


@pytest.mark.parametrize("arguments", [{"task": ""}, {"task": "  "}])
def test_without_a_task_the_model_is_told(arguments: dict[str, Any]) -> None:
    core = started(agent=ABLE)
    assert core.reply(delegate(**arguments)) == CallModel(2, 1)
    answer = core.events[-1]
    assert isinstance(answer, ErrorObservation)
    assert (answer.cause, answer.content) == (8, "The delegate was not started: its inputs hold no task.")
    assert core.state.delegation.delegates == ()


def test_the_depth_is_limited() -> None:
    core = started(agent=ABLE, limits=Limits(max_delegate_level=0))
    assert core.reply(delegate()) == CallModel(2, 1)
    answer = core.events[-1]
    assert isinstance(answer, ErrorObservation)
    assert "0 levels deep" in answer.content


def test_the_level_of_a_delegate_is_its_parents() -> None:
    created = ConversationCreated(conversation_id="d1", parent=Parent(conversation_id=CID, delegate_id=8, level=2))
    state = apply(State(), with_id(created, 1))
    assert (state.setup.delegate_level, state.setup.parent) == (2, created.parent)


def test_a_delegate_without_anything_left_is_refused() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=3))
    core.reply(delegate("a"), delegate("b"))
    texts = {e.cause: e.content for e in core.events if isinstance(e, ErrorObservation)}
    assert texts == {
        8: "The delegate was not started: its parent has no iterations left to give it.",
        9: "The delegate was not started: its parent has no iterations left to give it.",
    }


# Shares


def test_remainder_is_divided_with_a_share_for_the_parent() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=11, max_budget_usd=6.25, max_tokens=1_610))
    core.reply(delegate("a"), delegate("b"))
    assert [(one.iterations, one.budget_usd, one.tokens) for one in core.state.delegation.delegates] == [
        (3, 2.0, 500)
    ] * 2
    ended(core, 8, iterations=3, cost_usd=1.0, prompt_tokens=100)
    assert ended(core, 9, iterations=3, cost_usd=0.5, prompt_tokens=0) == CallModel(2, 1)
    state = core.state
    assert (state.usage.iteration, state.delegation.iterations, state.usage.cost_usd, state.usage.prompt_tokens) == (
        1,
        6,
        1.75,
        200,
    )
    for n in range(3):
        assert core.reply(think(str(n))) == CallModel(n + 3, 1)
    assert core.reply(think()) == Rest()
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
    core = started(agent=ABLE, limits=Limits(max_iterations=9, max_budget_usd=4.25, max_tokens=1_110))
    core.reply(delegate("a", background=True))
    started_in_background(core, 8)
    core.reply(delegate("b"))
    shares = [(one.iterations, one.budget_usd, one.tokens) for one in core.state.delegation.delegates]
    assert shares == [(4, 2.0, 500), (1, 0.875, 195)]


def test_costs_of_a_forks_origin_are_not_its_own() -> None:
    core = started(agent=ABLE)
    core.reply(delegate())
    ended(core, 8, cost_usd=0.5)
    inherited = len(core.events)
    core.reply(think())
    created = core.events[0].model_copy(update={"forked_from": f"{CID}@{inherited}"})
    state = fold(State(), [created, *core.events[1:]])
    assert (state.usage.cost_usd, state.usage.inherited_usd, sum_own_cost_usd(state)) == (1.0, 0.25, 0.25)


def test_one_alone_leaves_its_parent_a_half() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=20))
    core.reply(delegate())
    assert core.state.delegation.delegates[0].iterations == 9
    assert ended(core, 8, iterations=9) == CallModel(2, 1)


def test_parent_keeps_a_share_beside_a_background_delegate() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=5))
    core.reply(delegate(background=True))
    assert core.state.delegation.delegates[0].iterations == 2
    started_in_background(core, 8)
    assert core.reply(think("a")) == CallModel(3, 1)
    assert core.reply(think("b")) == AwaitDelegates(())
    assert find_reached_limit(core.state) is None
    assert ended(core, 8, iterations=1) == CallModel(4, 1)


@pytest.mark.parametrize("limits", [Limits(max_budget_usd=1.0), Limits(max_tokens=400)], ids=["budget", "tokens"])
def test_parent_does_not_spend_what_background_delegates_may(limits: Limits) -> None:
    core = started(agent=ABLE, limits=limits)
    core.reply(delegate(background=True))  # each reply costs 0.25 and 110 tokens
    started_in_background(core, 8)
    assert core.reply(think("a")) == CallModel(3, 1)
    assert core.reply(think("b")) == AwaitDelegates(())
    assert find_reached_limit(core.state) is None
    assert ended(core, 8, cost_usd=0.0, prompt_tokens=0) == CallModel(4, 1)


# States down the tree


@pytest.mark.parametrize(("asked", "told"), [("paused", AgentState.PAUSED), ("stopped", AgentState.STOPPED)])
def test_what_a_person_asks_for_is_told_to_the_delegates(asked: str, told: AgentState) -> None:
    core = started(agent=ABLE)
    core.reply(delegate())
    core.ask(asked)
    assert core.run() == Rest()
    assert core.state.delegation.order == DelegateOrder(told, len(core.events))


def test_a_resume_is_told_too() -> None:
    core = started(agent=ABLE)
    core.reply(delegate())
    core.ask("paused")
    core.run()
    core.ask("running")
    assert core.run() == AwaitDelegates((8,))
    assert core.state.delegation.order == DelegateOrder(AgentState.RUNNING, len(core.events))


def test_stop_answers_the_action_and_later_reports_have_no_cause() -> None:
    core = started(agent=ABLE)
    core.reply(delegate())
    core.ask("stopped")
    core.run()
    answer = core.events[-2]
    assert isinstance(answer, ErrorObservation)
    assert (answer.cause, answer.error_id) == (8, "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED")
    assert ended(core, 8, "CodeActAgent was stopped.") == Rest()
    assert [(one.delegate_id, one.cause) for one in results(core)] == [(8, None)]
    assert find_violations(core.events, conversation_id=CID) == []


@pytest.mark.parametrize("asked", ["stopped", "paused"])
def test_unstartable_delegate_is_answered_once_despite_requests(asked: str) -> None:
    core = started(agent=ABLE)
    core.ask(asked)
    core.reply(delegate(task=""), bash())
    assert core.run() == Rest()
    assert [event.cause for event in core.events if event.cause == 9] == [9]
    assert core.state.delegation.delegates == ()
    core.ask("running")
    core.run()
    assert find_violations(core.events, conversation_id=CID, is_over=False) == []


def test_a_finish_stops_what_still_works_in_the_background() -> None:
    core = started(agent=ABLE)
    core.reply(delegate(background=True))
    started_in_background(core, 8)
    assert core.reply(finish()) == Rest()
    assert core.state.delegation.order is not None
    assert core.state.delegation.order.state is AgentState.STOPPED


# What a delegate is


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
    core = started(agent=ABLE)
    core.reply(delegate("a", join="any"), delegate("b", join="any"))
    ended(core, 9)
    core.reply(delegate("c", background=True))
    started_in_background(core, core.state.delegation.delegates[-1].id)
    core.ask("paused")
    core.run()
    ended(core, 8)
    check_snapshots(core)


def test_an_end_of_a_delegate_that_is_none_means_nothing() -> None:
    core = started(agent=ABLE)
    before = core.state.usage
    assert ended(core, 99) == CallModel(1, 1)
    assert results(core) == []
    assert core.state.usage == before


def test_without_the_tool_nothing_is_delegated() -> None:
    core = started()
    core.reply(delegate())
    assert not any(isinstance(event, AgentDelegateAction) for event in core.events)


# Many at once


def all_ended(core: Core, *, first_id: int = 1, content: str = "") -> None:
    """Let every delegate that is at work report its end before the core is asked again."""
    for one in core.state.delegation.delegates:
        if one.id >= first_id:
            core.put(
                DelegateEnded(
                    delegate_id=one.id,
                    conversation_id=make_delegate_id(CID, one.id),
                    agent_state=AgentState.FINISHED,
                    content=content or f"CodeActAgent finishes task with a: {one.id}",
                    iterations=1,
                )
            )


def in_background(core: Core, count: int) -> list[int]:
    """Begin delegates in the background, as many with each reply as a reply may hold; return their ids."""
    ids: list[int] = []
    while len(ids) < count:
        calls = (
            delegate(f"d{n}", task=f"look at {n}", background=True) for n in range(min(MAX_CALLS, count - len(ids)))
        )
        wanted = core.reply(*calls)
        assert isinstance(wanted, AwaitDelegates)
        ids += wanted.delegate_ids
        for delegate_id in wanted.delegate_ids:
            started_in_background(core, delegate_id)
    return ids


@pytest.mark.parametrize("count", [17, 500])
def test_all_ends_that_are_due_enter_in_one_commit(count: int) -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=10**10))
    ids = in_background(core, count)
    all_ended(core)
    commits, wanted = len(core.commits), core.run()
    assert isinstance(wanted, CallModel)
    assert len(core.commits) == commits + 1
    assert [one.delegate_id for one in results(core)] == ids
    assert core.state.delegation.delegates == ()
    assert find_violations(core.events, conversation_id=CID, is_over=False) == []


def test_long_reports_enter_in_several_bounded_commits() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=10**40))
    ids = in_background(core, 2_000)
    all_ended(core, content="x" * 30_000)
    commits, wanted = len(core.commits), core.run()
    assert isinstance(wanted, CallModel)
    assert [one.delegate_id for one in results(core)] == ids
    sizes = [sum(len(pack(event.wire())) for event in commit.events) for commit in core.commits[commits:]]
    assert len(sizes) == 59
    assert max(sizes) <= REPORTED_BYTES + 10_000
    assert find_violations(core.events, conversation_id=CID, is_over=False) == []


def test_a_report_beyond_the_bound_enters_alone() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=10**40))
    in_background(core, 3)
    all_ended(core, content="x" * (REPORTED_BYTES + 1))
    commits = len(core.commits)
    core.run()
    assert [len(commit.events) for commit in core.commits[commits:]] == [1, 1, 1]


def test_a_long_report_of_any_answers_the_others_with_it() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=1_000))
    core.reply(*(delegate(f"d{n}", join="any") for n in range(40)))
    all_ended(core, first_id=44, content="x" * (REPORTED_BYTES - 1_000))
    commits = len(core.commits)
    assert core.run() == CallModel(2, 1)
    assert [len(commit.events) for commit in core.commits[commits:]] == [1 + 36, 1, 1, 1]
    assert sorted(event.cause or 0 for event in core.events if event.cause and event.cause > 7) == list(range(8, 48))


def test_all_ends_of_a_turn_answer_in_one_commit() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=1_000))
    core.reply(*(delegate(f"d{n}") for n in range(MAX_CALLS)))
    all_ended(core)
    commits = len(core.commits)
    assert core.run() == CallModel(2, 1)
    assert len(core.commits) == commits + 1
    assert core.commits[-1].answers == {n: 8 + n for n in range(MAX_CALLS)}
    assert [(one.delegate_id, one.cause) for one in results(core)] == [(8 + n, 8 + n) for n in range(MAX_CALLS)]


def test_many_refusals_are_answered_in_one_commit() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=10))
    assert core.reply(*(delegate(f"d{n}", task=f"look at {n}") for n in range(MAX_CALLS))) == CallModel(2, 1)
    assert [event.cause for event in core.events if isinstance(event, ErrorObservation)] == [
        8 + n for n in range(MAX_CALLS)
    ]
    assert core.state.delegation.delegates == ()


def test_first_of_any_answers_the_others_once() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=1_000))
    core.reply(*(delegate(f"d{n}", join="any") for n in range(40)))
    all_ended(core, first_id=28)
    assert core.run() == CallModel(2, 1)
    assert sorted(event.cause or 0 for event in core.events if event.cause and event.cause > 7) == list(range(8, 48))
    assert [one.delegate_id for one in results(core)] == list(range(28, 48))
    all_ended(core)
    assert core.run() == CallModel(2, 1)
    assert [(one.delegate_id, one.cause) for one in results(core)[20:]] == [(n, None) for n in range(8, 28)]


def test_a_stop_answers_every_delegate_and_tells_all_later_ends() -> None:
    core = started(agent=ABLE, limits=Limits(max_iterations=1_000))
    core.reply(*(delegate(f"d{n}") for n in range(MAX_CALLS)))
    core.ask("stopped")
    assert core.run() == Rest()
    all_ended(core)
    assert core.run() == Rest()
    assert len(results(core)) == MAX_CALLS
    assert find_violations(core.events, conversation_id=CID) == []


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


# Errands: what leaves nothing in the log


def test_an_errand_is_wanted_until_the_owner_has_run_it() -> None:
    core = started(agent=ABLE)
    core.reply(delegate(background=True))
    started_in_background(core, 8)
    core.ask("paused")
    core.run()
    order = core.state.delegation.order
    assert order is not None
    start, tell = StartDelegate(8), NotifyDelegates(AgentState.PAUSED, order.id)
    assert [next_effect(core.state, core.now, done) for done in (set(), {start}, {tell}, {start, tell})] == [
        *(start, tell),
        *(start, Rest()),
    ]


def test_a_commit_and_a_replay_see_no_errands() -> None:
    core = started(agent=ABLE)
    core.reply(delegate(background=True))
    started_in_background(core, 8)
    assert core.wants() == CallModel(2, 1)
    assert next_effect(core.state, core.now, set()) == StartDelegate(8)


def test_ended_or_exhausted_delegate_causes_no_errand() -> None:
    core = started(agent=ABLE)
    core.reply(delegate(background=True))
    started_in_background(core, 8)
    core.ask("stopped")
    core.run()
    order = core.state.delegation.order
    assert order is not None
    assert list(find_side_effects(core.state)) == [NotifyDelegates(AgentState.STOPPED, order.id)]


@pytest.mark.parametrize("state", ["running", "paused", "stopped"])
def test_a_gap_takes_back_what_the_log_does_not_say(state: str) -> None:
    core = started(agent=ABLE)
    core.reply(delegate(background=True))
    started_in_background(core, 8)
    if state != "running":
        core.ask(state)
        core.run()
    before = core.state.delegation.order
    core.put(EventsLostObservation(content="lost", last_id=core.state.version, known_id=99))
    tells = [errand for errand in find_side_effects(core.state) if isinstance(errand, NotifyDelegates)]
    if state == "running":
        assert tells == [NotifyDelegates(AgentState.RUNNING, core.state.version, takes_back=True)]
    else:
        assert before is not None
        assert tells == [NotifyDelegates(before.state, before.id)]


def test_stop_does_not_answer_an_already_answered_call() -> None:
    core = started(agent=ABLE)
    core.reply(delegate(background=True))
    started_in_background(core, 8)
    core.ask("stopped")
    asked = core.state.version
    core.run()
    assert core.trace(after=asked) == [f"{asked + 1} SC stopped"]
