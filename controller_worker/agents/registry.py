"""Which agents there are, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from broker.errors import UsageError
from broker.events import AgentSpec
from controller_worker.agents.agent import Agent
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.agents.readonly import ReadOnlyAgent

AGENTS: Mapping[str, Callable[[AgentSpec], Agent]] = {"CodeActAgent": CodeActAgent, "ReadOnlyAgent": ReadOnlyAgent}


def create_agent(spec: AgentSpec) -> Agent:
    """Make the agent a specification describes.

    Raises:
        UsageError: no agent has this name.
    """
    factory = AGENTS.get(spec.name)
    if factory is None:
        raise UsageError(
            f"There is no agent named {spec.name!r}.", remedy=f"Known agents: {', '.join(sorted(AGENTS))}."
        )
    return factory(spec)
