"""Which agents there are, by name: the built-in ones, and those of installed packages by entry point.

Holds: a package cannot take the place of a built-in agent; its code is loaded only when a conversation names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata

from broker.errors import UsageError
from broker.events import AgentSpec
from controller_worker.agents.agent import Agent
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.agents.loc import LocAgent
from controller_worker.agents.readonly import ReadOnlyAgent

AGENTS: Mapping[str, Callable[[AgentSpec], Agent]] = {
    "CodeActAgent": CodeActAgent,
    "LocAgent": LocAgent,
    "ReadOnlyAgent": ReadOnlyAgent,
}
ENTRY_POINTS = "deckhands.agents"


def create_agent(spec: AgentSpec) -> Agent:
    """Make the agent a specification describes.

    Raises:
        UsageError: no agent has this name, or the package that brings it cannot be loaded.
    """
    factory = AGENTS.get(spec.name)
    if factory is not None:
        return factory(spec)
    points = metadata.entry_points(group=ENTRY_POINTS)
    if spec.name not in points.names:
        known = ", ".join(sorted({*AGENTS, *points.names}))
        raise UsageError(f"There is no agent named {spec.name!r}.", remedy=f"Known agents: {known}.")
    try:
        agent: Agent = points[spec.name].load()(spec)
    except Exception as error:
        raise UsageError(f"The agent {spec.name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return agent
