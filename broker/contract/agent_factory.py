"""Which agent a conversation begins with: as it was asked for, or the SDK agent that does the same work.

Holds: the choice follows from the conversation's id and the configuration, so a submission that is repeated gets the
same agent; it is written into the log, so that a later configuration changes no conversation under way.
"""

from __future__ import annotations

import functools
import hashlib

from pydantic import BaseModel, ConfigDict, Field

from broker.contract.agent_pairs import is_sdk_agent, sdk_of
from broker.contract.specs import AgentSpec, SdkSpec
from broker.runtime import BrokerSettings, agent_variables

BUCKETS = 10_000


class AgentFactoryConfig(BaseModel):
    """How agents are chosen; the names of the fields are those that configurations of OpenHands have.

    Attributes:
        prefer_sdk_agents: an agent that has an SDK agent is replaced by it.
        percent: of how many conversations.
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
        """Return what the variables of this program say.

        Raises:
            UsageError: a value cannot be used.
        """
        return _config_of(agent_variables())


@functools.lru_cache(maxsize=16)
def _config_of(variables: frozenset[tuple[str, str]]) -> AgentFactoryConfig:
    settings = BrokerSettings.from_env(dict(variables))
    return AgentFactoryConfig(
        prefer_sdk_agents=settings.prefer_sdk_agents,
        percent=settings.sdk_agents_percent,
        fallback_to_legacy=settings.fallback_to_legacy,
        timeout_seconds=settings.sdk_timeout_seconds,
    )


def chosen_agent(spec: AgentSpec, config: AgentFactoryConfig, conversation_id: str) -> AgentSpec:
    """Return the agent that a conversation begins with.

    An SDK agent that was asked for by name stays one; its delegates are what their names say.
    """
    is_wanted = config.prefer_sdk_agents and share_of(conversation_id) < config.percent
    name = sdk_of(spec.name) if is_wanted else spec.name
    if not is_sdk_agent(name):
        return spec
    sdk = spec.sdk or SdkSpec(fallback_to_legacy=config.fallback_to_legacy, timeout_seconds=config.timeout_seconds)
    return spec.model_copy(update={"name": name, "sdk": sdk})


def share_of(conversation_id: str) -> float:
    """Return where a conversation stands between 0 and 100, always the same: those below a percentage are chosen."""
    digest = hashlib.sha256(conversation_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS * 100 / BUCKETS
