"""Choose an SDK agent for a headless run, by the names in configurations of OpenHands.

Holds: our variables override the keys of `[agent]`; an agent that is requested as an SDK agent stays one.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.contract import AgentSpec, SdkSpec, sdk_of
from broker.runtime import PREFIX, USE_SDK_AGENTS, BrokerSettings, UsageError, find_agent_variables
from deckhands.interop.headless.config_file import Config

VARIABLES_OF: Mapping[str, tuple[str, ...]] = {
    "prefer_sdk_agents": (f"{PREFIX}PREFER_SDK_AGENTS", USE_SDK_AGENTS),
    "fallback_to_legacy": (f"{PREFIX}FALLBACK_TO_LEGACY",),
    "timeout_seconds": (f"{PREFIX}SDK_TIMEOUT_SECONDS",),
}
"""By key of `[agent]`; these variables apply as for every submission (`broker.contract.agent_factory`)."""


def with_sdk_choice(agent: AgentSpec, config: Config, environment: Mapping[str, str]) -> AgentSpec:
    """Return the agent, or the SDK agent that does the same work, according to the configured loop.

    Raises:
        UsageError: a value cannot be used.
    """
    said = {name for name, _ in find_agent_variables(environment)}
    chosen = {
        key: value
        for key, variables in VARIABLES_OF.items()
        if said.isdisjoint(variables) and (value := config.get("agent", key)) is not None
    }
    if not chosen:
        return agent
    settings = BrokerSettings.from_env(environment)
    seconds = chosen.get("timeout_seconds", settings.sdk_timeout_seconds)
    if not 0 < seconds < float("inf"):
        raise UsageError(f"[agent] timeout_seconds is {seconds}.", remedy="Use a number above 0.")
    fallback = chosen.get("fallback_to_legacy", settings.fallback_to_legacy)
    sdk = SdkSpec(fallback_to_legacy=fallback, timeout_seconds=seconds)
    name = sdk_of(agent.name) if chosen.get("prefer_sdk_agents") else agent.name
    return agent.model_copy(update={"name": name, "sdk": sdk})
