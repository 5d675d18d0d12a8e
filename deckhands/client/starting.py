"""Start a conversation: check its agent, workspace and tools, then create it with one append.

The agent of a held conversation gets messages, but takes no step until the conversation is resumed.

Holds: a conversation that cannot run here is refused before anything is stored, except its secrets and its file. A hold
is an event of the log, so every reader sees it, and it survives a killed process.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from broker.contract import (
    AgentFactoryConfig,
    AgentSpec,
    AgentState,
    ChangeAgentStateAction,
    ConversationCreated,
    Event,
    EventSource,
    MessageAction,
    Timing,
    choose_agent,
    find_model_names,
)
from broker.coordination import StoredFiles
from broker.log import Appended, Duplicate, EventLog, check_admission, find_creation
from broker.runtime import Acks, AdmissionRefused, UsageError, open_tracing, read_version
from broker.secrets import Secrets
from broker.store import (
    NO_REPLICA_REMEDY,
    Argument,
    Store,
    describe_missing_replica,
    describe_volatility,
    load_all_server_facts,
)
from broker.tools import ToolOffers
from deckhands.client.conversation_secrets import store_secrets
from deckhands.client.known_agents import RecentOffers, require_agent, require_models
from deckhands.client.named_directory import require_served
from deckhands.client.tasks.spec import UNNAMED_TASK, TaskSpec
from deckhands.client.tasks.tasks import derive_title

HELD_REASON = "It waits for a request to run."


def make_hold() -> ChangeAgentStateAction:
    """Return the request that holds a conversation. It must be the last event of the append with the messages."""
    return ChangeAgentStateAction(agent_state=AgentState.PAUSED, reason=HELD_REASON, source=EventSource.USER)


def is_hold(event: Event) -> bool:
    """Return whether an event is a request that holds the conversation."""
    return isinstance(event, ChangeAgentStateAction) and event.reason == HELD_REASON


OFFERS_LIMIT_SECONDS = 20.0
"""How long a tool may be missing because its worker is still starting."""
CURRENT = "current"
"""The value of `pinned_version` for the version of the process that starts the conversation."""
COPIED_FIELDS = tuple(TaskSpec.model_fields.keys() & ConversationCreated.model_fields.keys())
"""The fields of a task that the first event of its conversation has under the same name."""


async def start_conversation(
    log: EventLog,
    secrets: Secrets,
    spec: TaskSpec,
    conversation_id: str,
    *,
    key: str | None,
    upload: bytes | None = None,
    awaited: str = "",
    caller: Mapping[str, Argument] | None = None,
    offers_limit_seconds: float = OFFERS_LIMIT_SECONDS,
    recent: RecentOffers | None = None,
    role: str = "client",
    is_held: bool = False,
) -> Appended | Duplicate:
    """Start a conversation, in a span.

    Idempotent under the same id and key, even if agents or tools have changed since.

    Args:
        log: the log that masks secrets.
        upload: the file that the workspace's `UploadedSource` names.
        awaited: the caller to notify of its end. For this and `caller`, see `EventLog.create`.
        offers_limit_seconds: how long a tool may be missing.
        recent: see `require_models`.
        role: the role of this process, for the span.
        is_held: the agent takes no step until the conversation is resumed; the task `UNNAMED_TASK` then stands for no
            message.

    Raises:
        UsageError: the id is taken, or no running worker knows the agent, offers a model or one of the tools, or
            accepts the directory; or the store cannot confirm writes as the task demands.
        AdmissionRefused: the conversation may not start now; has the time to wait before a retry.
    """
    agent = spec.agent_spec()
    workspace = spec.workspace_spec()
    tenancy = spec.tenancy()
    store = log.store
    attributes = {"gen_ai.conversation.id": conversation_id, "gen_ai.agent.name": agent.name}
    with open_tracing(role).span("submit", spec.traceparent, kind="producer", attributes=attributes) as span:
        agent = choose_agent(agent, AgentFactoryConfig.from_env(), conversation_id)
        try:
            if upload is not None or spec.secrets:  # otherwise the append, which decides, is the first write
                await check_admission(store, conversation_id, spec.tenant)
            await _require_confirmations(store, spec.acks)
            agent = await find_runnable_agent(
                store, spec, agent, offers_limit_seconds=offers_limit_seconds, recent=recent
            )
        except (UsageError, AdmissionRefused):
            earlier = await find_creation(store, conversation_id, key) if key else None
            if earlier is None:
                raise
            return earlier  # it exists already, and its agent and tools may be gone by now
        timing = spec.timing()
        now = await _read_now(store, conversation_id, timing)
        is_unnamed = is_held and spec.task == UNNAMED_TASK
        same: dict[str, Any] = {name: getattr(spec, name) for name in COPIED_FIELDS}
        resolved = {
            "agent": agent,
            "workspace": workspace,
            "title": spec.title or ("" if is_unnamed else derive_title(spec.task)),
            "tenancy": tenancy,
            "labels": dict(spec.labels) or None,
            "not_before": timing.earliest_start(now),
            "expires": timing.latest_start(now),
            "traceparent": span.traceparent,
            "rollout": spec.rollout or None,
            "mcp_servers": {name: server for name, server in spec.mcp_servers.items() if server.url} or None,
            "skills": spec.skills or None,
            "pinned_version": read_version() if spec.pinned_version == CURRENT else spec.pinned_version,
        }
        created = ConversationCreated(conversation_id=conversation_id, source=EventSource.USER, **{**same, **resolved})
        message = MessageAction(content=spec.task, source=EventSource.USER, image_urls=spec.images or None)
        first: list[Event] = [*([] if is_unnamed else [message]), *([make_hold()] if is_held else [])]
        start = timing.to_start_window(now)

        async def create(shards: int) -> Appended | Duplicate:
            if upload is not None:
                await StoredFiles(store).keep(conversation_id, upload)
            await store_secrets(secrets, conversation_id, spec.secrets)
            return await log.create(created, first, key=key, awaited=awaited, caller=caller, start=start, shards=shards)

        return await store.repeat_if_raised(conversation_id, create)


async def find_runnable_agent(
    store: Store,
    spec: TaskSpec,
    agent: AgentSpec,
    *,
    offers_limit_seconds: float,
    recent: RecentOffers | None = None,
) -> AgentSpec:
    """Return the agent of a task with the tools that the task names.

    Args:
        agent: the agent that shall do the task.
        offers_limit_seconds: how long a tool may be missing.
        recent: see `require_models`.

    Raises:
        UsageError: workers are running, but none knows the agent, its policy or its analyzer, offers one of the models,
            or accepts the directory; or no worker has offered one of the tools.
    """
    await require_agent(store, agent)
    await require_models(store, find_model_names(agent), spec.tenant, recent=recent)
    await require_served(store, spec.workspace_spec())
    named = [f"{name}/{tool}" for name, server in spec.mcp_servers.items() if not server.url for tool in server.tools]
    if not (spec.tools or named):
        return agent
    offers = await ToolOffers(store).choose((*spec.tools, *named), limit_seconds=offers_limit_seconds)
    return agent.model_copy(update={"tools": (*agent.tools, *offers)})


async def _require_confirmations(store: Store, acks: Acks | None) -> None:
    """Refuse a task whose events the store cannot confirm now, because its workers would only wait.

    Raises:
        UsageError: the store has no replica, or no append-only file.
    """
    if acks in (None, "local"):
        return
    for facts in await load_all_server_facts(store.connection):
        if acks == "replica" and describe_missing_replica(facts):
            raise UsageError(
                "The task's `acks` is replica, but the store has no replica that could confirm its events.",
                remedy=NO_REPLICA_REMEDY,
            )
        if acks == "disk" and describe_volatility(facts):
            raise UsageError(
                "The task's `acks` is disk, but the store keeps no append-only file.",
                remedy="Set `appendonly yes` on the server, or leave the field out.",
            )


async def _read_now(store: Store, conversation_id: str, timing: Timing) -> datetime:
    """Return the store's time if a time of day must be compared, because this machine's clock may differ."""
    if timing.not_before is None and not isinstance(timing.expires, datetime):
        return store.clock.now()
    return await store.now((await store.locate(conversation_id)).shard)
