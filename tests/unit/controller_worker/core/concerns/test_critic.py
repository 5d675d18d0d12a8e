"""What a critic is asked, what its answers mean, and what a verdict leads to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.contract.actions import AgentFinishAction, CmdRunAction, MessageAction
from broker.contract.events import AgentSpec, EventSource, Limits, ModelReply, ModelToolCall, TokenUsage
from broker.contract.observations import (
    AgentStateChangedObservation,
    FinishRefusedObservation,
    FinishVerdictObservation,
)
from broker.contract.specs import CriticSpec, GoalSpec
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Rest
from controller_worker.loop.replay import replay
from controller_worker.memory.view import ViewFold
from controller_worker.model import critic
from controller_worker.providers.messages.messages import Message, TextPart
from tests.controller_parts import Core, answer, bash, check_snapshots, finish, messages_of, started


def core_with(*, max_refusals: int = 2, check: str | None = None, limits: Limits | None = None) -> Core:
    goal = GoalSpec(critic=CriticSpec(instructions="Be strict."), check=check, max_refusals=max_refusals)
    return started(agent=AgentSpec(goal=goal), limits=limits or Limits())


def judged(core: Core, accepted: bool, reason: str = "No test was run.", cost_usd: float = 0.5) -> Effect:
    """Let the critic answer."""
    reply = ModelReply(
        id=core.state.version + 1,
        service="critic",
        content=f"{'ACCEPTED' if accepted else 'REFUSED'} {reason}",
        iteration=core.state.usage.iteration,
        cost_usd=cost_usd,
        usage=TokenUsage(prompt_tokens=7, completion_tokens=3),
    )
    return core.append(reply, critic.parse_verdict(reply, finish_id=core.state.lifecycle.result_id))


def text_of(message: Message) -> str:
    return "".join(part.text for part in message.content if isinstance(part, TextPart))


def asked_after(core: Core, *, overflows: int = 0) -> tuple[str, str]:
    view = ViewFold()
    for event in core.events:
        view.add(event)
    spec = CriticSpec(instructions="Be strict.")
    system, user = critic.render_prompt(spec, view.view().events, overflows=overflows)
    return text_of(system), text_of(user)


def test_finish_waits_for_the_verdict_and_accepted_one_counts() -> None:
    core = core_with()
    assert core.reply(finish()) == CallModel(2, 1)
    assert core.states() == ["running"]
    finished_at = core.state.version
    assert judged(core, accepted=True) == Rest()
    verdict = core.events[-2]
    assert isinstance(verdict, FinishVerdictObservation)
    assert (verdict.is_accepted, verdict.finish_id) == (True, finished_at)
    assert core.states() == ["running", "finished"]


def test_the_critic_costs_and_takes_no_iteration() -> None:
    core = core_with()
    core.reply(finish())
    judged(core, accepted=True)
    assert (core.state.usage.iteration, core.state.usage.cost_usd) == (1, 0.75)
    assert (core.state.usage.prompt_tokens, core.state.usage.completion_tokens) == (107, 13)


def test_a_refused_one_is_told_with_the_reason() -> None:
    core = core_with()
    core.reply(finish())
    assert judged(core, accepted=False) == CallModel(2, 1)
    refused = core.events[-1]
    assert isinstance(refused, FinishRefusedObservation)
    assert refused.content.startswith("Your finish was not accepted (1 of 2 times): the reviewer of your work")
    told = [text_of(message).strip() for message in messages_of(core.events)[-2:]]
    assert told == ["Your finish was judged:\nNo test was run.", refused.content]


def test_one_refusal_too_many_is_an_error() -> None:
    core = core_with(max_refusals=1)
    for _ in range(2):
        core.reply(finish())
        judged(core, accepted=False)
    last = core.events[-1]
    assert isinstance(last, AgentStateChangedObservation)
    assert (last.agent_state.value, last.code) == ("error", "goal_not_reached")


def test_critic_follows_the_check_and_each_finish_restarts_both() -> None:
    core = core_with(check="make test")
    for accepted in (False, True):
        wanted = core.reply(finish())
        assert isinstance(wanted, AwaitTools)
        action = core.event(wanted.action_ids[0])
        assert isinstance(action, CmdRunAction)
        assert core.observe(action.id, answer(action)) == CallModel(core.state.usage.iteration + 1, 1)
        assert isinstance(core.events[-1], type(answer(action)))
        judged(core, accepted=accepted)
    assert core.states() == ["running", "finished"]


def test_a_failed_check_needs_no_critic() -> None:
    core = core_with(check="make test")
    wanted = core.reply(finish())
    assert isinstance(wanted, AwaitTools)
    action = core.event(wanted.action_ids[0])
    failed = answer(action).model_copy(update={"metadata": answer(action).metadata.model_copy(update={"exit_code": 1})})
    core.observe(action.id, failed)
    assert isinstance(core.events[-1], FinishRefusedObservation)


def test_failed_critic_call_is_retried_or_ends_in_error() -> None:
    core = core_with()
    core.reply(finish())
    core.fail("service_unavailable", retry_in=8)
    core.pass_time(9)
    assert core.run() == CallModel(2, 2)
    core.fail("authentication", retry_in=None)
    assert core.states()[-1] == "error"


def test_after_such_an_error_the_next_finish_is_judged_anew() -> None:
    core = core_with(check="make test")
    wanted = core.reply(finish())
    assert isinstance(wanted, AwaitTools)
    core.observe(wanted.action_ids[0])
    core.fail("authentication", retry_in=None)
    core.ask("running")
    core.run()
    assert isinstance(core.reply(finish()), AwaitTools)


def test_a_quota_shows_as_a_rate_limit() -> None:
    core = core_with()
    core.reply(finish())
    core.fail("rate_limit", retry_in=8)
    assert core.states()[-1] == "rate_limited"
    core.pass_time(9)
    assert core.run() == CallModel(2, 2)
    judged(core, accepted=True)
    assert core.states() == ["running", "rate_limited", "running", "finished"]


def test_a_question_that_does_not_fit_is_asked_shorter() -> None:
    core = core_with()
    core.reply(finish())
    assert core.fail("context_window", retry_in=None) == CallModel(2, 1)
    assert (core.state.calls.overflows, core.state.calls.wants_condensation) == (1, False)
    judged(core, accepted=True)
    assert core.state.calls.overflows == 0
    for _ in range(40):
        core.say("x" * 900)
        core.run()
    assert len(asked_after(core, overflows=5)[1]) < 8_000 < len(asked_after(core)[1])


def test_last_iteration_may_be_judged_within_the_budget() -> None:
    core = core_with(limits=Limits(max_iterations=1))
    assert core.reply(finish()) == CallModel(2, 1)
    broke = core_with(limits=Limits(max_budget_usd=0.25))
    broke.reply(finish())
    assert broke.state.lifecycle.error_code == "max_budget"


def test_a_message_meanwhile_takes_the_finish_back() -> None:
    core = core_with()
    core.reply(finish())
    core.say("one more thing")
    core.run()
    assert judged(core, accepted=True) == CallModel(2, 1)
    assert core.states() == ["running"]
    assert core.state.acceptance.is_accepted is False


def test_nobody_is_asked_during_a_pause() -> None:
    core = core_with()
    core.reply(finish())
    core.ask("paused")
    assert core.run() == Rest()
    core.ask("running")
    assert core.run() == CallModel(2, 1)


def test_offline_replay_and_every_snapshot_decide_alike() -> None:
    core = core_with()
    core.reply(bash())
    core.observe(core.state.version)
    core.reply(finish())
    judged(core, accepted=False)
    core.reply(finish(call_id="f2"))
    judged(core, accepted=True)
    found = replay(core.events)
    assert found.divergence is None, found.divergence.to_diff()
    check_snapshots(core)
    forged = [
        e.model_copy(update={"is_accepted": True}) if e.kind == "observation.finish_verdict" else e for e in core.events
    ]
    assert replay(forged).divergence is not None


def test_question_holds_task_record_report_and_instructions() -> None:
    core = core_with()
    core.reply(bash("pytest"))
    core.observe(core.state.version)
    core.reply(finish("all pass"))
    system, user = asked_after(core)
    assert system.endswith("\n\nBe strict.")
    assert user.startswith("<TASK>\ntask\n</TASK>\n\n<RECORD>\n")
    assert "command: pytest" in user
    assert user.endswith("<REPORT>\nall pass\n</REPORT>")


def test_of_a_long_record_the_latest_events_are_shown() -> None:
    events = [
        *(MessageAction(content="first", source=EventSource.USER) for _ in range(2)),
        *(MessageAction(content=f"{n} " + "x" * 3_900, source=EventSource.AGENT) for n in range(100)),
        AgentFinishAction(final_thought="done", outputs={"n": 1}),
    ]
    _, user = critic.render_prompt(CriticSpec(), events)
    text = text_of(user)
    assert len(text) < critic.MAX_PROMPT_CHARS + 1_000
    assert "\n99 xx" in text
    assert "\n10 xx" not in text
    assert text.endswith('<REPORT>\ndone\n{"n": 1}\n</REPORT>')


@pytest.mark.parametrize(
    ("content", "arguments", "expected"),
    [
        ("", {"accepted": True, "reason": "fine"}, (True, "fine")),
        ("ACCEPTED", {"accepted": False, "reason": ""}, (False, critic.NO_REASON)),
        ("REFUSED: tests fail", {"accepted": "yes"}, (False, "tests fail")),
        ("**ACCEPTED.**\nAll is well.", None, (True, "All is well.")),
        ("accepted", None, (True, "")),
        ("I would not say ACCEPTED.", None, (False, "I would not say ACCEPTED.")),
        ("", None, (False, critic.NO_REASON)),
        ("", "not json", (False, critic.NO_REASON)),
    ],
)
def test_what_an_answer_means(content: str, arguments: Any, expected: tuple[bool, str]) -> None:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    calls = () if arguments is None else (ModelToolCall(id="v", name="verdict", arguments=written),)
    verdict = critic.parse_verdict(ModelReply(content=content, tool_calls=calls), finish_id=4)
    assert (verdict.is_accepted, verdict.content, verdict.finish_id) == (*expected, 4)


def test_a_goal_needs_somebody_who_judges() -> None:
    with pytest.raises(ValueError, match="a check or a critic"):
        GoalSpec()
