"""A critic's prompt, the parsing of its answers, and the effect of its verdicts."""

import json
from typing import Any

import pytest

from broker.contract.actions import AgentFinishAction, MessageAction
from broker.contract.events import AgentSpec, EventSource, Limits, ModelReply, ModelToolCall, TokenUsage
from broker.contract.observations import FinishRefusedObservation, FinishVerdictObservation
from broker.contract.specs import CriticSpec, GoalSpec
from controller_worker.core.effects import CallModel, Effect
from controller_worker.loop.replay import replay
from controller_worker.memory.view import ViewFold
from controller_worker.model import critic
from controller_worker.providers.messages.messages import Message, TextPart
from tests.controller_parts import Core, answer, bash, check_replay, finish, messages_of, started
from tests.scenarios import play, scenarios


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


def play_judged(core: Core, scenario: str) -> Core:
    """Play a scenario in which `accepted` and `refused` are the critic's answers, `broken` a failed check."""
    steps = {
        "accepted": lambda core: judged(core, accepted=True),
        "refused": lambda core: judged(core, accepted=False),
        "broken": break_check,
    }
    return play(core, scenario, **steps)


def break_check(core: Core) -> None:
    output = answer(core.event(core.state.tools.pending[0].id))
    metadata = output.metadata.model_copy(update={"exit_code": 1})
    core.observe(core.state.tools.pending[0].id, output.model_copy(update={"metadata": metadata}))


def test_finish_waits_for_the_verdict_and_accepted_one_counts() -> None:
    core = play(core_with(), "finish -> model 2, states running")
    finished_at = core.state.version
    play_judged(core, "accepted -> rest, states running finished")
    verdict = core.event(-2, FinishVerdictObservation)
    assert (verdict.is_accepted, verdict.finish_id) == (True, finished_at)
    usage = core.state.usage  # the critic costs, and takes no iteration
    assert (usage.iteration, usage.cost_usd, usage.prompt_tokens, usage.completion_tokens) == (1, 0.75, 107, 13)


@scenarios(
    {
        "one refusal too many is an error": (
            {"max_refusals": 1},
            "finish, refused, finish, refused -> rest, states running error, code goal_not_reached",
        ),
        "critic follows the check and each finish restarts both": (
            {"check": "make test"},
            "finish -> tools 9, ran -> model 2, refused, finish, ran -> model 3, accepted, states running finished",
        ),
        "a failed check needs no critic": ({"check": "make test"}, "finish, broken -> model 2, finish -> tools 14"),
        "failed critic call is retried or ends in an error": (
            {},
            "finish, fail service_unavailable in 8, wait 9 -> model 2 try 2, fail authentication, states running error",
        ),
        "after such an error the next finish is judged again": (
            {"check": "make test"},
            "finish, ran, fail authentication, running, finish -> tools 17",
        ),
        "a quota shows as a rate limit": (
            {},
            (
                "finish, fail rate_limit in 8, states running rate_limited, wait 9 -> model 2 try 2, accepted, "
                "states running rate_limited running finished"
            ),
        ),
        "the last iteration may be judged": ({"limits": Limits(max_iterations=1)}, "finish -> model 2"),
        "nothing is judged beyond the budget": ({"limits": Limits(max_budget_usd=0.25)}, "finish, code max_budget"),
        "a message meanwhile takes the finish back": ({}, "finish, say, accepted -> model 2, states running"),
        "no critic is asked during a pause": ({}, "finish, paused -> rest, running -> model 2"),
    }
)
def test_judged_finish(scenario: tuple[dict[str, Any], str]) -> None:
    options, script = scenario
    core = play_judged(core_with(**options), script)
    assert not core.state.acceptance.is_accepted or core.states()[-1] == "finished"


def test_a_refused_one_is_told_with_the_reason() -> None:
    core = core_with()
    core.reply(finish())
    assert judged(core, accepted=False) == CallModel(2, 1)
    refused = core.event(-1, FinishRefusedObservation)
    assert refused.content.startswith("Your finish was not accepted (1 of 2 times): the reviewer of your work")
    told = [text_of(message).strip() for message in messages_of(core.events)[-2:]]
    assert told == ["Your finish was judged:\nNo test was run.", refused.content]


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


def test_offline_replay_decides_alike() -> None:
    core = play_judged(core_with(), "bash, ran, finish, refused, finish, accepted")
    check_replay(core)
    accepted = {"is_accepted": True}
    forged = [e.model_copy(update=accepted) if isinstance(e, FinishVerdictObservation) else e for e in core.events]
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
def test_parsing_of_a_critic_s_answer(content: str, arguments: Any, expected: tuple[bool, str]) -> None:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    calls = () if arguments is None else (ModelToolCall(id="v", name="verdict", arguments=written),)
    verdict = critic.parse_verdict(ModelReply(content=content, tool_calls=calls), finish_id=4)
    assert (verdict.is_accepted, verdict.content, verdict.finish_id) == (*expected, 4)


def test_a_goal_needs_somebody_who_judges() -> None:
    with pytest.raises(ValueError, match="a check or a critic"):
        GoalSpec()
