"""User changes to a running conversation, and their handling by its owner."""

from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction, SystemMessageAction
from broker.contract.agent_state import AgentState
from broker.contract.double_texting import InterruptedObservation, RolledBackObservation
from broker.contract.events import AgentSpec, Event, EventSource, Limits
from broker.contract.interventions import ConversationChanged
from broker.contract.observations import ErrorObservation, UserRejectObservation
from broker.contract.policies import ConfirmationPolicy
from broker.contract.tool_specs import ToolOffer
from broker.log.invariants import find_violations
from controller_worker.core.effects import CallModel, Rest
from tests.controller_parts import CID, Core, bash, check_replay, check_snapshots, finish, messages_of, said, started
from tests.scenarios import play

ALWAYS = ConfirmationPolicy(mode="always", analyzer="none")
STOCK = ToolOffer(key="stock", name="stock", description="Say how many there are.", parameters={"type": "object"})


def change(core: Core, **parts: Any) -> Core:
    core.put(ConversationChanged(source=EventSource.USER, **parts))
    return core


def check(core: Core) -> None:
    check_snapshots(core)
    check_replay(core)


def test_a_policy_counts_from_the_next_reply_on() -> None:
    core = change(started(), confirmation=ALWAYS, by="ann", reason="production")
    check(play(core, "bash -> rest, states running awaiting_user_confirmation"))


def test_an_action_that_is_asked_about_stays_asked_about() -> None:
    core = play(started(agent=AgentSpec(confirmation=ALWAYS)), "bash")
    change(core, confirmation=ConfirmationPolicy())
    check(play(core, "wait 0 -> rest, asked 8"))


def test_an_analyzer_alone_leaves_the_policy() -> None:
    core = started(agent=AgentSpec(confirmation=ConfirmationPolicy(mode="risky", threshold="MEDIUM")))
    change(core, analyzer="llm")
    policy = core.state.setup.agent.confirmation
    assert (policy.mode, policy.threshold, policy.analyzer) == ("risky", "MEDIUM", "llm")
    check(core)


def test_tools_are_added_and_equal_keys_replaced() -> None:
    core = started()
    change(core, tools=(STOCK,))
    assert core.agent.tools[-1].name == "stock"
    newer = STOCK.model_copy(update={"description": "Count."})
    change(core, tools=(newer,))
    assert core.state.setup.agent.tools == (newer,)
    check(core)


def test_another_agent_gets_its_own_system_message_once() -> None:
    core = started()
    change(core, agent=AgentSpec(name="DummyAgent"))
    core.run()
    said_by = [event.agent_class for event in core.events if isinstance(event, SystemMessageAction)]
    assert said_by == ["CodeActAgent", "DummyAgent"]
    change(core, agent=AgentSpec(name="DummyAgent", enable_think=False))
    core.run()
    assert sum(isinstance(event, SystemMessageAction) for event in core.events) == 2
    check(core)


def test_lower_limits_end_work_and_higher_ones_continue() -> None:
    core = play(started(), "think")
    change(core, limits=Limits(max_iterations=1))
    play(core, "wait 0 -> rest, states running error, code max_iterations")
    change(core, limits=Limits(max_iterations=2))
    check(play(core, "running -> model 2, think, code max_iterations"))


def test_budget_set_after_spending_is_not_raised_further() -> None:
    core = play(started(limits=Limits(max_budget_usd=0.2)), "think, code max_budget")
    change(core, limits=Limits(max_budget_usd=0.3))
    play(core, "running")
    assert core.state.usage.max_budget_usd == 0.3
    play(core, "think, code max_budget, running")  # and from now on as before
    assert core.state.usage.max_budget_usd == pytest.approx(0.8)
    check(core)


def test_running_time_counts_from_the_change() -> None:
    core = play(started(limits=Limits(max_seconds=10)), "wait 8")
    change(core, limits=Limits(max_seconds=10))
    play(core, "wait 8 -> model 1")
    change(core, limits=Limits())
    check(play(core, "wait 1000 -> model 1"))
    change(core, limits=Limits(max_seconds=10))
    check(play(core, "wait 11 -> rest, states running error"))


def test_changes_are_not_taken_back_with_the_work() -> None:
    core = play(Core(double_texting="rollback"), "wait 0, bash")
    change(core, limits=Limits(max_iterations=7), confirmation=ALWAYS, tools=(STOCK,))
    play(core, "say(Something else)")
    assert any(isinstance(event, RolledBackObservation) for event in core.events)
    setup = core.state.setup
    assert (setup.limits.max_iterations, core.state.usage.max_iterations) == (7, 7)
    assert (setup.agent.confirmation, setup.agent.tools) == (ALWAYS, (STOCK,))
    check(core)


def test_agent_chosen_before_a_rollback_stays_and_greets_again() -> None:
    core = play(Core(double_texting="rollback"), "wait 0, bash")
    play(change(core, agent=AgentSpec(name="DummyAgent")), "say(Something else)")
    assert core.state.setup.agent.name == "DummyAgent"
    taken_back = next(event for event in core.events if isinstance(event, RolledBackObservation))
    later = core.events[taken_back.id :]
    assert [event.agent_class for event in later if isinstance(event, SystemMessageAction)] == ["DummyAgent"]
    check(core)


def test_the_model_sees_nothing_of_a_change() -> None:
    core = started()
    before = messages_of(core.events)
    change(core, labels={"team": "a"}, reason="moved")
    assert messages_of(core.events) == before
    assert core.run() == CallModel(1, 1)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"limits": Limits(max_iterations=5)}, "Changed: limits: max_iterations=5, max_delegate_level=3"),
        ({"confirmation": ALWAYS, "by": "ann"}, "Changed: confirmation is always, by ann"),
        ({"agent": AgentSpec(name="X"), "reason": "why"}, "Changed: the agent is X (why)"),
        ({"tools": (STOCK,), "labels": {}}, "Changed: tools are added: stock; labels: none"),
        ({"analyzer": "mine"}, "Changed: risks are judged by mine"),
        ({}, "Changed: nothing has changed"),
    ],
)
def test_a_change_is_one_line_for_people(parts: dict[str, Any], sentence: str) -> None:
    assert ConversationChanged(**parts).sentence == sentence


def rejected(core: Core, reason: str | None) -> Any:
    core.put(ChangeAgentStateAction(agent_state=AgentState.USER_REJECTED, reason=reason, source=EventSource.USER))
    return core.run()


def test_agent_reads_a_rejection_reason_and_continues() -> None:
    core = started(agent=AgentSpec(confirmation=ALWAYS))
    core.reply(bash("rm -r build"), bash("ls", "c2"))
    assert rejected(core, "Keep the build.") == CallModel(2, 1)
    read = str(messages_of(core.events)[-2:])
    assert "It was not executed. The reason: Keep the build." in read
    assert "rejected an earlier one of the same turn" in read
    answers = [event for event in core.events if isinstance(event, UserRejectObservation)]
    assert len(answers) == 2
    core.reply(finish())
    assert find_violations(core.events, conversation_id=CID, is_strict=True) == []
    check(core)


def test_fork_within_a_rejection_continues_like_the_origin() -> None:
    core = play(started(agent=AgentSpec(confirmation=ALWAYS)), "bash+bash(pwd)")
    rejected(core, "No.")
    first = next(event.id for event in core.events if isinstance(event, UserRejectObservation))
    created = core.event(1).model_copy(update={"forked_from": f"{CID}@{first}"})
    fork = Core(task=None)
    fork.events, fork.state = [], type(fork.state)()
    for event in [created, *core.events[1:first]]:
        fork.put(event.model_copy(update={"id": 0}))
    assert fork.run() == CallModel(2, 1)
    assert find_violations(fork.events, conversation_id=CID, is_strict=True, is_over=False) == []


def interrupted(core: Core, *events: Event) -> Any:
    request = ChangeAgentStateAction(agent_state=AgentState.PAUSED, is_interrupt=True, source=EventSource.USER)
    core.put(request, *events)
    return core.run()


@pytest.mark.parametrize(
    ("agent", "before", "is_cut"), [({}, "wait 0", True), ({"confirmation": ALWAYS}, "bash", False)]
)
def test_interruption_gives_up_a_model_call_only(agent: dict[str, Any], before: str, is_cut: bool) -> None:
    core = play(started(agent=AgentSpec(**agent)), before)
    interrupted(core)
    assert any(isinstance(event, InterruptedObservation) for event in core.events) is is_cut
    assert core.states()[-1] == "paused"
    check(core)


def test_an_interruption_stops_what_runs_and_pauses() -> None:
    core = play(started(), "bash(sleep 60)")
    assert interrupted(core) == Rest()
    assert core.state.lifecycle.agent_state is AgentState.PAUSED
    stopped = next(event for event in core.events if isinstance(event, ErrorObservation))
    assert stopped.content == "The action was stopped by the person."
    assert 8 in core.commits[-1].cancels
    check(play(core, "running -> model 2"))


def test_a_message_after_the_interruption_continues_at_once() -> None:
    core = play(started(), "bash(sleep 60)")
    assert interrupted(core, said("Look here instead")) == CallModel(2, 1)
    check(core)
