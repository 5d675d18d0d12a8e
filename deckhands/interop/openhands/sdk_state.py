"""The state of a conversation as OpenHands' SDK (V1) writes it: in a directory, as `ConversationInfo`, and in updates.

Holds: a state is a fold of the log, so it is the same in every process. The metrics of each use of a model (`agent`,
`condenser`, `critic`) use the same ids of replies as the events.
Does not: contain keys, addresses of models or secrets: those stay with the workers.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import uuid5

from broker.contract import (
    STUCK_CODE,
    AgentSpec,
    AgentState,
    AgentStateChangedObservation,
    ConfirmationPolicy,
    ConversationChanged,
    ConversationCreated,
    Event,
    Limits,
    LLMSummarizingCondenserSpec,
    MessageAction,
    ModelReply,
    ModelSwitched,
    RecallObservation,
    Skill,
)
from deckhands.client import Metrics, MetricsFold
from deckhands.interop.openhands.sdk_events import NAMESPACE, SdkTranslation, to_sdk_conversation_id
from deckhands.interop.openhands.sdk_kinds import TOOL_MODULES, Fields
from deckhands.interop.openhands.v0_kinds import EXTENSION

STATUSES: Mapping[AgentState, str] = {
    AgentState.LOADING: "idle",
    AgentState.RUNNING: "running",
    AgentState.AWAITING_USER_INPUT: "finished",
    AgentState.PAUSED: "paused",
    AgentState.STOPPED: "paused",
    AgentState.FINISHED: "finished",
    AgentState.REJECTED: "finished",
    AgentState.ERROR: "error",
    AgentState.AWAITING_USER_CONFIRMATION: "waiting_for_confirmation",
    AgentState.USER_CONFIRMED: "running",
    AgentState.USER_REJECTED: "running",
    AgentState.RATE_LIMITED: "running",
}
"""The SDK's `execution_status` for each state of an agent. There, a reply without a call ends a run."""
FULL_STATE = "full_state"
"""The key of an update that holds a whole state."""
CALL_LISTS = ("costs", "response_latencies", "token_usages")
"""The parts of metrics that grow with each call."""
UNKNOWN_MODEL = "default"
MAX_TAG_CHARS = 256
_TOOL_FLAGS = {
    "terminal": ("enable_cmd", "terminal"),
    "file_editor": ("enable_editor", "file_editor"),
    "task_tracker": ("enable_plan_mode", "task_tracker"),
    "apply_patch": ("enable_patch", "apply_patch"),
    "task_tool_set": ("enable_delegation", "task"),
}
"""The SDK's tools of an agent: the field that enables each, and the tool that its events name."""


@dataclass(frozen=True, slots=True)
class SdkPlace:
    """The location of a conversation, as named by its reader.

    Attributes:
        working_dir: the workspace's directory.
        persistence_dir: the directory of the events; None if there is none.
    """

    working_dir: str = "workspace"
    persistence_dir: str | None = None


@dataclass(slots=True)
class SdkConversation:
    """A conversation in the SDK's form: its events and its state. Feed it every event from the first one on.

    Attributes:
        state: the state of the agent.
        created: the first event; None before it.
        event_count: the number of events of the SDK so far.
    """

    conversation_id: str
    translation: SdkTranslation = field(init=False)
    state: AgentState = AgentState.LOADING
    created: ConversationCreated | None = None
    event_count: int = 0
    _agent: AgentSpec = AgentSpec()
    _limits: Limits = Limits()
    _labels: Mapping[str, str] = field(default_factory=dict)
    _is_stuck: bool = False
    _has_message: bool = False
    _model: str = ""
    _updated: datetime | None = None
    _skills: dict[str, None] = field(default_factory=dict)
    _metrics: dict[str, MetricsFold] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with an empty log."""
        self.translation = SdkTranslation(self.conversation_id)

    def add(self, event: Event) -> list[Fields]:
        """Add the next event of the log, and return the events of the SDK that are now complete."""
        found = self.translation.add(event)
        self.event_count += len(found)
        self._updated = event.timestamp or self._updated
        match event:
            case ConversationCreated():
                self.created = event
                self._agent = event.agent
                self._limits, self._labels = event.limits, event.labels or {}
            case ConversationChanged():
                self._change(event)
            case AgentStateChangedObservation():
                self.state, self._is_stuck = event.agent_state, event.code == STUCK_CODE
            case ModelSwitched():
                self._model = event.model
            case ModelReply():
                self._model = event.model or self._model
                reply = event.model_copy(update={"response_id": self.translation.find_response_id(event.id)})
                self._fold(event.service).add(reply)
                return found
            case MessageAction():
                self._has_message = True
            case RecallObservation():
                self._skills |= dict.fromkeys(skill.name for skill in event.microagent_knowledge)
        self._fold("agent").add(event)
        return found

    def end(self) -> list[Fields]:
        """Return the events that are still held back, because the log has ended."""
        found = self.translation.end()
        self.event_count += len(found)
        return found

    @property
    def execution_status(self) -> str:
        """The SDK's name of the state."""
        if self.state is AgentState.ERROR and self._is_stuck:
            return "stuck"
        if self.state is AgentState.AWAITING_USER_INPUT and not self._has_message:
            return "idle"
        return STATUSES[self.state]

    def to_state(self, place: SdkPlace) -> Fields:
        """Return the state that `base_state.json` and `full_state` hold."""
        return {
            "id": to_sdk_conversation_id(self.conversation_id),
            "agent": to_sdk_agent(self._agent, self._model),
            "workspace": {"kind": "LocalWorkspace", "working_dir": place.working_dir},
            "persistence_dir": place.persistence_dir,
            "max_iterations": self._limits.max_iterations,
            "stuck_detection": self._agent.enable_stuck_detection,
            "execution_status": self.execution_status,
            "confirmation_policy": to_sdk_policy(self._agent.confirmation),
            "security_analyzer": _to_analyzer(self._agent.confirmation),
            "activated_knowledge_skills": list(self._skills),
            "last_user_message_id": self.translation.last_message_id,
            "leaf_event_id": self.translation.leaf_id,
            "stats": {
                "usage_to_metrics": {
                    usage_id: self._describe(fold.metrics()) for usage_id, fold in self._metrics.items()
                }
            },
            "secret_registry": {"secret_sources": {}},
            "tags": _to_tags(self._labels),
            "agent_state": {EXTENSION: {"state": self.state.value, "events": self.event_count}},
        }

    def to_info(self, place: SdkPlace, *, title: str | None = None) -> Fields:
        """Return the conversation's `ConversationInfo`."""
        created = self.created or ConversationCreated(conversation_id=self.conversation_id)
        sums = self._fold("agent").sums
        info = self.to_state(place) | {
            "title": title or created.title or None,
            "metrics": {
                "model_name": self._model or UNKNOWN_MODEL,
                "accumulated_cost": sum(one.sums.accumulated_cost for one in self._metrics.values()),
                "max_budget_per_task": sums.max_budget_per_task,
                "accumulated_token_usage": self._sum_usage(),
            },
            "tool_module_qualnames": find_tool_modules(self._agent),
            "client_tools": [],
            "sub_conversation_ids": [],
        }
        for name, moment in (("created_at", created.timestamp), ("updated_at", self._updated)):
            if moment is not None:
                info[name] = moment.isoformat()
        if created.forked_from is not None:
            source = created.forked_from.rpartition("@")[0]
            info["forked_from_conversation_id"] = to_sdk_conversation_id(source)
        if created.parent is not None:
            info["parent_conversation_id"] = to_sdk_conversation_id(created.parent.conversation_id)
        return info

    def make_update(self, key: str, value: Any) -> Fields:
        """Return a `ConversationStateUpdateEvent` about the state after the events so far."""
        moment = self._updated
        version = f"{self.conversation_id}/state/{self.event_count}/{self.execution_status}/{key}"
        return {
            "kind": "ConversationStateUpdateEvent",
            "id": str(uuid5(NAMESPACE, version)),
            "timestamp": moment.replace(tzinfo=None).isoformat(timespec="microseconds") if moment else "",
            "source": "environment",
            "key": key,
            "value": value,
        }

    def _change(self, event: ConversationChanged) -> None:
        agent = event.agent or self._agent
        policy = event.confirmation or agent.confirmation
        if event.analyzer is not None:
            policy = policy.model_copy(update={"analyzer": event.analyzer})
        self._agent = agent.model_copy(update={"confirmation": policy})
        self._limits = event.limits or self._limits
        self._labels = self._labels if event.labels is None else event.labels

    def _fold(self, usage_id: str) -> MetricsFold:
        return self._metrics.setdefault(usage_id, MetricsFold())

    def sum_stats(self) -> Fields:
        """Return the state's `stats` without the lists of single calls."""
        sums = {usage_id: self._describe(fold.sums) for usage_id, fold in self._metrics.items()}
        return {
            "usage_to_metrics": {
                usage_id: {name: value for name, value in metrics.items() if name not in CALL_LISTS}
                for usage_id, metrics in sums.items()
            }
        }

    def _describe(self, metrics: Metrics) -> Fields:
        return {"model_name": metrics.model_name or self._model or UNKNOWN_MODEL, **metrics.get()}

    def _sum_usage(self) -> Fields:
        names = ("prompt_tokens", "completion_tokens", "cache_read_tokens", "cache_write_tokens")
        usages = [fold.sums.accumulated_token_usage for fold in self._metrics.values()]
        return {name: sum(getattr(usage, name) for usage in usages) for name in names}


def to_sdk_agent(agent: AgentSpec, model: str = "") -> Fields:
    """Return an agent of the SDK with the options that exist there.

    Args:
        model: the model in use; the agent's own if empty.
    """
    name = model or agent.llm.model or UNKNOWN_MODEL
    llm: Fields = {"model": name, "usage_id": "agent"} | ({"stream": True} if agent.llm.stream else {})
    if agent.acp is not None:
        return {"kind": "ACPAgent", "llm": llm, "acp_command": _split_command(agent.acp.command)}
    tools = {tool: getattr(agent, flag) for tool, (flag, _) in _TOOL_FLAGS.items()}
    built_in = {"FinishTool": agent.enable_finish, "ThinkTool": agent.enable_think}
    found: Fields = {
        "kind": "Agent",
        "llm": llm,
        "tools": [{"name": tool, "params": {}} for tool, is_enabled in tools.items() if is_enabled],
        "include_default_tools": [tool for tool, is_enabled in built_in.items() if is_enabled],
        "tool_concurrency_limit": agent.tool_concurrency,
    }
    if isinstance(agent.condenser, LLMSummarizingCondenserSpec):
        found["condenser"] = {
            "kind": "LLMSummarizingCondenser",
            "llm": {"model": name, "usage_id": "condenser"},
            "max_size": agent.condenser.max_size,
            "keep_first": agent.condenser.keep_first,
        }
    context: Fields = {}
    if agent.skills:
        context["skills"] = [*map(_to_skill, agent.skills)]
    if agent.system_prompt_suffix:
        context["system_message_suffix"] = agent.system_prompt_suffix
    return found | ({"agent_context": context} if context else {})


def find_tool_modules(agent: AgentSpec) -> dict[str, str]:
    """Return the modules that a client imports to read the events of an agent's tools, by tool."""
    if agent.acp is not None:
        return {}
    return {name: TOOL_MODULES[name] for flag, name in _TOOL_FLAGS.values() if getattr(agent, flag)}


def _split_command(command: str) -> list[str]:
    """Return the words of a command line; a call of bash if it is not just words."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    return words if words and shlex.join(words) == command else ["bash", "-c", command]


def to_sdk_policy(policy: ConfirmationPolicy) -> Fields:
    """Return a confirmation policy of the SDK; a plug-in becomes `AlwaysConfirm`."""
    match policy.mode:
        case "never":
            return {"kind": "NeverConfirm"}
        case "risky":
            own = {"threshold": policy.threshold, "confirm_unknown": policy.confirm_unknown}
            return {"kind": "ConfirmRisky", **own}
    return {"kind": "AlwaysConfirm"}


def _to_analyzer(policy: ConfirmationPolicy) -> Fields | None:
    return None if policy.analyzer == "none" or policy.mode != "risky" else {"kind": "LLMSecurityAnalyzer"}


def _to_skill(skill: Skill) -> Fields:
    trigger = {"trigger": {"type": "keyword", "keywords": list(skill.triggers)}} if skill.triggers else {}
    return {"name": skill.name, "content": skill.content, **trigger}


def _to_tags(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels as tags, which have keys of lower-case letters and digits; others are left out."""
    return {
        key: value
        for key, value in labels.items()
        if key.isascii() and key.isalnum() and key.lower() == key and len(value) <= MAX_TAG_CHARS
    }
