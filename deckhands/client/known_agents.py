"""List the available agents: those installed here with the controller worker's code, and those of a running cluster.

Does not: import an agent; the names of built-in ones are read from the source text of their modules.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from broker.contract import (
    ACP_AGENT,
    ACP_PREFIX,
    ANALYZERS,
    BUILT_IN_ANALYZERS,
    BUILT_IN_MODES,
    OFFERED_MODELS,
    POLICIES,
    UNPRICED_MODELS,
    AgentSpec,
    ConfirmationPolicy,
    ModelNotOffered,
    ModelTable,
    check_offered,
)
from broker.coordination import ClusterMember, list_members
from broker.runtime import UsageError
from broker.store import Store
from broker.tools import entry_points

ENTRY_POINTS = "deckhands.agents"
FRESH_SECONDS = 1.0
UNIVERSAL_AGENT = "CodeActAgent"
"""Known to every controller worker, so it needs no check."""


def list_local_agents() -> frozenset[str]:
    """Return the names of the agents that are installed here; empty if no controller worker is installed."""
    found = find_spec("controller_worker.agents")
    places = (found.submodule_search_locations or []) if found is not None else []
    texts = [file.read_text("utf-8") for place in places for file in Path(place).glob("*.py")]
    built_in = {name for text in texts for name in re.findall(r"^class (\w+Agent(?:SDK)?)\b", text, re.MULTILINE)}
    return frozenset(built_in | set(entry_points(ENTRY_POINTS).names)) if built_in else frozenset()


def check_acp_command(agent: str) -> None:
    """Refuse `acp:COMMAND` without a usable command.

    Raises:
        UsageError: the command is missing, too long, or has control characters.
    """
    try:
        AgentSpec(name=agent)
    except ValidationError as error:
        raise UsageError(
            f"The agent {ascii(agent)[:200]} has no command that could be run.",
            remedy="Write acp: and one line for bash that starts an ACP agent, such as acp:claude-agent-acp.",
        ) from error


def require_local_agent(agent: AgentSpec) -> None:
    """Refuse an agent that a controller worker of this machine would not know.

    Raises:
        UsageError: there is no such agent, policy or analyzer; the text lists the existing ones.
    """
    if known := list_local_agents():
        _require(agent, known)
        installed = {f"{group}:{name}" for group in (POLICIES, ANALYZERS) for name in entry_points(group).names}
        _require_plugins(agent.confirmation.plugins, installed)


async def require_agent(store: Store, agent: AgentSpec) -> None:
    """Refuse an agent that none of the running controller workers knows.

    Raises:
        UsageError: controller workers are running, but none knows the agent, its policy or its analyzer; the text lists
            the known ones.
    """
    await require_plugins(store, agent.confirmation)
    if _matches(agent) == {UNIVERSAL_AGENT}:
        return
    controllers = [m for m in await list_members(store) if m.role == "controller" and m.left_seconds > 0]
    if controllers and all("agents" in member.about for member in controllers):  # older workers do not report it
        _require(agent, {name for member in controllers for name in member.about["agents"].split(",")})


async def require_plugins(store: Store, policy: ConfirmationPolicy | None, *, analyzer: str | None = None) -> None:
    """Refuse a policy or an analyzer that none of the running controller workers has.

    Raises:
        UsageError: controller workers are running, but none has it; the text lists the available ones.
    """
    wanted = list(policy.plugins) if policy is not None else []
    wanted += [(ANALYZERS, analyzer)] if analyzer is not None and analyzer not in BUILT_IN_ANALYZERS else []
    if not wanted:
        return
    controllers = [m for m in await list_members(store) if m.role == "controller" and m.left_seconds > 0]
    # older workers do not report it
    if not controllers or not all("plugins" in member.about for member in controllers):
        return
    _require_plugins(wanted, {name for member in controllers for name in member.about["plugins"].split(",")})


def _require_plugins(wanted: Iterable[tuple[str, str]], known: Collection[str]) -> None:
    for group, name in wanted:
        if f"{group}:{name}" not in known:
            there = sorted(one.partition(":")[2] for one in known if one.startswith(f"{group}:"))
            built_in = BUILT_IN_ANALYZERS if group == ANALYZERS else BUILT_IN_MODES
            what = "risk analyzer" if group == ANALYZERS else "confirmation policy"
            raise UsageError(
                f"There is no {what} named {ascii(name)[:100]}.", remedy=f"Known: {', '.join((*built_in, *there))}."
            )


class RecentOffers:
    """The models that the running controller workers offer, cached for `FRESH_SECONDS`.

    A process that starts many conversations need not ask the store for each.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: Sequence[ModelTable] = ()
        self._read_at = -math.inf
        self._reading = asyncio.Lock()

    async def load(self) -> Sequence[ModelTable]:
        """Return the offer of each worker; empty if no worker is running, or one does not report its offer."""
        async with self._reading:
            now = self._store.clock.monotonic()
            if now - self._read_at > FRESH_SECONDS:
                self._tables, self._read_at = await load_offers(self._store), now
            return self._tables


async def load_offers(store: Store) -> Sequence[ModelTable]:
    """Return the offer of each running controller worker; empty if there is none, or one does not report its offer."""
    controllers = [m for m in await list_members(store) if m.role == "controller" and m.left_seconds > 0]
    known = [table for member in controllers if (table := parse_offers(member)) is not None]
    return known if len(known) == len(controllers) else ()  # older workers do not report it


async def require_models(
    store: Store, named: Iterable[str], tenant: str, *, recent: RecentOffers | None = None
) -> None:
    """Refuse a model that none of the running controller workers offers to a tenant.

    Args:
        tenant: the tenant of the conversation; empty if it has none.
        recent: the recent offers. A model among them is accepted without asking the store.

    Raises:
        ModelNotOffered: controller workers are running, but none offers it; the text lists the offered models.
    """
    names = list(named)
    if not names:
        return
    if recent is not None and (known := await recent.load()):
        with suppress(ModelNotOffered):
            check_offered(names, tenant, known)
            return
    if known := await load_offers(store):
        check_offered(names, tenant, known)


async def find_unpriced_models(store: Store, names: Iterable[str]) -> list[str]:
    """Return the models whose price is unknown to a running controller worker.

    Does not: know the prices of models that workers offer only by a pattern.
    """
    unpriced = {
        name
        for member in await list_members(store)
        if member.role == "controller" and member.left_seconds > 0
        for name in member.about.get(UNPRICED_MODELS, "").split("\n")
    }
    return [name for name in names if name in unpriced]


def parse_offers(member: ClusterMember) -> ModelTable | None:
    """Return the offers of a controller worker; None if it does not report them."""
    return ModelTable.parse(member.about.get(OFFERED_MODELS, ""))


def _require(agent: AgentSpec, known: Collection[str]) -> None:
    for name in sorted(_matches(agent) - set(known)):
        named = ", ".join(sorted({*known, f"{ACP_PREFIX}COMMAND"} - {ACP_AGENT}))
        raise UsageError(f"There is no agent named {ascii(name)[:100]}.", remedy=f"Known agents: {named}.")


def _matches(agent: AgentSpec) -> set[str]:
    named = {agent.name} if agent.plan is None else {agent.name, agent.plan.executor}
    return named.union(*(_matches(delegate) for delegate in agent.delegates.values()))
