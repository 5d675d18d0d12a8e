"""Progress: signs that the agent makes none, for the policy of loops (`concerns.loops`).

Every `no_diff_steps` steps, or whenever a further `no_diff_cost_usd` was spent, a tool worker computes a digest of the
workspace's files. Two equal digests mean that nothing changed between them.

Holds: pure. Without a threshold in the policy, it is off and adds no event. An edit that is undone is no change. A
failed digest counts as a change.
Does not: count the checks of goals and features, which have limits of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    CmdOutputObservation,
    DigestWorkspaceAction,
    Event,
    LoopDetectionObservation,
    LoopPolicy,
    MessageAction,
    Observation,
    WorkspaceDigestObservation,
)
from broker.runtime import format_count
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.effects import Append, Effect
from controller_worker.core.pending import find_settled, is_user_message
from controller_worker.core.stuck_detector import DetectedLoop, trace_failure

if TYPE_CHECKING:
    from controller_worker.core.state import State

MAX_FAILURES = 16
"""The failing commands that are remembered."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the work: an event, and the steps and the cost up to it."""

    event_id: int = 0
    iteration: int = 0
    cost_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class RepeatedFailure:
    """A command that failed `times` times in a row with the same output; digests of both."""

    command: str
    output: str
    times: int
    start_id: int


@dataclass(frozen=True)
class Progress:
    """The known progress of the agent.

    Attributes:
        action_id: the digest action in flight; 0 for none.
        digest: the latest digest of the workspace; empty for none.
        looked: the latest look.
        changed: the look that saw the latest diff, or a later message or response.
        failures: the latest failing commands, oldest first.
    """

    action_id: int = 0
    digest: str = ""
    looked: Mark | None = None
    changed: Mark = Mark()
    failures: tuple[RepeatedFailure, ...] = ()


def _find_policy(state: State) -> LoopPolicy | None:
    agent = state.setup.agent
    return agent.loop_policy if agent.enable_stuck_detection else None


def _mark(state: State, event: Event | None = None) -> Mark:
    """Return the mark of an event; None stands for now."""
    return Mark(0 if event is None else event.id, state.usage.iteration, state.usage.cost_usd)


def _after_look(progress: Progress, action: DigestWorkspaceAction, state: State) -> Progress:
    return evolve(progress, action_id=action.id)


def _after_observation(progress: Progress, observation: Observation, state: State) -> Progress:
    if not 0 != progress.action_id == observation.cause:
        return progress
    digest = observation.digest if isinstance(observation, WorkspaceDigestObservation) else ""
    is_same = digest == progress.digest != ""
    mark = _mark(state, observation)
    return evolve(progress, action_id=0, digest=digest, looked=mark, changed=progress.changed if is_same else mark)


def _after_output(progress: Progress, output: CmdOutputObservation, state: State) -> Progress:
    """Count a failing command of the agent; forget one that succeeds or has a new output."""
    policy = _find_policy(state)
    settled = find_settled(state, output)
    if policy is None or policy.same_failure is None or settled is None or settled.trace is None:
        return progress
    if not output.command.strip() or output.exit_code < 0:
        return progress
    command, result = trace_failure(output)
    before = next((one for one in progress.failures if one.command == command), None)
    others = tuple(one for one in progress.failures if one is not before)
    if output.exit_code == 0:
        return progress if before is None else evolve(progress, failures=others)
    failure = RepeatedFailure(command, result, 1, settled.trace.turn_id)
    if before is not None and before.output == result:
        failure = RepeatedFailure(command, result, before.times + 1, before.start_id)
    return evolve(progress, failures=(*others, failure)[-MAX_FAILURES:])


def _after_detection(progress: Progress, event: LoopDetectionObservation, state: State) -> Progress:
    return evolve(progress, changed=_mark(state, event), failures=())


def _after_message(progress: Progress, message: MessageAction, state: State) -> Progress:
    """Reset the progress at a user's message."""
    if not is_user_message(message) or progress == Progress():
        return progress
    return evolve(progress, changed=_mark(state, message), failures=())


def look(state: State, now: datetime) -> Effect | None:
    """Request a digest before the first step, and whenever the policy's steps or cost have passed since the last."""
    policy = _find_policy(state)
    if policy is None or (policy.no_diff_steps is None and policy.no_diff_cost_usd is None):
        return None
    looked = state.progress.looked
    if looked is not None and not _find_reached(policy, looked, _mark(state)):
        return None
    return Append((DigestWorkspaceAction(),))


def _find_reached(policy: LoopPolicy, start: Mark, end: Mark) -> str:
    """Return the threshold that the work between two marks reaches, as a kind of loop; empty for none."""
    if policy.no_diff_steps is not None and end.iteration - start.iteration >= policy.no_diff_steps:
        return "no_diff"
    if policy.no_diff_cost_usd is not None and end.cost_usd - start.cost_usd >= policy.no_diff_cost_usd:
        return "no_diff_cost"
    return ""


def find_no_progress(state: State) -> DetectedLoop | None:
    """Return the sign that the agent makes no progress, or None."""
    policy = _find_policy(state)
    progress = state.progress
    if policy is None:
        return None
    for failure in progress.failures:
        if policy.same_failure is not None and failure.times >= policy.same_failure:
            reason = f"the same command has failed {failure.times} times with the same output"
            return DetectedLoop("same_failure", failure.times, failure.start_id, reason)
    if progress.looked is None or not progress.digest:
        return None
    reached = _find_reached(policy, progress.changed, progress.looked)
    if not reached:
        return None
    steps = progress.looked.iteration - progress.changed.iteration
    cost = progress.looked.cost_usd - progress.changed.cost_usd
    amount = f"in {format_count(steps, 'step')}" if reached == "no_diff" else f"while {cost:.2f} USD were spent"
    return DetectedLoop(reached, steps, progress.changed.event_id + 1, f"the workspace has not changed {amount}")


PROGRESS = Concern(
    "progress",
    {
        DigestWorkspaceAction: _after_look,
        CmdOutputObservation: _after_output,
        LoopDetectionObservation: _after_detection,
        Observation: _after_observation,
        MessageAction: _after_message,
    },
)
