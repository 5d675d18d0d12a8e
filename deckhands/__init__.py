"""The public interface of Deckhands: the Python client and the command line.

Every name in `__all__` is imported on first use, because `deckhands --help` needs none of them. docs/python.md shows
how to use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.contract.events import AgentSpec, Event, Limits, LLMSpec, WorkspaceSpec
    from broker.contract.policies import ConfirmationPolicy
    from broker.contract.specs import Tenancy
    from broker.coordination.transfers import TransferFailed
    from broker.runtime.errors import (
        ConversationBusy,
        ConversationMoved,
        DeckhandsError,
        StoreError,
        StoreUnavailable,
        UnknownConversation,
        UsageError,
    )
    from broker.secrets.references import SecretReference
    from deckhands.client.changing import Change
    from deckhands.client.client import Client
    from deckhands.client.conversation.async_conversation import AsyncConversation
    from deckhands.client.conversation.conversation import Conversation
    from deckhands.client.conversation.outcome import ConversationFailed, NotBegun, Outcome
    from deckhands.client.errors import NoCluster, NotSettled, NotStopped
    from deckhands.client.reading.summary import Summary
    from deckhands.client.tasks.spec import TaskSpec
    from deckhands.client.transfers.commands import CommandFailed, CommandResult
    from deckhands.evaluation.evaluating import evaluate, evaluate_async

    __version__: str

__all__ = [
    "AgentSpec",
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
    "DeckhandsError",
    "Event",
    "LLMSpec",
    "Limits",
    "NoCluster",
    "NotBegun",
    "NotSettled",
    "NotStopped",
    "Outcome",
    "SecretReference",
    "StoreError",
    "StoreUnavailable",
    "Summary",
    "TaskSpec",
    "Tenancy",
    "TransferFailed",
    "UnknownConversation",
    "UsageError",
    "WorkspaceSpec",
    "evaluate",
    "evaluate_async",
]

_MODULES = {
    "broker.contract.events": ("AgentSpec", "Event", "LLMSpec", "Limits", "WorkspaceSpec"),
    "broker.runtime.errors": (
        "ConversationBusy",
        "ConversationMoved",
        "DeckhandsError",
        "StoreError",
        "StoreUnavailable",
        "UnknownConversation",
        "UsageError",
    ),
    "broker.coordination.transfers": ("TransferFailed",),
    "broker.contract.policies": ("ConfirmationPolicy",),
    "broker.contract.specs": ("Tenancy",),
    "broker.secrets.references": ("SecretReference",),
    "deckhands.client.changing": ("Change",),
    "deckhands.client.client": ("Client",),
    "deckhands.client.errors": ("NoCluster", "NotSettled", "NotStopped"),
    "deckhands.client.conversation.async_conversation": ("AsyncConversation",),
    "deckhands.client.conversation.conversation": ("Conversation",),
    "deckhands.client.conversation.outcome": ("ConversationFailed", "NotBegun", "Outcome"),
    "deckhands.evaluation.evaluating": ("evaluate", "evaluate_async"),
    "deckhands.client.reading.summary": ("Summary",),
    "deckhands.client.tasks.spec": ("TaskSpec",),
    "deckhands.client.transfers.commands": ("CommandFailed", "CommandResult"),
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
