"""Helpers for tests of the archive: conversations that have ended, and the job that retires them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from broker.contract.agent_state import AgentState
from broker.contract.events import ConversationCreated, DelegateEnded, Event
from broker.runtime.settings import BrokerSettings
from broker.store.store import Store
from deckhands.client.client import Client
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.retiring import retire
from tests.unit.deckhands.sample_log import command, output, reply, state, user

LONG_TEXT = "a long line of a task\n" * 4_000


async def begin_ended(client: Client, name: str, *events: Event, **created: Any) -> None:
    """Create a conversation that has ended, with a text in its log that is too large for an entry."""
    log = [state("running"), command("make test"), output(4), reply(), *events, state("finished")]
    first = ConversationCreated(conversation_id=name, title=f"Title of {name}", **created)
    await client.log.create_from(first, [user(LONG_TEXT), *log], key=f"begin:{name}")


def delegate_ended(name: str, *, cost_usd: float = 0.0) -> DelegateEnded:
    return DelegateEnded(delegate_id=2, conversation_id=name, agent_state=AgentState.FINISHED, cost_usd=cost_usd)


def services(store: Store, place: Path | str, rules: str, folder: Path) -> JobServices:
    path = folder / "retention.toml"
    path.write_text(rules)
    return JobServices(store, BrokerSettings(archive=str(place), retention=str(path)))


async def retired(store: Store, place: Path | str, folder: Path, rules: str = '[[rule]]\nage = "0s"') -> dict[str, int]:
    return await retire(services(store, place, rules, folder))
