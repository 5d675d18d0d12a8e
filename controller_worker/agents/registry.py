"""The agents by name: the built-in ones, and those of installed packages by entry point.

Holds: a package cannot replace a built-in agent. Its code is loaded only when a conversation names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import controller_worker.agents
from broker.contract import ACP_AGENT, ACP_PREFIX, AgentSpec
from broker.runtime import UsageError, find_classes
from broker.tools import entry_points
from controller_worker.agents.agent import Agent
from controller_worker.security import check_plugins

AGENTS: Mapping[str, Callable[[AgentSpec], Agent]] = {
    found.__name__: found
    for found in find_classes(controller_worker.agents)
    if found.__name__.endswith(("Agent", "AgentSDK")) and found is not Agent
}
"""The classes of this package with a name ending in `Agent` or `AgentSDK`."""
ENTRY_POINTS = "deckhands.agents"
AGENTS_KEPT = 128

_kept: dict[int, tuple[AgentSpec, Agent]] = {}
"""Built-in agents by the identity of their specification, which is kept too, so that no other one gets its identity."""


def create_agent(spec: AgentSpec) -> Agent:
    """Return the agent of a specification.

    A built-in agent has no state, so conversations with the same specification share it.

    Raises:
        UsageError: no agent has this name, or its package, confirmation policy or risk analyzer cannot be loaded.
    """
    if (kept := _kept.get(id(spec))) is not None:
        return kept[1]
    if spec.plan is not None:
        check_agent(spec.plan.executor)
    check_agent(spec.name)
    check_plugins(spec.confirmation)
    factory = AGENTS.get(spec.name)
    if factory is not None:
        if len(_kept) >= AGENTS_KEPT:
            _kept.clear()
        _kept[id(spec)] = spec, factory(spec)
        return _kept[id(spec)][1]
    try:
        agent: Agent = entry_points(ENTRY_POINTS)[spec.name].load()(spec)
    except Exception as error:
        raise UsageError(f"The agent {spec.name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return agent


def list_agents() -> list[str]:
    """Return the names of all agents, in order."""
    return sorted({*AGENTS, *entry_points(ENTRY_POINTS).names})


def check_agent(name: str, *, besides: Collection[str] = ()) -> None:
    """Check that an agent of this name exists.

    Args:
        besides: other valid names, for the error.

    Raises:
        UsageError: there is none.
    """
    known = list_agents()
    if name not in known:
        others = [agent for agent in known if agent not in besides and agent != ACP_AGENT]
        named = ", ".join((*sorted(besides), *others, f"{ACP_PREFIX}COMMAND"))
        raise UsageError(f"There is no agent named {name!r}.", remedy=f"Known agents: {named}.")
