"""A conversation directory of OpenHands' SDK (V1): `base_state.json` and `events/event-<number>-<uuid>.json`.

Holds: the events are those of the current branch, in order; a missing, damaged or duplicate event is named, and the
others are kept.
Does not: interpret the events; see `sdk_conversation`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.contract import (
    DEFAULT_CONDENSER,
    AgentSpec,
    AgentState,
    AnyCondenserSpec,
    ConfirmationPolicy,
    Limits,
    LLMSpec,
    LLMSummarizingCondenserSpec,
    Skill,
    WorkspaceSpec,
)
from broker.runtime import UsageError
from deckhands.interop.openhands.model_responses import parse_count
from deckhands.interop.openhands.recordings import (
    MAX_EVENTS,
    MAX_FILE_BYTES,
    UNREADABLE,
    ImportFindings,
    parse_json_value,
    read_text,
)
from deckhands.interop.openhands.v0_kinds import EXTENSION

STATE_FILE = "base_state.json"
MAX_ITERATIONS = 500
MOST_ITERATIONS = 1_000_000
_EVENT_FILE = re.compile(r"event-(\d+)-(.+)\.json")

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SdkDirectory:
    """The content of a conversation directory.

    Attributes:
        events: the events of the current branch, with their numbers.
        other_branches: the number of events on other branches.
    """

    state: Fields
    events: list[tuple[int, Fields]]
    other_branches: int

    @classmethod
    def read(cls, path: Path, findings: ImportFindings) -> SdkDirectory:
        """Read a directory.

        Raises:
            UsageError: it is not a conversation directory, or its state cannot be read.
        """
        if not (path / STATE_FILE).is_file():
            raise UsageError(
                f"{path} is not a conversation directory of OpenHands.",
                remedy=f"Name one that holds {STATE_FILE} and a directory events.",
            )
        try:
            state = _read_object(path / STATE_FILE)
        except ValueError as error:
            raise UsageError(
                f"The file {path / STATE_FILE} cannot be read: {error}.", remedy="Copy the directory again."
            ) from error
        events = list(_read_events(path / "events", findings))
        branch = _find_branch(state, events)
        return cls(state, branch, len(events) - len(branch))

    def agent(self, findings: ImportFindings) -> AgentSpec:
        """Return the agent, with the settings that exist here."""
        try:
            agent = self.state.get("agent") or {}
            context = agent.get("agent_context") or {}
            llm = agent.get("llm") or {}
            return AgentSpec(
                llm=LLMSpec(model=llm.get("model"), stream=True if llm.get("stream") is True else None),
                enable_stuck_detection=self.state.get("stuck_detection", True),
                confirmation=_policy(self.state.get("confirmation_policy") or {}),
                condenser=_condenser(agent.get("condenser") or {}),
                skills=tuple(filter(None, map(_skill, context.get("skills") or ()))),
                tool_concurrency=min(max(int(agent.get("tool_concurrency_limit") or 1), 1), 16),
                system_prompt_suffix=context.get("system_message_suffix") or "",
            )
        except UNREADABLE as error:
            findings.add_fault(f"The agent of {STATE_FILE}", error)
            return AgentSpec()

    def workspace(self, findings: ImportFindings) -> WorkspaceSpec:
        """Return its workspace; an empty one if it was on another machine."""
        try:
            workspace = self.state.get("workspace") or {}
            is_local = workspace.get("kind", "LocalWorkspace") == "LocalWorkspace"
            return WorkspaceSpec(path=workspace.get("working_dir") if is_local else None)
        except UNREADABLE as error:
            findings.add_fault(f"The workspace of {STATE_FILE}", error)
            return WorkspaceSpec()

    def read_own_state(self) -> tuple[Fields, AgentState | None]:
        """Return the additions of a Deckhands export, the events behind messages and the state; None if it is outdated.

        It is outdated if another program has continued the conversation, which then has more events than the export.
        """
        own = self._part(self._part(self.state, "agent_state"), EXTENSION)
        state = own.get("state")
        is_whole = own.get("events") == len(self.events) + self.other_branches
        known = AgentState(state) if is_whole and isinstance(state, str) and state in set(AgentState) else None
        return self._part(own, "notes"), known

    @property
    def limits(self) -> Limits:
        """Its limits."""
        most = parse_count(self.state.get("max_iterations"))
        return Limits(max_iterations=min(most or MAX_ITERATIONS, MOST_ITERATIONS))

    def list_left_out(self) -> Counter[str]:
        """Return descriptions of the parts of the state without an equivalent here."""
        agent = self._part(self.state, "agent")
        workspace = self._part(self.state, "workspace")
        secrets = self._part(self._part(self.state, "secret_registry"), "secret_sources")
        place = str(workspace.get("kind", "LocalWorkspace"))[:40]
        return Counter(
            {
                "events of other branches": self.other_branches,
                "secrets (set them again with `deckhands secret`)": len(secrets),
                "MCP servers (they belong to tool workers here)": len(self._part(agent, "mcp_config")),
                "hooks": int(bool(self.state.get("hook_config"))),
                "tags": len(self._part(self.state, "tags")),
                f"workspace of the kind {place}": int(place != "LocalWorkspace"),
            }
        )

    def _part(self, fields: Fields, name: str) -> Fields:
        part = fields.get(name)
        return part if isinstance(part, dict) else {}


def _read_object(file: Path) -> Fields:
    """Read a file that holds an object.

    Raises:
        ValueError: the file contains no object, or cannot be read.
    """
    try:
        value = parse_json_value(read_text(file))
    except UsageError as error:
        raise ValueError(str(error)) from error
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")  # noqa: TRY004  (as for all that is not JSON)
    return value


def _read_events(folder: Path, findings: ImportFindings) -> Iterator[tuple[int, Fields]]:
    """Return the events of a directory by their numbers; missing, damaged or duplicate ones are recorded as faults."""
    names = {file.name: _EVENT_FILE.fullmatch(file.name) for file in folder.glob("event-*.json")}
    numbered = sorted((int(match[1]), name) for name, match in names.items() if match)
    if len(numbered) > MAX_EVENTS:
        findings.add_fault(
            f"Everything after event {numbered[MAX_EVENTS - 1][0]}", f"at most {MAX_EVENTS} are imported"
        )
    seen: set[str] = set()
    expected = size_bytes = 0
    for number, name in numbered[:MAX_EVENTS]:
        size_bytes += _size_of(folder / name)
        if size_bytes > MAX_FILE_BYTES:
            findings.add_fault(f"Event {number} and the rest", f"more than {MAX_FILE_BYTES >> 20} MiB are not read")
            return
        if number > expected:
            what = (
                f"Event {expected}" if number == expected + 1 else f"Everything from event {expected} to {number - 1}"
            )
            findings.add_fault(what, "the file is not there")
        expected = number + 1
        try:
            fields = _read_object(folder / name)
        except ValueError as error:
            findings.add_fault(f"Event {number}", error)
            continue
        if not isinstance(fields.get("id"), str) or fields["id"] in seen:
            findings.add_fault(f"Event {number}", "it has no id, or that of another event")
            continue
        seen.add(fields["id"])
        yield number, fields


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # reading it reports the reason
        return 0


def _find_branch(state: Fields, events: list[tuple[int, Fields]]) -> list[tuple[int, Fields]]:
    """Return the events from the first to the conversation's current one; all events if they form no tree.

    If a damaged event interrupts the tree, the branch continues with the previous event.
    """
    if state.get("head_is_empty"):
        return []
    places = {event["id"]: place for place, (_, event) in enumerate(events)}
    leaf = state.get("leaf_event_id")
    if not isinstance(leaf, str) or not any(event.get("parent_id") for _, event in events):
        return events
    place = places.get(leaf, len(events) - 1)
    kept: set[int] = set()
    while place >= 0 and place not in kept:
        kept.add(place)
        parent = events[place][1].get("parent_id")
        place = places.get(parent, place - 1) if isinstance(parent, str) else -1
    return [event for n, event in enumerate(events) if n in kept]


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
