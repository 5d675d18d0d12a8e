"""Long work: the feature list of a conversation, its verification, and the start of each context.

A new context starts with the first step and after every condensation: one action saves the progress and reads the
notes, the latest commits and the init script's output; the model reads its observation. The agent changes and verifies
the list by actions that wait here, not on a tool worker, until their checks have run. A finish is verified in the same
way, before the goal's own check and critic.

Holds: pure. The list changes only by a `FeatureListObservation`, which only the controller writes. A feature passes
only if its check, run after the latest request or finish, exits with 0. Each check runs once, one after the other.
Does not: read the list from the workspace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING

from broker.contract import (
    FEATURES_FILE,
    LONG_WORK_AGENT,
    MAX_FEATURES,
    AgentFinishAction,
    AgentState,
    CondensationAction,
    ConfirmationStatus,
    Feature,
    FeatureCheckAction,
    FeatureCheckObservation,
    FeatureListAction,
    FeatureListObservation,
    GoalSpec,
    Observation,
    SaveProgressAction,
    SaveProgressObservation,
    render_features,
    write_features,
)
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.effects import Append, AwaitTools, Effect

if TYPE_CHECKING:
    from controller_worker.core.state import State

DEFAULT_GOAL = GoalSpec(check="true")
"""How often a finish may be refused, and how long a check may take, if the agent has no goal besides its features."""
MAX_SHOWN_OUTPUTS = 5
MAX_OUTPUT_CHARS = 1_500
CONTEXT = "A new context starts, number {number} of this work. The feature list, from the log:\n{features}"
EDITED = f"{FEATURES_FILE} had been edited. That has no effect: it was written again from the log."
EXISTS = (
    "There already is a feature `{id}`, and `add` cannot alter it. Its description, steps and check stay. Use `change` "
    "with a reason, and a person decides."
)
UNKNOWN = "There is no feature `{id}`. The list has: {known}."
NO_FEATURES = "the feature list is empty; add the features of this work with their checks"
FULL = "The list would have more than {limit} features. Nothing was added; put several into one."


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """A `FeatureListAction` that is not settled yet; the id is 0 for the verification of a finish."""

    id: int
    command: str
    features: tuple[Feature, ...] = ()
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a feature's check; the end of its output if it failed."""

    feature_id: str
    passes: bool
    output: str = ""


@dataclass(frozen=True)
class LongWork:
    """The feature list, and the work in progress.

    Attributes:
        contexts: number of contexts started.
        is_context_due: a new context has not read anything yet.
        requests: in the order of the log.
        action_id: the check or save in flight; 0 for none.
        checking: the feature whose check is in flight; empty for a save.
        results: those of the current request or finish.
        is_saved: the list of the current request or finish is in its file.
        was_edited: the file had been edited before that.
        written_sha256: of the text that was written last.
        is_verified: the list was verified for the latest finish.
    """

    features: tuple[Feature, ...] = ()
    contexts: int = 0
    is_context_due: bool = True
    requests: tuple[FeatureRequest, ...] = ()
    action_id: int = 0
    checking: str = ""
    results: tuple[CheckResult, ...] = ()
    is_saved: bool = False
    was_edited: bool = False
    written_sha256: str = ""
    is_verified: bool = False


def is_long_work(state: State) -> bool:
    """Return whether the conversation has a feature list."""
    return state.setup.agent.name == LONG_WORK_AGENT


def find_failing(features: Iterable[Feature]) -> list[Feature]:
    """Return the features that do not pass."""
    return [feature for feature in features if not feature.passes]


def render_failing(state: State) -> str:
    """Return the failing features for a refused finish; empty if all pass or there is no list."""
    if not is_long_work(state) or _pass(state.work.features):
        return ""
    failing = ", ".join(feature.id for feature in find_failing(state.work.features))
    return f"these features do not pass: {failing}" if failing else NO_FEATURES


def needs_verification(state: State) -> bool:
    """Return whether the features must be verified before the agent's finish counts."""
    is_finish = state.lifecycle.ending is AgentState.FINISHED and not state.acceptance.is_accepted
    return is_finish and is_long_work(state) and not state.work.is_verified


def is_refused(state: State, event: FeatureListObservation) -> bool:
    """Return whether a verification refuses the finish: a feature fails, or the list is empty."""
    return event.cause is None and needs_verification(state) and not _pass(event.features)


def _pass(features: tuple[Feature, ...]) -> bool:
    return bool(features) and not find_failing(features)


def _forget_progress(work: LongWork) -> LongWork:
    return evolve(work, results=(), is_saved=False, was_edited=False)


def _after_request(work: LongWork, action: FeatureListAction, state: State) -> LongWork:
    if action.confirmation_state is not ConfirmationStatus.CONFIRMED:
        return work
    request = FeatureRequest(action.id, action.command, action.features, action.ids)
    return evolve(work if work.requests else _forget_progress(work), requests=(*work.requests, request))


def _after_check(work: LongWork, action: FeatureCheckAction, state: State) -> LongWork:
    return evolve(work, action_id=action.id, checking=action.feature_id)


def _after_save(work: LongWork, action: SaveProgressAction, state: State) -> LongWork:
    digest = sha256(action.features.encode()).hexdigest() if action.features else work.written_sha256
    return evolve(work, action_id=action.id, checking="", written_sha256=digest)


def _after_observation(work: LongWork, observation: Observation, state: State) -> LongWork:
    """Record the result in flight. A request that is settled otherwise, as by a stop, is dropped."""
    if observation.cause is None:
        return work
    if observation.cause == work.action_id:
        work = evolve(work, action_id=0)
        if work.checking:
            passes = isinstance(observation, FeatureCheckObservation) and observation.exit_code == 0
            shown = sum(not result.passes for result in work.results) < MAX_SHOWN_OUTPUTS and not passes
            output = observation.content[-MAX_OUTPUT_CHARS:] if shown else ""
            return evolve(work, results=(*work.results, CheckResult(work.checking, passes, output)))
        was_edited = isinstance(observation, SaveProgressObservation) and observation.was_edited
        if work.is_context_due:
            return evolve(work, is_context_due=False, contexts=work.contexts + 1)
        return evolve(work, is_saved=True, was_edited=was_edited)
    if not work.requests:
        return work
    left = tuple(request for request in work.requests if request.id != observation.cause)
    return work if len(left) == len(work.requests) else evolve(_forget_progress(work), requests=left)


def _after_list(work: LongWork, event: FeatureListObservation, state: State) -> LongWork:
    left = tuple(request for request in work.requests if request.id != event.cause)
    is_verified = work.is_verified or (event.cause is None and needs_verification(state))
    return evolve(_forget_progress(work), features=event.features, requests=left, is_verified=is_verified)


def _after_finish(work: LongWork, finish: AgentFinishAction, state: State) -> LongWork:
    return evolve(work if work.requests else _forget_progress(work), is_verified=False)


def _after_condensation(work: LongWork, event: CondensationAction, state: State) -> LongWork:
    return evolve(work, is_context_due=True)


def start_context(state: State, now: datetime) -> Effect | None:
    """Save the progress, and read the text for a new context."""
    work = state.work
    if not (is_long_work(state) and work.is_context_due):
        return None
    # Before the first context there is no progress, and what a person has not committed is not ours to commit.
    message = f"Save the progress before context {work.contexts + 1}" if work.contexts else ""
    report = CONTEXT.format(number=work.contexts + 1, features=render_features(work.features))
    return _save(state, work.features, message=message, report=report)


def carry_out(state: State, ready: tuple[int, ...]) -> Effect | None:
    """Return the next effect for the first request; None if the agent's other actions come first.

    Args:
        ready: the pending actions that may run, in order.
    """
    work = state.work
    if work.action_id:
        return AwaitTools((work.action_id,))
    if not work.requests or work.requests[0].id not in ready:
        return None
    place = ready.index(work.requests[0].id)
    return AwaitTools(ready[:place][: state.setup.agent.tool_concurrency]) if place else _step(state, work.requests[0])


def verify_finish(state: State) -> Effect:
    """Return the next effect for the verification of a finish."""
    return _step(state, FeatureRequest(0, "verify"))


def _step(state: State, request: FeatureRequest) -> Effect:
    """Run the next check of a request; then save the list; then answer."""
    work = state.work
    features, due, problem = _apply(work.features, request)
    results = {result.feature_id: result for result in work.results}
    left = next((feature for feature in features if feature.id in due and feature.id not in results), None)
    if left is not None:
        timeout = (state.setup.agent.goal or DEFAULT_GOAL).timeout_seconds
        return Append((FeatureCheckAction(feature_id=left.id, command=left.check, timeout=timeout),))
    verified = tuple(
        feature.model_copy(
            update={
                "passes": results[feature.id].passes,
                "passed_when_added": feature.passed_when_added
                or (request.command == "add" and results[feature.id].passes),
            }
        )
        if feature.id in due
        else feature
        for feature in features
    )
    if (verified or work.written_sha256) and not work.is_saved:
        passing = f"{len(verified) - len(find_failing(verified))} of {len(verified)} features pass"
        return _save(state, verified, message=f"Save the progress: {passing}")
    texts = [problem, render_features(verified), EDITED if work.was_edited else ""]
    texts += [
        f"Output of the check of {result.feature_id}:\n{result.output}" for result in work.results if result.output
    ]
    answer = FeatureListObservation(content="\n\n".join(text for text in texts if text), features=verified)
    if not request.id:
        return Append((answer,))
    asked = next(pending for pending in state.tools.pending if pending.id == request.id)
    answer = answer.model_copy(update={"cause": request.id, "tool_call_metadata": asked.tool_call_metadata})
    return Append((answer,), answers=((0, request.id),))


def _save(state: State, features: tuple[Feature, ...], *, message: str, report: str = "") -> Append:
    save = SaveProgressAction(
        features=write_features(features) if features or state.work.written_sha256 else "",
        written_sha256=state.work.written_sha256,
        message=message,
        report=report,
    )
    return Append((save,))


def _apply(features: tuple[Feature, ...], request: FeatureRequest) -> tuple[tuple[Feature, ...], frozenset[str], str]:
    """Return the list after a request, the ids of the features to verify, and the problem of the request.

    A request with a problem changes and verifies nothing. A request cannot set a result: new and changed features fail
    until they are verified.
    """
    known = {feature.id: feature for feature in features}
    given = {feature.id: feature.model_copy(update=_UNVERIFIED) for feature in request.features}
    if request.command == "add":
        for feature in given.values():
            old = known.get(feature.id)
            if old is not None and old.model_copy(update=_UNVERIFIED) != feature:
                return features, frozenset(), EXISTS.format(id=feature.id)
        added = tuple(feature for feature in given.values() if feature.id not in known)
        if len(features) + len(added) > MAX_FEATURES:
            return features, frozenset(), FULL.format(limit=MAX_FEATURES)
        return (*features, *added), frozenset(feature.id for feature in added), ""
    named = given if request.command == "change" else dict.fromkeys(request.ids)
    for name in named:
        if name not in known:
            return features, frozenset(), UNKNOWN.format(id=name[:100], known=", ".join(known) or "none")
    if request.command == "change":
        return tuple(given.get(feature.id, feature) for feature in features), frozenset(given), ""
    if request.command == "remove":
        return tuple(feature for feature in features if feature.id not in named), frozenset(), ""
    return features, frozenset(named or known), ""


_UNVERIFIED = {"passes": False, "passed_when_added": False}

WORK = Concern(
    "work",
    {
        FeatureListAction: _after_request,
        FeatureCheckAction: _after_check,
        SaveProgressAction: _after_save,
        FeatureListObservation: _after_list,
        Observation: _after_observation,
        AgentFinishAction: _after_finish,
        CondensationAction: _after_condensation,
    },
)
