"""The names of SDK agents, and the legacy agent behind each.

An SDK agent is a conversation whose loop is the Claude Agent SDK. Its legacy agent does the same work in our own loop,
and takes over if the SDK cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

AgentKind = Literal["legacy", "sdk"]

LEGACY_OF: Mapping[str, str] = {
    "CodeActAgentSDK": "CodeActAgent",
    "ReadOnlyAgentSDK": "ReadOnlyAgent",
    "BrowsingAgentSDK": "BrowsingAgent",
}
"""The legacy agent behind each SDK agent."""
SDK_OF: Mapping[str, str] = {legacy: sdk for sdk, legacy in LEGACY_OF.items()}


def kind_of(name: str) -> AgentKind:
    """Return the kind of an agent by its name; an unknown name is a legacy agent."""
    return "sdk" if name in LEGACY_OF else "legacy"


def is_sdk_agent(name: str) -> bool:
    """Return whether the loop of an agent is the Claude Agent SDK."""
    return name in LEGACY_OF


def legacy_of(name: str) -> str:
    """Return the legacy agent behind an SDK agent; any other name is returned unchanged."""
    return LEGACY_OF.get(name, name)


def sdk_of(name: str) -> str:
    """Return the SDK agent that does the work of an agent; a name without one is returned unchanged."""
    return SDK_OF.get(name, name)
