"""Long work: a feature list that only verification changes, and the text that starts each context of a conversation.

The list is in the log: the agent asks for changes (`FeatureListAction`), the controller answers with the list as it is
now (`FeatureListObservation`), and the file in the workspace is written from it. Whether a feature passes is the exit
code of its check, which the environment runs (`FeatureCheckAction`).

Holds: no tool creates a `FeatureCheckAction`, a `SaveProgressAction` or their observations, so an agent cannot forge
one. Nothing is read from the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from broker.contract.actions import RiskyAction
from broker.contract.events import Action, EventValue, Observation, WorkspaceUse
from broker.contract.kinds import Paragraph
from broker.contract.tool_arguments import ToolCallError, parse_arguments, parse_risk
from broker.contract.tool_specs import SECURITY_RISK, OutcomePolicy, ToolSpec

LONG_WORK_AGENT = "LongWorkAgent"
"""The agent whose conversations have a feature list."""
FEATURES_FILE, NOTES_FILE, INIT_SCRIPT = ".deckhands/features.json", ".deckhands/progress.md", ".deckhands/init.sh"
MAX_FEATURES = 200
MAX_SHOWN_CHARS = 120

FEATURE_LIST = ToolSpec(
    name="feature_list",
    description=(
        "Keep the list of features that this work consists of. `add` adds features, each with a check: a command that "
        "exits with 0 once the feature works. `verify` runs the checks of `ids`, or all of them. Only these checks "
        "decide whether a feature passes. `change` and `remove` need a person's approval, so write good checks at "
        f"once. The list is kept in {FEATURES_FILE}; edits of that file have no effect."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["add", "verify", "change", "remove"], "description": "What to do."},
            "features": {
                "type": "array",
                "description": "For `add` and `change`: the features.",
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string", "description": "A short name: letters, digits, `_`, `.` and `-`."},
                        "description": {"type": "string", "description": "What works once it is done."},
                        "steps": {
                            "type": "array",
                            "items": {"type": "string"},
                            "description": "How a person would try it out.",
                        },
                        "check": {"type": "string", "description": "A command, run in the workspace's top folder."},
                    },
                    "required": ["id", "description", "check"],
                    "additionalProperties": False,
                },
            },
            "ids": {
                "type": "array",
                "items": {"type": "string"},
                "description": "For `verify` and `remove`: the features.",
            },
            "reason": {"type": "string", "description": "For `change` and `remove`: why; a person reads it."},
            "security_risk": SECURITY_RISK,
        },
        "required": ["command", "security_risk"],
        "additionalProperties": False,
    },
)


class Feature(EventValue):
    """A feature of the list.

    Attributes:
        steps: how a user would try it out.
        check: a command in the workspace. The feature passes if it exits with 0.
        passes: the result of the latest verification.
        passed_when_added: the check succeeded before any work, so it proves little.
    """

    id: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str = Field(min_length=1, max_length=2_000)
    steps: tuple[str, ...] = Field(default=(), max_length=50)
    check: str = Field(min_length=1, max_length=4_000)
    passes: bool = False
    passed_when_added: bool = False

    @property
    def line(self) -> str:
        """The feature on one line."""
        warning = " (its check succeeded before any work)" if self.passed_when_added else ""
        return f"[{'x' if self.passes else ' '}] {self.id}: {self.description[:MAX_SHOWN_CHARS]}{warning}"


class FeatureListAction(RiskyAction):
    """Change or verify the feature list. No tool worker runs it; the controller settles it.

    Attributes:
        reason: the agent's reason for a change or a removal.
    """

    kind: Literal["action.feature_list"] = "action.feature_list"
    tool_spec: ClassVar[ToolSpec] = FEATURE_LIST
    command: Literal["add", "verify", "change", "remove"]
    features: tuple[Feature, ...] = Field(default=(), max_length=MAX_FEATURES)
    ids: tuple[str, ...] = Field(default=(), max_length=MAX_FEATURES)
    reason: str = ""

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`; a feature that brings its result along is refused."""
        given = parse_arguments(FEATURE_LIST, arguments)
        features = given.get("features") or []
        if not isinstance(features, list) or not all(isinstance(feature, dict) for feature in features):
            raise ToolCallError("Invalid format for 'features' in tool call feature_list: use a list of objects.")
        if any({"passes", "passed_when_added"} & feature.keys() for feature in features):
            raise ToolCallError("Leave out `passes`: only verification decides whether a feature passes.")
        names = [feature.get("id") for feature in features]
        if len(names) != len(set(map(str, names))):
            raise ToolCallError("Two features have the same id. Give each its own.")
        command = given["command"]
        if command in ("add", "change") and not features:
            raise ToolCallError(f"`{command}` needs `features`.")
        if command == "remove" and not given.get("ids"):
            raise ToolCallError("`remove` needs `ids`.")
        return cls.model_validate({**given, "security_risk": parse_risk(arguments)})

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        named = ", ".join([*(feature.id for feature in self.features), *self.ids])
        why = f" ({self.reason})" if self.reason else ""
        return f"Feature list: {self.command} {named or 'all'}{why}"

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        checks = "\n".join(f"{feature.id}: {feature.check}" for feature in self.features)
        return (Paragraph(self.sentence, "action", "  "), Paragraph(checks, "added", "  $ "))


class FeatureListObservation(Observation):
    """The feature list as it is now. It answers a `FeatureListAction`, or reports the verification of a finish."""

    kind: Literal["observation.feature_list"] = "observation.feature_list"
    is_decided: ClassVar[bool] = True
    features: tuple[Feature, ...] = ()

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return count_passing(self.features)

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.content, "detail", "  "),)


class FeatureCheckAction(Action):
    """Run the check of a feature in a separate shell."""

    kind: Literal["action.feature_check"] = "action.feature_check"
    runnable: ClassVar[bool] = True
    is_decided: ClassVar[bool] = True
    is_shown_to_model: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "Verifying {feature_id}: {command}"
    feature_id: str
    command: str
    timeout: float


class FeatureCheckObservation(Observation):
    """The result of a feature's check; the content is its output."""

    kind: Literal["observation.feature_check"] = "observation.feature_check"
    is_shown_to_model: ClassVar[bool] = False
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    feature_id: str
    exit_code: int

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"{self.feature_id} {'passes' if self.exit_code == 0 else f'fails (exit code {self.exit_code})'}"

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.sentence, "success" if self.exit_code == 0 else "problem", "  "),)


class SaveProgressAction(Action):
    """Write the feature list to its file, commit the workspace, and read the text for a new context.

    Attributes:
        features: the text of the file; empty to leave the file alone.
        written_sha256: of the text that was written last; empty for none. Any other text was written by the agent.
        message: the message of the commit; empty for no commit.
        report: the start of what a new context reads; empty if no context starts.
    """

    kind: Literal["action.save_progress"] = "action.save_progress"
    runnable: ClassVar[bool] = True
    outcome: ClassVar[OutcomePolicy] = OutcomePolicy.IDEMPOTENT
    is_decided: ClassVar[bool] = True
    is_shown_to_model: ClassVar[bool] = False
    is_shown_to_users: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "Saving the progress"
    features: str = ""
    written_sha256: str = ""
    message: str = ""
    report: str = ""


class SaveProgressObservation(Observation):
    """The progress was saved. The content is what a new context reads: notes, commits, the init script's output.

    Attributes:
        commit: the latest commit; empty for none.
        was_edited: the file of the feature list had been changed, and was written again.
    """

    kind: Literal["observation.save_progress"] = "observation.save_progress"
    is_cut: ClassVar[bool] = False
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    commit: str = ""
    was_edited: bool = False

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Progress saved{f' in the commit {self.commit[:12]}' if self.commit else ''}"


def count_passing(features: Sequence[Feature]) -> str:
    """Return how many features pass, as a sentence."""
    if not features:
        return "The feature list is empty."
    return f"{sum(feature.passes for feature in features)} of {len(features)} features pass."


def render_features(features: Sequence[Feature]) -> str:
    """Return the list as text for the model."""
    return "\n".join([count_passing(features), *(feature.line for feature in features)])


def write_features(features: Iterable[Feature]) -> str:
    """Return the text of the file in the workspace."""
    return json.dumps([feature.model_dump(mode="json") for feature in features], indent=2, ensure_ascii=False) + "\n"
