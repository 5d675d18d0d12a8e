"""Double texting: the effect of a message that arrives while the agent works."""

from typing import Any

import pytest

from broker.contract.actions import AgentDelegateAction, CmdRunAction, MessageAction
from broker.contract.agent_state import AgentState
from broker.contract.double_texting import InterruptedObservation, RolledBackObservation, find_rolled_back
from broker.contract.events import DelegateEnded, Event, EventSource, ModelSwitched
from broker.contract.observations import AgentDelegateObservation, AgentStateChangedObservation, ErrorObservation
from broker.log.status import fold_status
from controller_worker.core.controller import fold, next_effect
from controller_worker.core.effects import CallModel, NotifyDelegates
from controller_worker.core.state import State
from tests.controller_parts import Core, bash, check_replay, check_snapshots, messages_of, said, think
from tests.scenarios import play


def texting(policy: str, **options: Any) -> Core:
    core = Core(double_texting=policy, **options)
    core.run()
    return core


def last(core: Core, kind: type[Event]) -> Any:
    return next(event for event in reversed(core.events) if isinstance(event, kind))


def check_log(core: Core) -> None:
    """Check that the log replays to the same decisions, and that a snapshot of any event continues alike."""
    check_snapshots(core)
    check_replay(core)
    answered = [event.cause for event in core.events if event.cause and core.event(event.cause).runnable]
    assert len(answered) == len(set(answered))


def check_texts(core: Core, *, shows: list[str], hides: list[str]) -> None:
    """Check what the model reads."""
    without = find_rolled_back(core.events)
    read = str(messages_of([event for event in core.events if event.id not in without]))
    assert [text for text in shows if text not in read] == []
    assert [text for text in hides if text in read] == []


def test_an_interruption_answers_what_runs_and_reads_the_message() -> None:
    core = texting("interrupt")
    core.reply(bash("a", "c1"), bash("b", "c2"))
    actions = [event.id for event in core.events if isinstance(event, CmdRunAction)]
    core.say("stop that")
    assert core.run() == CallModel(2, 1)
    answers = [event.cause for event in core.events if isinstance(event, ErrorObservation)]
    assert answers == actions
    assert core.commits[-2].cancels == actions or core.commits[-1].cancels == actions
    assert core.state.tools.pending == ()
    assert fold_status(core.events).state is AgentState.RUNNING
    check_log(core)


def test_an_interruption_of_a_model_call_reads_the_message_next() -> None:
    check_log(play(texting("interrupt"), "say(rather this) & late finish -> model 2, states running"))


def test_one_message_may_interrupt_where_others_wait() -> None:
    core = texting("enqueue")
    core.reply(bash())
    core.put(said("now").model_copy(update={"double_texting": "interrupt"}))
    assert core.run() == CallModel(2, 1)
    assert last(core, InterruptedObservation).message_id == last(core, MessageAction).id
    check_log(core)


@pytest.mark.parametrize(
    ("policy", "scenario"),
    [
        ("enqueue", "bash, say -> tools 8"),
        ("interrupt", "finish, states running finished, say -> model 2"),
        ("interrupt", "bash, say & stopped, states running stopped, say -> model 2"),
        ("rollback", "bash, say & stopped, states running stopped, say -> model 2"),
    ],
    ids=["waits by default", "at rest", "stop before an interruption", "stop before a rollback"],
)
def test_message_that_interrupts_nothing(policy: str, scenario: str) -> None:
    core = play(texting(policy), scenario)
    assert not [e for e in core.events if isinstance(e, InterruptedObservation | RolledBackObservation)]
    check_log(core)


def test_rollback_equals_a_task_never_given() -> None:
    core = texting("rollback")
    core.reply(think("a secret plan"), bash())
    action = last(core, CmdRunAction).id
    core.say("something else")
    message = core.state.version
    assert core.run() == CallModel(2, 1)
    rolled_back = last(core, RolledBackObservation)
    assert (rolled_back.start_id, rolled_back.kept) == (2, (message,))
    assert [event.cause for event in core.events if isinstance(event, ErrorObservation)] == [action]
    check_texts(core, shows=["something else"], hides=["secret plan", "'task'"])
    # As in a conversation with this first message: it is greeted, and the workspace is recalled for it.
    assert [event.kind for event in core.events].count("action.system") == 2
    assert core.state.tools.pending == ()
    assert core.state.usage.iteration == 1  # payments stay
    check_log(core)


def test_rollback_returns_to_the_last_message_at_rest() -> None:
    core = play(texting("rollback"), "bash(first), ran, finish(the first answer)")
    before = core.state
    core.say("second task")
    second = core.state.version
    play(core, "bash(second), ran, say(third task)")
    assert last(core, RolledBackObservation).start_id == second
    check_texts(core, shows=["the first answer", "third task"], hides=["second"])
    for part in ("tasks", "plan", "acceptance", "rules"):
        assert getattr(core.state, part) == getattr(before, part)
    check_log(core)


def test_rollback_removes_enqueued_messages_but_not_later_ones() -> None:
    core = play(texting("rollback"), "bash")
    core.put(said("and this").model_copy(update={"double_texting": "enqueue"}))
    core.run()
    core.put(said("no: this"), said("with that"))
    kept = (core.state.version - 1, core.state.version)
    core.run()
    assert last(core, RolledBackObservation).kept == kept
    check_texts(core, shows=["no: this", "with that"], hides=["and this"])
    check_log(core)


def test_a_rollback_can_be_rolled_back() -> None:
    core = play(texting("rollback"), "bash(one), say(second), bash(two), say(third) -> model 3")
    check_texts(core, shows=["third"], hides=["second"])
    assert len([event for event in core.events if isinstance(event, RolledBackObservation)]) == 2
    check_log(core)


def test_rollback_removes_a_reply_in_flight() -> None:
    core = play(texting("rollback"), "say(something else) & late bash(late) -> model 2")
    check_texts(core, shows=["something else"], hides=["late"])
    assert core.state.usage.cost_usd == pytest.approx(0.25)
    check_log(core)


def test_rollback_keeps_answers_to_earlier_actions() -> None:
    core = play(texting("rollback"), "bash(slow), paused, say(do it differently), ran 8, say(no)")
    answer = next(event for event in core.events if event.cause == 8)
    assert last(core, RolledBackObservation).start_id < answer.id
    assert answer.id not in find_rolled_back(core.events)
    check_texts(core, shows=["a.txt"], hides=[])
    check_log(core)
    check_log(play(texting("rollback"), "bash(slow), paused, say(do it differently), say(no) -> tools 8"))


def test_the_model_that_a_person_has_chosen_stays() -> None:
    core = texting("rollback")
    core.reply(bash())
    core.put(ModelSwitched(model="acme/other", source=EventSource.USER), said("with another model"))
    core.run()
    assert core.state.setup.agent.llm.model == "acme/other"
    check_log(core)


@pytest.mark.parametrize("policy", ["interrupt", "rollback"])
def test_delegates_are_stopped(policy: str) -> None:
    core = texting(policy)
    core.append(AgentDelegateAction(agent="CodeActAgent", inputs={"task": "look"}))
    delegate = last(core, AgentDelegateAction).id
    core.say("leave that")
    assert core.run() == CallModel(1, 1)  # it waits for the end of none
    assert [event.cause for event in core.events if isinstance(event, ErrorObservation)] == [delegate]
    told = next_effect(core.state, core.now, ())
    assert isinstance(told, NotifyDelegates)
    assert told.state is AgentState.STOPPED
    assert told.since <= delegate < told.order_id
    core.put(DelegateEnded(delegate_id=delegate, conversation_id="d1", agent_state=AgentState.STOPPED, cost_usd=0.5))
    core.run()
    assert core.state.usage.cost_usd == pytest.approx(0.5)
    assert core.state.delegation.delegates == ()
    is_told = any(isinstance(event, AgentDelegateObservation) for event in core.events)
    assert is_told == (policy == "interrupt")
    check_snapshots(core)


def test_a_rollback_stops_no_delegate_of_before() -> None:
    core = texting("rollback")
    core.append(AgentDelegateAction(agent="CodeActAgent", inputs={"task": "look"}, background=True))
    before = last(core, AgentDelegateAction).id
    play(core, "paused, say(do it differently)")
    core.append(AgentDelegateAction(agent="CodeActAgent", inputs={"task": "look again"}))
    taken_back_too = last(core, AgentDelegateAction).id
    play(core, "say(no)")
    told = next_effect(core.state, core.now, ())
    assert isinstance(told, NotifyDelegates)
    assert told.state is AgentState.STOPPED
    assert before < told.since <= taken_back_too < told.order_id


@pytest.mark.parametrize(
    ("policy", "end"), [("interrupt", InterruptedObservation), ("rollback", RolledBackObservation)]
)
def test_pause_shows_before_a_messages_request_and_lasts(policy: str, end: type[Event]) -> None:
    core = play(texting(policy), "bash, say(rather this) & paused -> rest, states running paused")
    assert last(core, AgentStateChangedObservation).id < last(core, end).id
    check_log(play(core, "running -> model 2"))


@pytest.mark.parametrize("policy", ["enqueue", "interrupt", "rollback"])
def test_every_state_before_a_crash_decides_alike(policy: str) -> None:
    """A worker that dies anywhere in it is followed by one that folds the log that far, and decides the same."""
    core = texting(policy)
    core.reply(bash())
    core.say("something else")
    version = core.state.version
    core.run()
    decided = [event.export() for event in core.events[version:]]
    again = Core(double_texting=policy)
    again.events, again.state = [], State()
    again.put(*(event.model_copy(update={"timestamp": None}) for event in core.events[:version]))
    again.run()
    assert [event.export() for event in again.events[version:]] == decided


def test_a_log_without_the_policy_ignores_a_rollback_event() -> None:
    core = texting("enqueue")
    core.put(RolledBackObservation(start_id=2))
    assert core.state == fold(State(), core.events)
    assert core.wants() == CallModel(1, 1)
