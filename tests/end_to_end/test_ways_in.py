"""Each feature of a task by each way in: the cells of docs/tasks.md#features-by-way-in, one by one, on one cluster of real workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from broker.contract.agent_state import AgentState
from broker.contract.events import ModelReply
from broker.contract.observations import AgentDelegateObservation
from broker.runtime.version import read_version
from deckhands.client.tasks.spec import TaskSpec
from tests.integration.command_line import finish, run_command, script
from tests.model_server.running_server import RunningModelServer
from tests.ways_in import FEATURES, MISSING, NOT_FEATURES, WAYS, Feature, Way
from tests.ways_in_drivers import (
    ATTENDED,
    DRIVERS,
    FORBIDDEN,
    LOOK,
    MAKE,
    MOUNTED,
    PICTURE,
    SCHEMA,
    SECRET,
    Ended,
    Fields,
    Refused,
    World,
    by_evaluation,
)

pytest_plugins = ("tests.model_server.fixtures",)
DELAY_SECONDS = 0.5
UNREAD = {"skills", "agents_md", "agent_files"}
"""What the files of an instance say, and no agent reads, without an error."""
CELLS = [pytest.param(way, feature, id=f"{way.name}-{feature.name}") for way in WAYS for feature in FEATURES]
SCENARIOS = {
    "all": "do everything",
    "limited": "work for ever",
    "confirmed": "ask first",
    "late": "come too late",
    "keyed": "have a key",
    "recorded": "record tokens",
}
"""What the task of a scenario says; scripts are chosen by it."""


@dataclass(frozen=True)
class Trial:
    """How a feature is tried: the fields that ask for it, in which scenario, and whether its effect is there."""

    has_effect: Callable[[Ended], bool]
    fields: Mapping[str, Any] = field(default_factory=dict)
    scenario: str = "all"
    word: str = ""
    """What an error has to name if a way in lacks the feature; empty: its field."""


def of_agent(**fields: Any) -> dict[str, Any]:
    return {"agent": fields}


def tenancy_of(ended: Ended) -> dict[str, Any]:
    tenancy = ended.created.tenancy
    return {} if tenancy is None else tenancy.model_dump()


def is_delayed(ended: Ended) -> bool:
    due, replied = ended.created.not_before, next(one.timestamp for one in ended.events if isinstance(one, ModelReply))
    assert replied is not None
    return due is not None and ended.submitted + timedelta(seconds=DELAY_SECONDS) <= due <= replied


def had_the_secret(ended: Ended) -> bool:
    shown = ended.log + ended.prompts
    return f"length {len(SECRET)} {len(MOUNTED)}" in ended.log and SECRET not in shown and MOUNTED not in shown


def is_limited(ended: Ended) -> bool:
    limits = ended.created.limits
    return ended.summary.error_code == "max_iterations" and limits is not None and limits.max_budget_usd == 5.0


SECRETS = {"TOKEN": SECRET, "MOUNTED": {"source": "mounted", "path": "mounted"}}
DELEGATES = of_agent(enable_delegation=True, delegates={"ReadOnlyAgent": {"name": "ReadOnlyAgent"}})
TRIALS: Mapping[str, Trial] = {
    "workspace": Trial(lambda ended: "a file of the workspace" in ended.log, {"workspace": "project"}),
    "skills": Trial(lambda ended: "Sing at noon." in ended.prompts),
    "task_skills": Trial(lambda ended: "Tunes a lute." in ended.prompts, {"skills": ["/"]}, word="skill"),
    "agents_md": Trial(lambda ended: "Whistle at dawn." in ended.prompts),
    "agent_files": Trial(lambda ended: "- critic: Judges rhymes." in ended.prompts),
    "setup": Trial(lambda ended: "made by the set-up" in ended.prompts),
    "hooks": Trial(lambda ended: "The house forbids it." in ended.prompts),
    "agent": Trial(
        lambda ended: ended.created.agent.name == "ReadOnlyAgent", of_agent(name="ReadOnlyAgent"), "limited"
    ),
    "model": Trial(
        lambda ended: {request["body"]["model"] for request in ended.requests} == {"gpt-4o"},
        {"model": "openai/gpt-4o"},
    ),
    "images": Trial(lambda ended: PICTURE in ended.prompts, {"images": [f"data:image/png;base64,{PICTURE}"]}),
    "tools": Trial(lambda ended: '"name": "add"' in ended.prompts, {"tools": ["add"]}, word="tool"),
    "mcp_servers": Trial(lambda ended: '"name": "asking_job"' in ended.prompts, {"mcp_servers": {"mine": {}}}),
    "secrets": Trial(had_the_secret, {"secrets": SECRETS}, word="secret"),
    "limits": Trial(is_limited, {"limits": {"max_iterations": 1, "max_budget_usd": 5.0}}, "limited"),
    "confirmation": Trial(
        lambda ended: ended.summary.state == AgentState.AWAITING_USER_CONFIRMATION,
        of_agent(confirmation={"mode": "always"}),
        "confirmed",
        "confirm",
    ),
    "output": Trial(lambda ended: ended.summary.outputs == {"files": 3}, {"output": SCHEMA}),
    "delegates": Trial(
        lambda ended: any(isinstance(event, AgentDelegateObservation) for event in ended.events),
        DELEGATES,
        word="delegate",
    ),
    "check": Trial(
        lambda ended: '"command":"touch checked"' in ended.log, of_agent(goal={"check": "touch checked"}), word="check"
    ),
    "headless": Trial(lambda ended: ended.created.headless is ended.fields["headless"], {"headless": True}),
    "labels": Trial(
        lambda ended: (ended.created.labels or {}).get("team") == "poets", {"labels": {"team": "poets"}}, word="label"
    ),
    "title": Trial(lambda ended: ended.created.title == "An ode", {"title": "An ode"}),
    "tenant": Trial(lambda ended: tenancy_of(ended)["tenant"] == "acme", {"tenant": "acme"}),
    "experiment": Trial(lambda ended: tenancy_of(ended)["experiment"] == "odes", {"experiment": "odes"}),
    "priority": Trial(lambda ended: tenancy_of(ended)["priority"] == "normal", {"priority": "normal"}),
    "delay": Trial(is_delayed, {"delay": DELAY_SECONDS}),
    "expiry": Trial(lambda ended: ended.summary.error_code == "expired" and not ended.requests, {"expires": 0}, "late"),
    "key": Trial(
        lambda ended: ended.summary.state == AgentState.FINISHED, {"idempotency_key": "key of a way"}, "keyed"
    ),
    "acks": Trial(lambda ended: ended.created.acks == "local", {"acks": "local"}),
    "rollout": Trial(
        lambda ended: ended.created.rollout is True and ended.summary.error_code == "tokens_missing",
        {"rollout": True},
        "recorded",
    ),
    "pinned": Trial(lambda ended: ended.created.pinned_version == read_version(), {"pinned_version": "current"}),
    "messages": Trial(lambda ended: ended.created.double_texting == "reject", {"double_texting": "reject"}),
}


class Conversations:
    """The conversations of all ways in, each made when a cell first needs it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._ended: dict[tuple[str, str], Ended] = {}

    def fields(self, way: Way, feature: Feature) -> dict[str, Any]:
        """Return the fields that ask for a feature."""
        found = dict(TRIALS[feature.name].fields)
        if "workspace" in found:
            found["workspace"] = str(self.world.root / "work" / "project")
        if "skills" in found:
            found["skills"] = [str(self.world.root / "lore")]
        if "mcp_servers" in found:
            found["mcp_servers"] = {"mine": {"url": self.world.remote.url}}
        if "idempotency_key" in found:
            found["idempotency_key"] = f"key of {way.name}"
        if "headless" in found:
            found["headless"] = way.name in ATTENDED  # not what it is by default
        return found

    def submit(self, way: Way, scenario: str, fields: Fields) -> Ended | str:
        """Submit the task of a scenario."""
        return DRIVERS[way.name](self.world, f"{SCENARIOS[scenario]}{with_form(fields)} by {way.name}", fields)

    def of(self, way: Way, scenario: str) -> Ended:
        """Return the conversation of a scenario, with all features that the way in has there."""
        place = (way.name, scenario)
        if place not in self._ended:
            fields: dict[str, Any] = {}
            for feature in FEATURES:
                if TRIALS[feature.name].scenario == scenario and (way.name, feature.name) not in MISSING:
                    for name, value in self.fields(way, feature).items():
                        fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
            submitted = datetime.now(UTC)
            ended = self.submit(way, scenario, fields)
            if isinstance(ended, str):
                ended = Ended(ended, self.world.settled(ended))
            ended.submitted, ended.fields = submitted, fields
            self._ended[place] = self._with_requests(ended, f"{SCENARIOS[scenario]}{with_form(fields)} by {way.name}")
        return self._ended[place]

    def without_setup(self) -> Ended:
        """Return an attempt whose instance has files but no set-up."""
        place = ("eval", "without set-up")
        if place not in self._ended:
            task, fields = "do nothing by eval", {"workspace": str(self.world.root / "work" / "project")}
            conversation_id = by_evaluation(self.world, task, fields, setup=None)
            ended = Ended(conversation_id, self.world.settled(conversation_id))
            self._ended[place] = self._with_requests(ended, task)
        return self._ended[place]

    def _with_requests(self, ended: Ended, task: str) -> Ended:
        """Add what the model was asked for a task."""
        ended.requests = [request for request in self.world.models.requests() if task in json.dumps(request["body"])]
        self.world.models.clear()
        assert ended.requests or ended.summary.error_code == "expired", ended.log[-3_000:]
        return ended


def with_form(fields: Fields) -> str:
    """Return the phrase in the task about an output, with which its script is chosen."""
    return " with a form" if "output" in fields else ""


@pytest.fixture(scope="module")
def conversations(
    tmp_path_factory: pytest.TempPathFactory, shared_model_server: Callable[..., RunningModelServer]
) -> Iterator[Conversations]:
    root = tmp_path_factory.mktemp("ways")
    make_files(root)
    first = (run_command(FORBIDDEN), run_command(LOOK), delegate("be a scout"))
    scripts = {
        f"{SCENARIOS['all']} with a form": script(root / "form.json", *first, finish_with({"files": 3})),
        SCENARIOS["all"]: script(root / "all.json", *first, finish("done")),
        SCENARIOS["limited"]: script(root / "ever.json", *[run_command("true")] * 9),
        SCENARIOS["confirmed"]: script(root / "ask.json", run_command("true")),
    }
    choices = [part for text, model in scripts.items() for part in ("--by-text", text, model.partition("/")[2])]
    models = shared_model_server("--builtin", "finish", "--records", "5000", *choices)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(World(root, models, portal).running()) as world,
    ):
        yield Conversations(world)


def make_files(root: Path) -> None:
    """Write a project with the files of a repository, and the hooks of the workers."""
    (root / "work" / "empty").mkdir(parents=True)
    project = root / "work" / "project"
    (project / ".openhands" / "skills").mkdir(parents=True)
    (project / "here.txt").write_text("a file of the workspace\n")
    (project / "AGENTS.md").write_text("Whistle at dawn.\n")
    (project / ".openhands" / "skills" / "song.md").write_text("Sing at noon.\n")
    (project / ".agents" / "agents").mkdir(parents=True)
    (project / ".agents" / "agents" / "critic.md").write_text("---\ndescription: Judges rhymes.\n---\nBe kind.\n")
    (root / "lore" / "lute").mkdir(parents=True)
    (root / "lore" / "lute" / "SKILL.md").write_text("---\nname: lute\ndescription: Tunes a lute.\n---\nGently.\n")
    (project / ".openhands" / "setup.sh").write_text(f"{MAKE}\n")
    guard = root / "guard"
    guard.write_text(f"#!/bin/sh\nif grep -q '{FORBIDDEN}'; then echo 'The house forbids it.' >&2; exit 2; fi\n")
    guard.chmod(0o755)
    (root / "sources.toml").write_text(f'[mounted]\nfile = "{root}/{{path}}"\ntenants = ["*"]\n')
    (root / "mounted").write_text(MOUNTED)
    (root / "hooks.toml").write_text(f'[[hook]]\non = "before_action"\nkinds = ["action.run"]\ncommand = ["{guard}"]\n')


def delegate(task: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "delegate", "arguments": {"agent": "ReadOnlyAgent", "task": task}}]}


def finish_with(output: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"name": "finish", "arguments": {"message": "done", "output": output}}]}


@pytest.mark.parametrize(("way", "feature"), CELLS)
def test_cell(conversations: Conversations, way: Way, feature: Feature) -> None:
    trial = TRIALS[feature.name]
    if (way.name, feature.name) in MISSING:
        if feature.name in UNREAD:
            assert not trial.has_effect(conversations.without_setup())
            return
        with pytest.raises(Refused, match=trial.word or feature.fields[0].replace("_", "[-_]")):
            conversations.submit(way, trial.scenario, conversations.fields(way, feature))
        return
    ended = conversations.of(way, trial.scenario)
    assert trial.has_effect(ended), ended.log[-3_000:]
    if feature.name == "key":
        again = conversations.submit(way, trial.scenario, conversations.fields(way, feature))
        assert again == ended.conversation_id


def test_each_way_and_each_feature_is_tried() -> None:
    assert [way.name for way in WAYS] == list(DRIVERS)
    assert [feature.name for feature in FEATURES] == list(TRIALS)
    assert MISSING.keys() <= {(way.name, feature.name) for way in WAYS for feature in FEATURES}


def test_each_task_field_is_a_feature_or_says_why_not() -> None:
    fields = [*NOT_FEATURES, *(name for feature in FEATURES for name in feature.fields)]
    assert set(fields) == set(TaskSpec.model_fields)
