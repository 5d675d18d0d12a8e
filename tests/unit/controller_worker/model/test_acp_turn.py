"""The step after an ACP agent's report is a function of the log, even after deaths in between."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from broker.contract.actions import AgentFinishAction, AgentRejectAction, MessageAction
from broker.contract.double_texting import RolledBackObservation
from broker.contract.events import Event, EventSource, ModelCallFailed, ModelReply, TokenUsage, with_id
from broker.contract.observations import ErrorObservation, OutcomeUnknownObservation, UserRejectObservation
from broker.contract.session_events import (
    AcpCall,
    AcpObservation,
    AcpOption,
    AcpPermission,
    AcpPermissionAction,
    AcpTurnAction,
)
from broker.contract.specs import AcpSpec, AgentSpec
from broker.contract.task_list import TaskItem, TaskTrackingAction
from controller_worker.agents.acp import AcpAgent
from controller_worker.model.acp_turn import CONTINUE, INTERRUPTED, NEW_SESSION, decide_reply
from controller_worker.model.model_call import to_model_reply
from controller_worker.providers.errors import ModelError
from controller_worker.providers.llm import Completion

SPEC = AcpSpec(command="agent acp", timeout_seconds=60)
TASK = MessageAction(content="Do it.", source=EventSource.USER)
PROMPT = AcpTurnAction(command="agent acp", prompt="Do it.")
CALL = AcpCall(title="Remove", tool_kind="execute", status="completed", arguments={"command": "rm x"}, text="gone")
OPTIONS = (AcpOption(id="ever", option_kind="allow_always"), AcpOption(id="y", option_kind="allow_once"))
ASKED = AcpPermission(number=7, call=CALL, options=(*OPTIONS, AcpOption(id="n", option_kind="reject_once")))


def report(state: Any = "working", **fields: Any) -> AcpObservation:
    return AcpObservation(state=state, **{"session_id": "s", **fields})


def numbered(events: Sequence[Event]) -> list[Event]:
    """Give events their ids, and let each observation answer the action before it."""
    found, action = list[Event](), 0
    for number, event in enumerate(events, 1):
        if event.runnable:
            action = number
        answered = event.model_copy(update={"cause": action}) if "cause" not in event.model_fields_set else event
        found.append(with_id(answered, number))
    return found


def completion(*events: Event, later: Sequence[Event] = ()) -> Completion:
    found = decide_reply(SPEC, numbered(events), later)
    assert isinstance(found, Completion), found
    return found


def led_to(*events: Event, later: Sequence[Event] = ()) -> list[Event]:
    reply = to_model_reply(completion(*events, later=later), iteration=1, seen_id=len(events), event_id=len(events) + 1)
    return AcpAgent(AgentSpec(name="acp:agent acp")).events_of(reply)


def turn(*events: Event, later: Sequence[Event] = ()) -> AcpTurnAction:
    action = led_to(*events, later=later)[-1]
    assert isinstance(action, AcpTurnAction)
    return action


def test_the_first_prompt_is_the_task_and_begins_a_session() -> None:
    action = turn(TASK)
    assert (action.command, action.prompt, action.session_id, action.timeout) == ("agent acp", "Do it.", "", 60)
    assert action.tool_call_metadata is not None


def test_report_becomes_a_message_a_plan_and_next_turn() -> None:
    plan = (TaskItem(id="1", title="look"),)
    tracked, answer, message, following = led_to(TASK, PROMPT, report(content="Hm.", call=CALL, plan=plan))
    assert isinstance(tracked, TaskTrackingAction)
    assert tracked.task_list == plan
    assert (answer.kind, answer.cause, following.kind) == ("observation.task_tracking", 4 + 1, "action.acp_turn")
    assert isinstance(message, MessageAction)
    assert not message.wait_for_response


def test_a_question_becomes_an_action_that_policies_see() -> None:
    action = led_to(TASK, PROMPT, report("permission", permission=ASKED))[-1]
    assert isinstance(action, AcpPermissionAction)
    assert (action.permission, action.option_id, action.refusal_id, action.call) == (7, "y", "n", CALL)


def test_refused_question_is_answered_and_message_waits_for_turn_end() -> None:
    permission = AcpPermissionAction(command="c", permission=7, refusal_id="n")
    later = MessageAction(content="Not so.", source=EventSource.USER)
    asked = [
        TASK,
        PROMPT,
        report("permission", permission=ASKED),
        permission,
        UserRejectObservation(content="No."),
        later,
    ]
    action = turn(*asked)
    assert (action.permission, action.option_id, action.prompt) == (7, "n", "")
    answer = AcpTurnAction(command="c", permission=7, option_id="n")
    after = turn(*asked, answer, report("ended", stop_reason="end_turn"))
    assert "No." in after.prompt
    assert after.prompt.endswith("Not so.")


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        *(("end_turn", AgentFinishAction), ("?", AgentFinishAction)),
        *(("refusal", AgentRejectAction), ("max_tokens", MessageAction)),
    ],
)
def test_an_ended_turn(reason: str, kind: type[Event]) -> None:
    assert isinstance(led_to(TASK, PROMPT, report("ended", stop_reason=reason))[-1], kind)


def test_a_message_that_came_meanwhile_is_the_next_prompt() -> None:
    message = MessageAction(content="And that.", source=EventSource.USER)
    action = turn(TASK, PROMPT, message, report("ended", stop_reason="end_turn").model_copy(update={"cause": 2}))
    assert (action.prompt, action.session_id) == ("And that.", "s")


def test_messages_are_not_repeated() -> None:
    events = (TASK, PROMPT, report("ended", content="Done.", cost_usd=0.5))
    found = completion(*events, later=(ModelReply(),))
    assert (found.text, found.cost_usd) == ("", 0.0)
    assert turn(*events, later=(ModelReply(),)).prompt == CONTINUE


@pytest.mark.parametrize(
    "outcome", [OutcomeUnknownObservation(), ErrorObservation(content="host lost"), report("failed"), report("lost")]
)
def test_an_interrupted_agent_continues_its_session_and_reads_why(outcome: Event) -> None:
    action = turn(TASK, PROMPT, report(), AcpTurnAction(command="c", session_id="s"), outcome)
    assert action.prompt.startswith(INTERRUPTED)
    assert action.session_id == "s"


def test_a_session_that_cannot_be_loaded_gets_the_history() -> None:
    action = turn(TASK, PROMPT, report(call=CALL), PROMPT, report("lost", session_id=""))
    assert action.session_id == ""
    assert action.prompt.startswith(NEW_SESSION)
    assert "Do it." in action.prompt
    assert "rm x" in action.prompt


def test_the_history_is_bounded_and_keeps_the_task() -> None:
    steps = [each for _ in range(500) for each in (PROMPT, report(call=CALL.model_copy(update={"text": "x" * 9999})))]
    action = turn(TASK, *steps, PROMPT, report("lost", session_id=""))
    assert "Do it." in action.prompt
    assert len(action.prompt) < 40_000


def test_session_forgets_a_rollback() -> None:
    back = RolledBackObservation(start_id=1)
    action = turn(TASK, PROMPT, report("ended"), back, MessageAction(content="New.", source=EventSource.USER))
    assert action.session_id == ""
    assert "New." in action.prompt


def test_repeatedly_failing_agent_stops_until_a_person_continues() -> None:
    failed = report("failed", code="timeout", reason="silent")
    events = (TASK, PROMPT, failed, PROMPT, report("lost", session_id=""), PROMPT, failed, PROMPT, failed)
    assert turn(*events[:-2]).prompt.startswith(INTERRUPTED)
    error = decide_reply(SPEC, numbered(events), ())
    assert isinstance(error, ModelError)
    assert (error.code, error.retryable) == ("timeout", False)
    assert turn(*events, later=(ModelCallFailed(code="timeout"),)).prompt.startswith(INTERRUPTED)


def test_agent_without_a_login_ends_the_work_at_once() -> None:
    error = decide_reply(SPEC, numbered((TASK, PROMPT, report("failed", code="authentication", session_id=""))), ())
    assert isinstance(error, ModelError)
    assert error.code == "authentication"


def test_costs_are_counted_once_for_each_session() -> None:
    spent, prompt = [0.5, 0.7, 0.1, 0.3], AcpTurnAction(command="c", session_id="s")
    events: list[Event] = [TASK, PROMPT]
    costs = []
    for usd in spent:
        events += [report(cost_usd=usd, usage=TokenUsage(prompt_tokens=3)), prompt]
        costs.append(completion(*events[:-1]).cost_usd)
    assert costs == pytest.approx([0.5, 0.2, 0.1, 0.2])
    assert completion(*events[:-1]).usage.prompt_tokens == 3
    assert completion(TASK, PROMPT, report("ended")).cost_usd is None
    taken_over = report("ended", cost_usd=-5.0, usage=TokenUsage(prompt_tokens=-9))
    assert completion(TASK, PROMPT, taken_over).cost_usd is None
    assert completion(TASK, PROMPT, taken_over).usage.prompt_tokens == 0


def test_a_command_is_named_with_the_agent() -> None:
    spec = AgentSpec(name="acp: agent --acp ")
    assert (spec.name, spec.acp) == ("AcpAgent", AcpSpec(command="agent --acp"))
    assert AgentSpec.model_validate(json.loads(spec.model_dump_json())) == spec
    for wrong in ("acp:", "acp: ", "acp:a\nb", "AcpAgent"):
        with pytest.raises(ValueError, match="command"):
            AgentSpec(name=wrong)
