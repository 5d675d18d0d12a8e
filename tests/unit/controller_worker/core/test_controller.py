"""The core: the effect of each event, the next decision, and user requests at any time."""

import pytest

from broker.contract.actions import AgentFinishAction, AgentRejectAction, CmdRunAction, MessageAction, NullAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, ConversationCreated, Event, EventSource, Limits, ModelReply, with_id
from broker.contract.observations import AgentStateChangedObservation, CmdOutputObservation, ErrorObservation
from broker.contract.recall import RecallAction, RecallObservation
from controller_worker.core.announcement import end_in_error
from controller_worker.core.controller import apply
from controller_worker.core.effects import Append, AwaitTools, CallModel, Effect, Rest
from controller_worker.core.state import State
from tests.controller_parts import Core, answer, said, started
from tests.scenarios import play, scenarios

STOPPED_TEXT = "Stop button pressed. The action has not been executed."


@scenarios(
    {
        # Ends of a turn
        "a thought and an error lead to the next step": "think -> model 2, unknown -> model 3",
        "message during the model call is answered before the end": (
            "say, late finish -> model 2, states running, finish -> rest, states running finished"
        ),
        "message during a model question is not its answer": "say, late text -> model 2",
        "an outdated reply still acts": "say, late bash -> tools 11",
        "an unread message keeps an outdated finish from ending": "say & late finish -> model 2",
        "an unread message keeps a finish from ending": "say & finish -> model 2",
        # Messages
        "message reverts the end of a waiting turn": "finish+bash, say -> tools 9, ran 9 -> model 2",
        # Tools
        "a command waits for its observation": "bash -> tools 8, pending 8, dispatched 8, ran 8 -> model 2, pending ",
        "calls of one turn run one at a time": (
            "bash+bash+bash -> tools 8, dispatched 8, ran 8 -> tools 9, ran 9 -> tools 10, ran 10 -> model 2, "
            "dispatched 8 9 10"
        ),
        "a finish beside other calls waits for them": "finish+bash -> tools 9, ran 9 -> rest, states running finished",
        # Requests
        "a pause lets the running action end and begins nothing": (
            "bash, paused -> rest, ran 8 -> rest, states running paused"
        ),
        "a resume waits for an action that still runs": "bash, paused, running -> tools 8",
        "answer during a pause is kept and actions wait": "paused, late bash -> rest, dispatched , running -> tools 10",
        "a finish during a pause ends the conversation": "paused, late finish -> rest, states running paused finished",
        "finish during a pause waits for its turns calls": (
            "paused, late bash+finish -> rest, states running paused, running -> tools 10, ran 10 -> rest, "
            "states running paused running finished"
        ),
        "a message resumes": "paused, say -> model 1, states running paused running",
        "asking for the state it is in changes nothing": "running -> model 1, states running",
        "a resume right after a pause takes it back": "paused & running -> model 1, states running",
        "an observation after the stop changes nothing": "bash, stopped, ran 8 -> rest, states running stopped",
        "a stopped conversation continues with a message": "stopped, say -> model 1",
        "a stopped conversation continues with a resume": "stopped, running -> model 1",
        "a stop forgets how the turn was to end": "bash+finish, stopped, running -> model 2",
    }
    | {
        f"nobody may ask for {state}": f"{state} -> model 1, states running"
        for state in (
            *("loading", "finished", "rejected", "error", "awaiting_user_input", "rate_limited"),
            "user_confirmed",
        )
    }
)
def test_core_decides(scenario: str) -> None:
    play(started(), scenario)


# The beginning


def test_events_are_applied_in_order_and_once() -> None:
    with pytest.raises(AssertionError, match="event 2 after version 0"):
        apply(State(), with_id(said("hi"), 2))


def test_the_first_creation_sets_agent_workspace_and_limits() -> None:
    limits = Limits(max_iterations=7, max_budget_usd=1.5)
    core = Core(agent=AgentSpec(tool_concurrency=3), limits=limits, headless=False)
    assert core.state.lifecycle.agent_state is AgentState.LOADING
    core.put(ConversationCreated(conversation_id="another-one", limits=Limits(max_iterations=1_000)))
    setup, usage = core.state.setup, core.state.usage
    assert (
        setup.conversation_id,
        setup.agent.tool_concurrency,
        setup.workspace.path,
        setup.limits,
        setup.headless,
    ) == (*("conversation-1", 3, "/srv/project"), *(limits, False))
    assert (usage.max_iterations, usage.max_budget_usd) == (7, 1.5)


def test_first_message_is_recalled_before_work_starts() -> None:
    core = play(
        Core(),
        "trace 0: 1 Created(environment); 2 Message(user), say(and quickly) -> model 1, "
        "trace 3: 4 SystemMessage(agent); 5 Recall(user) workspace_context; 6 SC running; "
        "7 RecallObs(environment, cause 5)",
    )
    recall = core.event(7, RecallObservation)
    assert (recall.date, recall.working_dir) == ("2026-03-01", "/srv/project")


def test_a_recall_stands_in_the_log_with_its_answer() -> None:
    """B15: in the original another component answers, and when it fails the agent waits for ever."""
    core = play(started(), "say")
    recalls = [(commit, event) for commit in core.commits for event in commit.events if isinstance(event, RecallAction)]
    assert len(recalls) == 2
    for commit, recall in recalls:
        assert [event.cause for event in commit.events if event.cause] == [recall.id]


def test_running_without_a_task_waits_for_one() -> None:
    core = play(Core(task=None), "running -> rest, states running, say(task) -> model 1")
    assert core.trace(after=4)[1] == "6 Recall(user) workspace_context"


@pytest.mark.parametrize(
    ("events", "effect", "state"),
    [
        ([ModelReply(seen_id=6), AgentRejectAction(outputs={"reason": "no"})], Rest(), "rejected"),
        ([ModelReply(seen_id=6), MessageAction(content="hm", source=EventSource.AGENT)], CallModel(2, 1), "running"),
        ([AgentFinishAction(source=EventSource.USER)], Rest(), "finished"),
        ([CmdRunAction(command="ls", source=EventSource.USER)], AwaitTools((7,)), "running"),
        ([NullAction()], CallModel(1, 1), "running"),
    ],
    ids=["rejection", "message that does not wait", "finish by a person", "persons command", "not runnable"],
)
def test_events_beside_usual_replies(events: list[Event], effect: Effect, state: str) -> None:
    core = started()
    assert core.append(*events) == effect
    assert core.states()[-1] == state


# Tools


def test_two_calls_at_once_with_a_concurrency_of_two() -> None:
    play(
        started(agent=AgentSpec(tool_concurrency=2)),
        "bash+bash+bash -> tools 8 9, dispatched 8 9, ran 9 -> tools 8 10, ran 8 -> tools 10, ran 10 -> model 2",
    )


def test_second_or_foreign_observations_settle_nothing() -> None:
    core = play(started(), "bash")
    core.put(CmdOutputObservation(content="x", command="ls", cause=99))
    assert core.run() == AwaitTools((8,))
    core.observe(8)
    before = core.state
    core.put(answer(core.event(8)))
    assert core.state == State(**vars(before) | {"version": 11, "loops": core.state.loops})


def test_a_stop_settles_every_pending_action_and_cancels_it() -> None:
    core = play(
        started(),
        "bash+bash, stopped -> rest, pending , "
        "trace 9: 10 ChangeState(user) stopped; 11 ErrorObs(agent, cause 8); 12 ErrorObs(agent, cause 9); 13 SC stopped",
    )
    first, second = core.event(11), core.event(12)
    assert isinstance(first, ErrorObservation)
    assert (first.content, first.error_id) == (STOPPED_TEXT, "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED")
    assert first.tool_call_metadata == core.event(8).tool_call_metadata
    assert second.tool_call_metadata == core.event(9).tool_call_metadata
    assert (core.commits[-1].answers, core.commits[-1].cancels) == ({0: 8, 1: 9}, [8, 9, 0])


# Unforeseen errors


def test_ending_in_error_settles_what_is_pending() -> None:
    wanted = end_in_error(play(started(), "bash").state, "RuntimeError: oops")
    assert isinstance(wanted, Append)
    assert (wanted.answers, wanted.cancels) == (((0, 8),), (8,))
    error, change = wanted.events
    assert isinstance(error, ErrorObservation)
    assert error.content == "The action has not been executed due to a runtime error."
    assert (error.error_id, error.cause) == ("AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_ERROR", 8)
    assert isinstance(change, AgentStateChangedObservation)
    assert (change.agent_state, change.reason) == (AgentState.ERROR, "RuntimeError: oops")


def test_an_error_ends_what_was_asked_for_before_it() -> None:
    core = play(started(), "paused -> rest")
    core.ask("running")
    core.put(AgentStateChangedObservation(agent_state=AgentState.ERROR, reason="It crashed its worker 3 times."))
    assert core.run() == Rest()
    assert core.state.lifecycle.agent_state is AgentState.ERROR
    play(core, "running -> model 1")


def test_message_left_unread_by_an_error_is_read_on_resume() -> None:
    core = Core()
    core.put(AgentStateChangedObservation(agent_state=AgentState.ERROR, reason="UsageError: no such agent"))
    play(
        core,
        "running -> model 1, trace 4: 5 SystemMessage(agent); 6 Recall(user) workspace_context; 7 SC running; "
        "8 RecallObs(environment, cause 6)",
    )
