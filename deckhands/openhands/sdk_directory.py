"""A conversation directory of OpenHands' SDK (V1): `base_state.json` and `events/event-<number>-<uuid>.json`.

Holds: the events are those of the branch that the conversation stands on, in order, none missing; a damaged directory
is refused with the file's name.
Does not: say what the events mean here; see `sdk_conversation`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.contract.events import AgentSpec, Limits, LLMSpec, WorkspaceSpec
from broker.runtime.errors import UsageError
from broker.specs.condenser_specs import DEFAULT_CONDENSER, AnyCondenserSpec, LLMSummarizingCondenserSpec
from broker.specs.confirmation_policy import ConfirmationPolicy
from broker.specs.specs import Skill

STATE_FILE = "base_state.json"
_EVENT_FILE = re.compile(r"event-(\d+)-(.+)\.json")

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SdkDirectory:
    """What such a directory holds.

    Attributes:
        events: of the branch that the conversation stands on.
        other_branches: how many events stand on others.
    """

    state: Fields
    events: list[Fields]
    other_branches: int

    @classmethod
    def read(cls, path: Path) -> SdkDirectory:
        """Read a directory.

        Raises:
            UsageError: it is none, or a file of it cannot be used.
        """
        if not (path / STATE_FILE).is_file():
            raise UsageError(
                f"{path} is no conversation directory of OpenHands.",
                remedy=f"Name one that holds {STATE_FILE} and a directory events.",
            )
        state = _object(path / STATE_FILE)
        events: list[Fields] = []
        names = {file.name: _EVENT_FILE.fullmatch(file.name) for file in (path / "events").glob("event-*.json")}
        numbered = sorted((int(match[1]), name) for name, match in names.items() if match)
        for position, (number, name) in enumerate(numbered):
            if number != position:
                raise UsageError(
                    f"{path / 'events'} holds event {number} where event {position} belongs.",
                    remedy="Copy the whole directory again.",
                )
            events.append(_object(path / "events" / name))
        branch = _branch(state, events)
        return cls(state, branch, len(events) - len(branch))

    @property
    def agent(self) -> AgentSpec:
        """The agent, as far as there is one like it here."""
        agent = self.state.get("agent") or {}
        context = agent.get("agent_context") or {}
        return AgentSpec(
            llm=LLMSpec(model=(agent.get("llm") or {}).get("model")),
            enable_stuck_detection=self.state.get("stuck_detection", True),
            confirmation=_policy(self.state.get("confirmation_policy") or {}),
            condenser=_condenser(agent.get("condenser") or {}),
            skills=tuple(filter(None, map(_skill, context.get("skills") or ()))),
            tool_concurrency=min(max(int(agent.get("tool_concurrency_limit") or 1), 1), 16),
            system_prompt_suffix=context.get("system_message_suffix") or "",
        )

    @property
    def workspace(self) -> WorkspaceSpec:
        """Where it worked; an empty one where that was another machine's."""
        workspace = self.state.get("workspace") or {}
        is_local = workspace.get("kind", "LocalWorkspace") == "LocalWorkspace"
        return WorkspaceSpec(path=workspace.get("working_dir") if is_local else None)

    @property
    def limits(self) -> Limits:
        """What it could use up."""
        return Limits(max_iterations=max(int(self.state.get("max_iterations") or 500), 1))

    def left_out(self) -> Counter[str]:
        """Return what of the state has no equivalent here, in words."""
        agent = self.state.get("agent") or {}
        secrets = (self.state.get("secret_registry") or {}).get("secret_sources") or {}
        workspace = (self.state.get("workspace") or {}).get("kind", "LocalWorkspace")
        return Counter(
            {
                "events of other branches": self.other_branches,
                "secrets (set them again with `deckhands secret`)": len(secrets),
                "MCP servers (they belong to tool workers here)": len(agent.get("mcp_config") or {}),
                "hooks": int(bool(self.state.get("hook_config"))),
                "tags": len(self.state.get("tags") or {}),
                f"workspace of the kind {workspace}": int(workspace != "LocalWorkspace"),
            }
        )


def _object(file: Path) -> Fields:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"The file {file} cannot be read: {error}.", remedy="Copy the directory again.") from error
    if not isinstance(value, dict):
        raise UsageError(f"The file {file} holds no JSON object.", remedy="Copy the directory again.")
    return value


def _branch(state: Fields, events: list[Fields]) -> list[Fields]:
    """Return the events from the first to the one the conversation stands on; all, where they are no tree."""
    leaf = state.get("leaf_event_id")
    by_id = {event.get("id"): event for event in events}
    if len(by_id) != len(events):
        raise UsageError("Two events of the directory have the same id.", remedy="Copy the directory again.")
    if state.get("head_is_empty"):
        return []
    if leaf not in by_id or not any(event.get("parent_id") for event in events):
        return events
    kept: set[Any] = set()
    while leaf in by_id and leaf not in kept:
        kept.add(leaf)
        leaf = by_id[leaf].get("parent_id")
    return [event for event in events if event["id"] in kept]


def _policy(policy: Fields) -> ConfirmationPolicy:
    match policy.get("kind"):
        case "AlwaysConfirm":
            return ConfirmationPolicy(mode="always")
        case "ConfirmRisky":
            return ConfirmationPolicy(
                mode="risky",
                threshold=policy.get("threshold", "HIGH"),
                confirm_unknown=policy.get("confirm_unknown", True),
            )
    return ConfirmationPolicy()


def _condenser(condenser: Fields) -> AnyCondenserSpec:
    if condenser.get("kind") != "LLMSummarizingCondenser":
        return DEFAULT_CONDENSER
    size = max(int(condenser.get("max_size") or 240), 4)
    keep_first = min(int(condenser.get("keep_first") or 0), size // 2 - 1)
    return LLMSummarizingCondenserSpec(max_size=size, keep_first=keep_first)


def _skill(skill: Fields) -> Skill | None:
    trigger = skill.get("trigger") or {}
    words = trigger.get("keywords") or trigger.get("triggers") or ()
    if not skill.get("name"):
        return None
    return Skill(name=skill["name"], content=skill.get("content") or "", triggers=tuple(words))
