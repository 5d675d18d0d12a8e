"""No progress: no diff for so many steps or so much money, and the same failure again and again."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.codec import shorten
from broker.contract.events import AgentSpec, Event
from broker.contract.observations import (
    CmdOutputMetadata,
    CmdOutputObservation,
    ErrorObservation,
    LoopDetectionObservation,
)
from broker.contract.policies import LoopPolicy
from broker.contract.specs import GoalSpec
from broker.contract.workspace_events import DigestWorkspaceAction, WorkspaceDigestObservation
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Rest
from controller_worker.loop.replay import replay
from tests.controller_parts import Core, bash, check_snapshots, finish, think

STUCK = "AgentStuckInLoopError: No progress: "


class Working(Core):
    """A conversation with a workspace whose content is `content`."""

    def __init__(self, *, goal: GoalSpec | None = None, **policy: Any) -> None:
        self.content = "as it was"
        super().__init__(agent=AgentSpec(loop_policy=LoopPolicy(**policy), goal=goal))
        self.look()

    def look(self) -> Effect:
        effect = self.run()
        while isinstance(effect, AwaitTools) and isinstance(self.event(effect.action_ids[0]), DigestWorkspaceAction):
            answer = WorkspaceDigestObservation(digest=self.content, cause=effect.action_ids[0])
            effect = self.observe(effect.action_ids[0], answer)
        return effect

    def runs(self, command: str, output: str = "", exit_code: int = 0, **reply: Any) -> Effect:
        self.reply(bash(command), **reply)
        action = self.event(self.state.version)
        self.observe(action.id, failed(action, output, exit_code, command))
        return self.look()

    def steps(self, count: int, **reply: Any) -> Effect:
        effect: Effect = Rest()
        for n in range(count):
            effect = self.runs(f"cat file-{self.state.usage.iteration}-{n}", **reply)
        return effect

    def looks(self) -> int:
        return sum(isinstance(event, DigestWorkspaceAction) for event in self.events)

    def detections(self) -> list[LoopDetectionObservation]:
        return [event for event in self.events if isinstance(event, LoopDetectionObservation)]


def failed(action: Event, output: str, exit_code: int, command: str) -> CmdOutputObservation:
    return CmdOutputObservation(
        content=output,
        command=command,
        metadata=CmdOutputMetadata(exit_code=exit_code),
        cause=action.id,
        tool_call_metadata=action.tool_call_metadata,
    )


def shortened(event: CmdOutputObservation) -> CmdOutputObservation:
    """Return the event as a log keeps it."""
    wire, contents = shorten(event.wire())
    assert contents
    return CmdOutputObservation.model_validate(wire)


def test_policy_is_off_by_default_and_leaves_no_event() -> None:
    core = Working()
    assert core.steps(30) == CallModel(31, 1)
    assert core.looks() == 0
    assert LoopPolicy().model_dump(exclude_none=True).keys() & {"no_diff_steps", "no_diff_cost_usd"} == set()


def test_no_diff_for_so_many_steps_is_an_error() -> None:
    core = Working(no_diff_steps=5)
    assert core.looks() == 1
    assert core.steps(4) == CallModel(5, 1)
    assert core.looks() == 1
    assert core.steps(1) == Rest()
    assert core.states() == ["running", "error"]
    assert core.state.lifecycle.last_error == STUCK + "the workspace has not changed in 5 steps"
    assert core.state.lifecycle.error_code == "stuck_in_loop"
    assert core.state.usage.iteration == 5
    check_snapshots(core)
    assert replay(core.events).divergence is None


def test_diff_starts_the_count_again() -> None:
    core = Working(no_diff_steps=5)
    core.steps(3)
    core.content = "changed"
    assert core.steps(2) == CallModel(6, 1)
    assert core.steps(4) == CallModel(10, 1)
    assert core.steps(1) == Rest()


def test_change_that_is_taken_back_is_no_diff() -> None:
    core = Working(no_diff_steps=4)
    core.content = "changed"
    core.steps(2)
    core.content = "as it was"
    assert core.steps(2) == Rest()


def test_cost_without_a_diff() -> None:
    core = Working(no_diff_cost_usd=1.0)
    assert core.steps(3, cost_usd=0.3) == CallModel(4, 1)
    assert core.steps(1, cost_usd=0.3) == Rest()
    assert core.state.lifecycle.last_error == STUCK + "the workspace has not changed while 1.20 USD were spent"


def test_nudge_names_the_reason_and_the_count_starts_again() -> None:
    core = Working(no_diff_steps=3, responses=("nudge", "park"))
    assert core.steps(3) == CallModel(4, 1)
    (nudge,) = core.detections()
    assert nudge.advice.startswith("You make no progress: the workspace has not changed in 3 steps.")
    assert nudge.sentence == "No progress: the workspace has not changed in 3 steps."
    assert "Loop type: no_diff\n" in nudge.content
    assert core.steps(2) == CallModel(6, 1)
    assert core.steps(1) == Rest()
    assert core.states() == ["running", "paused"]
    assert replay(core.events).divergence is None


def test_message_starts_the_count_again() -> None:
    core = Working(no_diff_steps=3)
    core.steps(2)
    core.say("look again")
    core.run()
    assert core.steps(3) == CallModel(6, 1)
    assert core.steps(1) == Rest()


@pytest.mark.parametrize("fails", ["error", "empty"])
def test_look_that_fails_counts_as_a_diff(fails: str) -> None:
    core = Working(no_diff_steps=2)
    core.reply(bash("ls"))
    core.observe(core.state.version)
    core.reply(bash("pwd"))
    core.observe(core.state.version)
    look = core.state.version
    assert isinstance(core.event(look), DigestWorkspaceAction)
    core.observe(look, ErrorObservation(cause=look) if fails == "error" else WorkspaceDigestObservation(cause=look))
    assert core.wants() == CallModel(3, 1)
    assert core.steps(2) == CallModel(5, 1)  # nothing to compare with
    assert core.steps(2) == Rest()


def test_same_failure_counts_across_edits() -> None:
    core = Working(same_failure=3)
    for n in range(2):
        core.runs(f"sed -i s/{n}/{n + 1}/ a.py")
        core.runs("pytest", f"1 failed in 0.{n}3s", 1)
    core.runs("sed -i s/a/b/ a.py")
    assert core.runs("pytest", "1 failed in 12.9 seconds", 1) == Rest()
    assert core.state.lifecycle.last_error == STUCK + "the same command has failed 3 times with the same output"


@pytest.mark.parametrize(
    ("output", "exit_code"), [("2 failed", 1), ("1 failed", 2), ("2 passed", 0)], ids=["output", "code", "success"]
)
def test_another_result_starts_the_failures_again(output: str, exit_code: int) -> None:
    core = Working(same_failure=3)
    for n in range(2):
        core.runs(f"touch {n}")
        core.runs("pytest", "1 failed", 1)
    core.runs("pytest", output, exit_code)
    for n in range(2):
        core.runs(f"touch {n}-again")
        core.runs("pytest", "1 failed", 1)
    assert core.states() == ["running"]


def test_long_output_in_a_blob_counts_the_same() -> None:
    core = Working(same_failure=2)
    text = "é" * 20_000 + "1 failed in 3 s"
    core.runs("pytest", text, 1)
    core.runs("touch a")
    core.reply(bash("pytest"))
    action = core.event(core.state.version)
    stored = failed(action, text.replace("in 3 s", "in 4 s"), 1, "pytest")
    core.observe(action.id, shortened(stored))
    assert core.states() == ["running", "error"]


def test_check_of_a_goal_has_its_own_limit() -> None:
    core = Working(same_failure=2, goal=GoalSpec(check="make test", max_refusals=3))
    for n in range(3):
        core.reply(finish())
        action = core.event(core.state.version)
        core.observe(action.id, failed(action, "1 failed", 1, "make test"))
        core.runs(f"touch {n}")
    assert core.states() == ["running"]


def test_detection_can_be_switched_off() -> None:
    agent = AgentSpec(enable_stuck_detection=False, loop_policy=LoopPolicy(no_diff_steps=1, same_failure=2))
    core = Core(agent=agent)
    core.run()
    for _ in range(5):
        core.reply(think())
    assert core.states() == ["running"]
