"""The public interface of Deckhands: the Python client and the command line.

Every name in `__all__` is imported on first use, because `deckhands --help` needs none of them. docs/python.md shows
how to use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.contract.condenser_specs import LLMSummarizingCondenserSpec
    from broker.contract.events import AgentSpec, Event, Limits, LLMSpec, OperatorActed, WorkspaceSpec
    from broker.contract.kinds import ActionSecurityRisk
    from broker.contract.policies import ConfirmationPolicy, LoopPolicy
    from broker.contract.specs import CriticSpec, GoalSpec, Skill, Tenancy
    from broker.coordination.transfers import TransferFailed
    from broker.log.conversations import ConversationRow
    from broker.log.live_text import LivePiece
    from broker.runtime.errors import (
        AdmissionRefused,
        ConversationBusy,
        ConversationMoved,
        DeckhandsError,
        EventsLost,
        OutcomeUnknown,
        StoreError,
        StoreUnavailable,
        UnknownConversation,
        UsageError,
    )
    from broker.secrets.references import SecretReference
    from broker.tools.celery_tool import celery_tool
    from broker.tools.custom_tools import CustomTool, ToolContext, ToolFailed, custom_tool
    from deckhands.client.archive.storage import ArchiveUnavailable
    from deckhands.client.changing import Change
    from deckhands.client.client import Client
    from deckhands.client.conversation.async_conversation import AsyncConversation
    from deckhands.client.conversation.conversation import Conversation
    from deckhands.client.conversation.outcome import ConversationFailed, NotBegun, Outcome
    from deckhands.client.errors import NoCluster, NotSettled, NotStopped
    from deckhands.client.reading.metrics import Metrics
    from deckhands.client.reading.summary import Summary
    from deckhands.client.reasons.link import Why
    from deckhands.client.remote.server_calls import ServerRefused, ServerUntrusted
    from deckhands.client.tasks.spec import TaskSpec
    from deckhands.client.text_search import FoundConversation
    from deckhands.client.trajectories import Trajectory
    from deckhands.client.transfers.commands import CommandFailed, CommandResult
    from deckhands.client.verification import Verification
    from deckhands.evaluation.evaluating import evaluate, evaluate_async

    __version__: str

__all__ = [
    "ActionSecurityRisk",
    "AdmissionRefused",
    "AgentSpec",
    "ArchiveUnavailable",
    "AsyncConversation",
    "Change",
    "Client",
    "CommandFailed",
    "CommandResult",
    "ConfirmationPolicy",
    "Conversation",
    "ConversationBusy",
    "ConversationFailed",
    "ConversationMoved",
    "ConversationRow",
    "CriticSpec",
    "CustomTool",
    "DeckhandsError",
    "Event",
    "EventsLost",
    "FoundConversation",
    "GoalSpec",
    "LLMSpec",
    "LLMSummarizingCondenserSpec",
    "Limits",
    "LivePiece",
    "LoopPolicy",
    "Metrics",
    "NoCluster",
    "NotBegun",
    "NotSettled",
    "NotStopped",
    "OperatorActed",
    "Outcome",
    "OutcomeUnknown",
    "SecretReference",
    "ServerRefused",
    "ServerUntrusted",
    "Skill",
    "StoreError",
    "StoreUnavailable",
    "Summary",
    "TaskSpec",
    "Tenancy",
    "ToolContext",
    "ToolFailed",
    "Trajectory",
    "TransferFailed",
    "UnknownConversation",
    "UsageError",
    "Verification",
    "Why",
    "WorkspaceSpec",
    "celery_tool",
    "custom_tool",
    "evaluate",
    "evaluate_async",
]

_MODULES = {
    "broker.contract.condenser_specs": ("LLMSummarizingCondenserSpec",),
    "broker.contract.events": ("AgentSpec", "Event", "LLMSpec", "Limits", "OperatorActed", "WorkspaceSpec"),
    "broker.contract.kinds": ("ActionSecurityRisk",),
    "broker.contract.policies": ("ConfirmationPolicy", "LoopPolicy"),
    "broker.contract.specs": ("CriticSpec", "GoalSpec", "Skill", "Tenancy"),
    "broker.coordination.transfers": ("TransferFailed",),
    "broker.log.conversations": ("ConversationRow",),
    "broker.log.live_text": ("LivePiece",),
    "broker.runtime.errors": (
        "AdmissionRefused",
        "ConversationBusy",
        "ConversationMoved",
        "DeckhandsError",
        "EventsLost",
        "OutcomeUnknown",
        "StoreError",
        "StoreUnavailable",
        "UnknownConversation",
        "UsageError",
    ),
    "broker.secrets.references": ("SecretReference",),
    "broker.tools.celery_tool": ("celery_tool",),
    "broker.tools.custom_tools": ("CustomTool", "ToolContext", "ToolFailed", "custom_tool"),
    "deckhands.client.archive.storage": ("ArchiveUnavailable",),
    "deckhands.client.changing": ("Change",),
    "deckhands.client.client": ("Client",),
    "deckhands.client.conversation.async_conversation": ("AsyncConversation",),
    "deckhands.client.conversation.conversation": ("Conversation",),
    "deckhands.client.conversation.outcome": ("ConversationFailed", "NotBegun", "Outcome"),
    "deckhands.client.errors": ("NoCluster", "NotSettled", "NotStopped"),
    "deckhands.client.reading.metrics": ("Metrics",),
    "deckhands.client.reading.summary": ("Summary",),
    "deckhands.client.reasons.link": ("Why",),
    "deckhands.client.remote.server_calls": ("ServerRefused", "ServerUntrusted"),
    "deckhands.client.tasks.spec": ("TaskSpec",),
    "deckhands.client.text_search": ("FoundConversation",),
    "deckhands.client.trajectories": ("Trajectory",),
    "deckhands.client.transfers.commands": ("CommandFailed", "CommandResult"),
    "deckhands.client.verification": ("Verification",),
    "deckhands.evaluation.evaluating": ("evaluate", "evaluate_async"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("deckhands")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__")), "__version__"})
