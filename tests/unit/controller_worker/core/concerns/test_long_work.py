"""Long work: contexts, the feature list, its verification, and every way to forge a result."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction, CmdRunAction, CondensationAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, Event, EventSource
from broker.contract.long_work import (
    FeatureCheckAction,
    FeatureCheckObservation,
    FeatureListObservation,
    SaveProgressAction,
    SaveProgressObservation,
)
from broker.contract.observations import ErrorObservation, FinishRefusedObservation, OutcomeUnknownObservation
from broker.contract.policies import ConfirmationPolicy
from broker.contract.specs import GoalSpec
from controller_worker.core.effects import AwaitTools, CallModel, Effect, Rest
from controller_worker.loop.replay import replay
from tests.controller_parts import Core, call, check_snapshots, finish, messages_of

LONG_WORK = AgentSpec(name="LongWorkAgent")


class Work(Core):
    """A conversation of long work, with a workspace in which the features named in `working` work."""

    def __init__(self, agent: AgentSpec = LONG_WORK, **options: Any) -> None:
        super().__init__("build it", agent=agent, **options)
        self.working: set[str] = set()
        self.was_edited = False
        self.verified: list[str] = []
        self.serve()

    def serve(self) -> Effect:
        """Answer the environment's own actions until something else is wanted."""
        effect = self.run()
        while isinstance(effect, AwaitTools) and len(effect.action_ids) == 1:
            answer = self.answer_own(self.event(effect.action_ids[0]))
            if answer is None:
                break
            effect = self.observe(effect.action_ids[0], answer.model_copy(update={"cause": effect.action_ids[0]}))
        return effect

    def answer_own(self, action: Event) -> FeatureCheckObservation | SaveProgressObservation | None:
        if isinstance(action, FeatureCheckAction):
            self.verified.append(action.feature_id)
            exit_code = 0 if action.feature_id in self.working else 1
            return FeatureCheckObservation(content="oh no", feature_id=action.feature_id, exit_code=exit_code)
        if isinstance(action, SaveProgressAction):
            return SaveProgressObservation(content=action.report, commit="c0ffee", was_edited=self.was_edited)
        return None

    def does(self, *calls: Any) -> Effect:
        self.reply(*calls)
        return self.serve()

    def condense(self) -> Effect:
        self.append(CondensationAction(forgotten_events_start_id=4, forgotten_events_end_id=self.state.version))
        return self.serve()

    @property
    def passing(self) -> dict[str, bool]:
        return {feature.id: feature.passes for feature in self.state.work.features}

    def last(self, kind: type[Event]) -> Any:
        return next(event for event in reversed(self.events) if isinstance(event, kind))


def features(command: str, *ids: str, call_id: str = "l1", **fields: Any) -> Any:
    named = [{"id": name, "description": f"{name} works", "check": f"test -f {name}"} for name in ids]
    arguments = {"command": command, **({"features": named} if named else {}), **fields, "security_risk": "LOW"}
    return call("feature_list", json.dumps(arguments), call_id)


def test_first_context_reads_the_workspace_and_commits_nothing() -> None:
    core = Work()
    save = core.last(SaveProgressAction)
    assert (save.message, save.features) == ("", "")
    assert "A new context starts, number 1" in save.report
    assert core.wants() == CallModel(1, 1)
    assert "The feature list is empty." in str(messages_of(core.events)[-1].content)


def test_each_condensation_starts_a_context_with_the_logs_list() -> None:
    core = Work()
    core.working = {"a"}
    core.does(features("add", "a", "b"))
    core.condense()
    save = core.last(SaveProgressAction)
    assert save.message == "Save the progress before context 2"
    assert "1 of 2 features pass.\n[x] a: a works (its check succeeded before any work)\n[ ] b: b works" in save.report
    assert core.state.work.contexts == 2
    assert replay(core.events).divergence is None
    assert core.wants() == CallModel(2, 1)
    assert core.state.usage.iteration == 1


def test_added_features_are_verified_and_written_from_the_log() -> None:
    core = Work()
    assert core.does(features("add", "a", "b")) == CallModel(2, 1)
    assert core.verified == ["a", "b"]
    save = core.last(SaveProgressAction)
    assert [(item["id"], item["passes"]) for item in json.loads(save.features)] == [("a", False), ("b", False)]
    answer = core.last(FeatureListObservation)
    assert answer.tool_call_metadata.tool_call_id == "l1"
    assert "0 of 2 features pass." in answer.content
    assert "Output of the check of a:\noh no" in answer.content
    assert core.state.tools.pending == ()


def test_verify_runs_the_named_checks_only() -> None:
    core = Work()
    core.does(features("add", "a", "b"))
    core.verified.clear()
    core.working = {"a", "b"}
    core.does(features("verify", ids=["b"]))
    assert core.verified == ["b"]
    assert core.passing == {"a": False, "b": True}
    core.working = {"a"}
    core.does(features("verify"))
    assert core.passing == {"a": True, "b": False}


def test_finish_with_failing_features_is_refused_with_the_list() -> None:
    core = Work()
    core.does(features("add", "a", "b"))
    core.working = {"a"}
    assert core.does(finish()) == CallModel(3, 1)
    refused = core.last(FinishRefusedObservation)
    assert refused.content.startswith("Your finish was not accepted (1 of 3 times): these features do not pass: b.")
    assert core.passing == {"a": True, "b": False}
    core.working = {"a", "b"}
    assert core.does(finish()) == Rest()
    assert core.states() == ["running", "finished"]
    assert core.last(SaveProgressAction).message == "Save the progress: 2 of 2 features pass"
    check_snapshots(core)
    assert replay(core.events).divergence is None


def test_finish_without_features_is_refused() -> None:
    core = Work()
    assert core.does(finish()) == CallModel(2, 1)
    assert "the feature list is empty" in core.last(FinishRefusedObservation).content


def test_one_refusal_too_many_is_an_error() -> None:
    core = Work()
    core.does(features("add", "a"))
    for _ in range(4):
        core.does(finish())
    assert core.states() == ["running", "error"]
    assert core.state.lifecycle.error_code == "goal_not_reached"


def test_the_check_of_the_goal_comes_after_the_features() -> None:
    core = Work(AgentSpec(name="LongWorkAgent", goal=GoalSpec(check="make test", timeout_seconds=5)))
    core.working = {"a"}
    core.does(features("add", "a"))
    assert core.last(FeatureCheckAction).timeout == 5
    assert core.does(finish()) == AwaitTools((core.state.version,))
    assert core.verified == ["a", "a"]
    assert isinstance(core.events[-1], CmdRunAction)
    assert core.observe(core.state.version) == Rest()
    assert core.states() == ["running", "finished"]


def test_message_during_a_verification_takes_the_finish_back() -> None:
    core = Work()
    core.does(features("add", "a", "b"))
    core.working = {"a", "b"}
    core.reply(finish())
    core.say("one more thing")
    assert core.serve() == CallModel(3, 1)
    core.working = {"b"}
    core.does(finish())
    assert core.passing == {"a": False, "b": True}  # nothing of the first verification counts
    assert replay(core.events).divergence is None


def test_stop_settles_a_request_and_its_check() -> None:
    core = Work()
    core.reply(features("add", "a"))
    core.ask("stopped")
    assert core.run() == Rest()
    assert core.state.tools.pending == ()
    assert core.state.work.requests == ()
    assert core.passing == {}
    assert replay(core.events).divergence is None


@pytest.mark.parametrize("outcome", ["unknown", "error"])
def test_check_without_a_result_passes_nothing(outcome: str) -> None:
    core = Work()
    core.reply(features("add", "a"))
    check = core.state.version
    kind = OutcomeUnknownObservation if outcome == "unknown" else ErrorObservation
    core.observe(check, kind(content="The process ended.", cause=check))
    core.serve()
    assert core.passing == {"a": False}


# Every way to forge a result.


@pytest.mark.parametrize("field", ["passes", "passed_when_added"])
def test_agent_cannot_add_a_feature_that_passes(field: str) -> None:
    core = Work()
    item = {"id": "a", "description": "a", "check": "false", field: True}
    core.does(call("feature_list", json.dumps({"command": "add", "features": [item], "security_risk": "LOW"})))
    assert "only verification decides" in core.last(ErrorObservation).content
    assert core.passing == {}


def test_edited_file_is_reported_and_has_no_effect() -> None:
    core = Work()
    core.does(features("add", "a"))
    written = core.last(SaveProgressAction)
    core.was_edited = True
    core.does(features("verify"))
    assert core.passing == {"a": False}
    assert core.last(SaveProgressAction).written_sha256 == core.state.work.written_sha256 != ""
    assert core.last(SaveProgressAction).features == written.features
    assert "had been edited. That has no effect" in core.last(FeatureListObservation).content


def test_added_feature_cannot_be_given_a_weaker_check() -> None:
    core = Work()
    core.does(features("add", "a"))
    weaker = {"id": "a", "description": "a works", "check": "true"}
    core.does(call("feature_list", json.dumps({"command": "add", "features": [weaker], "security_risk": "LOW"})))
    assert core.state.work.features[0].check == "test -f a"
    assert "`add` cannot alter it" in core.last(FeatureListObservation).content


@pytest.mark.parametrize("command", ["change", "remove"])
@pytest.mark.parametrize("mode", ["never", "risky", "always"])
def test_change_and_removal_wait_for_a_person(command: str, mode: str) -> None:
    core = Work(AgentSpec(name="LongWorkAgent", confirmation=ConfirmationPolicy(mode=mode)), headless=False)
    core.does(features("add", "a"))
    if mode == "always":
        core.ask("user_confirmed")
        core.serve()
    core.does(features(command, "a") if command == "change" else features(command, ids=["a"]))
    assert core.states()[-1] == "awaiting_user_confirmation"
    assert core.passing == {"a": False}
    core.ask("user_rejected")
    core.run()
    assert core.passing == {"a": False}
    assert core.state.tools.pending == ()


def test_confirmed_change_replaces_the_check_and_verifies_it() -> None:
    core = Work(headless=False)
    core.working = {"a"}
    core.does(features("add", "a"))
    core.working = set()
    other = {"id": "a", "description": "a", "check": "make a"}
    asking = {"command": "change", "features": [other], "reason": "it never worked", "security_risk": "LOW"}
    core.does(call("feature_list", json.dumps(asking)))
    core.ask("user_confirmed")
    assert core.serve() == CallModel(3, 1)
    assert core.state.work.features[0].check == "make a"
    assert core.passing == {"a": False}
    assert replay(core.events).divergence is None


def test_confirmed_removal_shortens_the_list() -> None:
    core = Work(headless=False)
    core.does(features("add", "a", "b"))
    core.does(features("remove", ids=["a"], reason="not wanted"))
    core.ask("user_confirmed")
    core.serve()
    assert core.passing == {"b": False}
    core.does(features("remove", ids=["b"]))
    core.ask("user_confirmed")
    core.serve()
    assert core.last(SaveProgressAction).features == "[]\n"


def test_person_who_edits_a_change_cannot_set_a_result() -> None:
    core = Work(headless=False)
    core.does(features("add", "a"))
    core.does(features("change", "a"))
    edited = [{"id": "a", "description": "a", "check": "false", "passes": True}]
    confirmed = AgentState.USER_CONFIRMED
    core.put(ChangeAgentStateAction(agent_state=confirmed, source=EventSource.USER, edited={"features": edited}))
    core.serve()
    assert core.passing == {"a": False}


def test_unknown_feature_is_named_with_those_of_the_list() -> None:
    core = Work()
    core.does(features("add", "a"))
    core.verified.clear()
    core.does(features("verify", ids=["b"]))
    assert "There is no feature `b`. The list has: a." in core.last(FeatureListObservation).content
    assert core.verified == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"command": "add"}, "`add` needs `features`."),
        ({"command": "remove"}, "`remove` needs `ids`."),
        ({"command": "add", "features": ["a"]}, "use a list of objects"),
        (
            {"command": "add", "features": [{"id": "a b", "description": "a", "check": "a"}]},
            "Invalid argument 'features'",
        ),
        ({"command": "add", "features": [{"id": "a", "description": "a", "check": "a"}] * 2}, "the same id"),
        ({"command": "pass"}, "Invalid argument 'command'"),
    ],
)
def test_invalid_call_is_answered_with_its_mistake(arguments: dict[str, Any], text: str) -> None:
    core = Work()
    core.does(call("feature_list", json.dumps(arguments)))
    assert text in core.last(ErrorObservation).content


def test_list_has_a_limit() -> None:
    core = Work()
    core.does(features("add", *(f"a{n}" for n in range(200))))
    core.does(features("add", "b"))
    assert "more than 200 features" in core.last(FeatureListObservation).content
    assert len(core.passing) == 200


def test_risk_of_a_request_is_that_of_its_checks() -> None:
    core = Work(AgentSpec(name="LongWorkAgent", confirmation=ConfirmationPolicy(mode="risky", analyzer="shell")))
    bad = {"id": "a", "description": "a", "check": "rm -rf /"}
    core.does(call("feature_list", json.dumps({"command": "add", "features": [bad], "security_risk": "LOW"})))
    assert core.states()[-1] == "awaiting_user_confirmation"
    assert core.verified == []
