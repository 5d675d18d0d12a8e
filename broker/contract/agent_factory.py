"""The choice of a new conversation's agent: the requested one, or the equivalent SDK agent.

An SDK agent is a conversation whose loop is the Claude Agent SDK. Its legacy agent does the same work in our own loop,
and takes over if the SDK cannot run.

Holds: the choice is determined by the conversation's id and the configuration, so a repeated submission gets the same
agent. It is recorded in the log, so a later configuration does not affect running conversations.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from broker.contract.specs import AgentSpec, SdkSpec
from broker.runtime import BrokerSettings, find_agent_variables

AgentKind = Literal["legacy", "sdk"]

LEGACY_OF: Mapping[str, str] = {
    "CodeActAgentSDK": "CodeActAgent",
    "ReadOnlyAgentSDK": "ReadOnlyAgent",
    "BrowsingAgentSDK": "BrowsingAgent",
}
"""The legacy agent behind each SDK agent."""
SDK_OF: Mapping[str, str] = {legacy: sdk for sdk, legacy in LEGACY_OF.items()}
BUCKETS = 10_000


class AgentFactoryConfig(BaseModel):
    """The configuration of the choice; its fields have the names of OpenHands' configuration.

    Attributes:
        prefer_sdk_agents: replace an agent by its SDK agent, if it has one.
        percent: the percentage of conversations for which it is replaced.
        fallback_to_legacy: see `SdkSpec`.
        timeout_seconds: see `SdkSpec`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefer_sdk_agents: bool = False
    percent: float = Field(default=100.0, ge=0, le=100)
    fallback_to_legacy: bool = True
    timeout_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)

    @classmethod
    def from_env(cls) -> AgentFactoryConfig:
        """Return the configuration from environment variables.

        Raises:
            UsageError: a value is invalid.
        """
        return _parse_config(find_agent_variables())


@functools.lru_cache(maxsize=16)
def _parse_config(variables: frozenset[tuple[str, str]]) -> AgentFactoryConfig:
    settings = BrokerSettings.from_env(dict(variables))
    return AgentFactoryConfig(
        prefer_sdk_agents=settings.prefer_sdk_agents,
        percent=settings.sdk_agents_percent,
        fallback_to_legacy=settings.fallback_to_legacy,
        timeout_seconds=settings.sdk_timeout_seconds,
    )


def choose_agent(spec: AgentSpec, config: AgentFactoryConfig, conversation_id: str) -> AgentSpec:
    """Return the agent that a conversation starts with.

    An SDK agent that was requested by name is kept. Delegates are not replaced.
    """
    is_wanted = config.prefer_sdk_agents and rollout_share_of(conversation_id) < config.percent
    name = sdk_of(spec.name) if is_wanted else spec.name
    if not is_sdk_agent(name):
        return spec
    sdk = spec.sdk or SdkSpec(fallback_to_legacy=config.fallback_to_legacy, timeout_seconds=config.timeout_seconds)
    return spec.model_copy(update={"name": name, "sdk": sdk})


def rollout_share_of(conversation_id: str) -> float:
    """Map a conversation to a fixed number from 0 to 100. It is chosen if the number is below the percentage."""
    digest = hashlib.sha256(conversation_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS * 100 / BUCKETS


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
