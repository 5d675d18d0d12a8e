"""How a conversation begins: what its agent, workspace and tools need is checked first, and then one append begins it.

Holds: what cannot work here is refused before anything of it is stored, but for its secrets and its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from broker.contract.actions import MessageAction
from broker.contract.agent_factory import AgentFactoryConfig, chosen_agent
from broker.contract.events import AgentSpec, ConversationCreated, EventSource, Limits, WorkspaceSpec
from broker.contract.offered_models import named_models
from broker.contract.specs import Tenancy
from broker.contract.timing import WHENEVER, DoubleTexting, Timing
from broker.coordination.stored_files import StoredFiles
from broker.log.admission import begun_before, check
from broker.log.event_log import Appended, Duplicate, EventLog
from broker.runtime.errors import AdmissionRefused, UsageError
from broker.runtime.tracing import tracing
from broker.secrets.secrets import Secrets
from broker.store.store import Store
from broker.tools.tool_offers import ToolOffers
from deckhands.client.known_agents import require_agent, require_models
from deckhands.client.named_directory import require_served
from deckhands.client.secret_keeping import keep_secrets
from deckhands.client.tasks import inputs
from deckhands.client.tasks.requests import TaskRequest
from deckhands.client.tasks.tasks import title_of

OFFERS_LIMIT_SECONDS = 20.0
"""How long a tool may be missing because its worker is still starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a conversation begins with.

    Attributes:
        upload: the file that the workspace's `UploadedSource` names.
        image_urls: pictures that belong to the task.
        tools: keys or patterns of tools that tool workers offer.
        traceparent: the span that the submission belongs to.
    """

    task: str
    agent: AgentSpec
    workspace: WorkspaceSpec
    limits: Limits
    upload: bytes | None = None
    image_urls: tuple[str, ...] | None = None
    tools: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    headless: bool = True
    tenancy: Tenancy | None = None
    title: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    timing: Timing = WHENEVER
    double_texting: DoubleTexting | None = None
    traceparent: str | None = None


def beginning_of(request: TaskRequest) -> Beginning:
    """Return what a request asks for.

    Raises:
        UsageError: the schema of its output cannot be used.
    """
    return Beginning(
        task=request.task,
        agent=inputs.with_output(inputs.agent_in(request.agent, request.model), request.output),
        workspace=request.place(),
        limits=request.limits,
        tools=request.tools,
        secrets=request.secrets,
        headless=request.headless,
        tenancy=request.tenancy(),
        title=request.title,
        labels=request.labels,
        timing=request.timing(),
        double_texting=request.double_texting,
        traceparent=request.traceparent,
    )


async def begin(
    log: EventLog,
    secrets: Secrets,
    what: Beginning,
    conversation_id: str,
    *,
    key: str | None,
    awaited: str = "",
    offers_limit_seconds: float = OFFERS_LIMIT_SECONDS,
    role: str = "client",
) -> Appended | Duplicate:
    """Begin a conversation in a span of its submission, see `_begin`. Idempotent under the same id and key.

    Args:
        role: what this process is, for the span.
    """
    attributes = {"gen_ai.conversation.id": conversation_id, "gen_ai.agent.name": what.agent.name}
    with tracing(role).span("submit", what.traceparent, kind="producer", attributes=attributes) as span:
        traced = replace(what, traceparent=span.traceparent)
        return await _begin(
            log, secrets, traced, conversation_id, key=key, awaited=awaited, offers_limit_seconds=offers_limit_seconds
        )


async def _begin(
    log: EventLog,
    secrets: Secrets,
    what: Beginning,
    conversation_id: str,
    *,
    key: str | None,
    awaited: str,
    offers_limit_seconds: float,
) -> Appended | Duplicate:
    """Begin a conversation. Idempotent under the same id and key, whatever has changed since.

    Args:
        log: the one that masks secrets.
        awaited: who waits for its end, see `EventLog.create`.
        offers_limit_seconds: how long a tool may be missing.

    Raises:
        UsageError: the id is taken, or no running worker knows the agent, offers a model or one of the tools, or takes
            the directory.
        AdmissionRefused: nothing may begin now; says when to try again.
    """
    agent, store = chosen_agent(what.agent, AgentFactoryConfig.from_env(), conversation_id), log.store
    try:
        tenant = what.tenancy.tenant if what.tenancy else ""
        await check(store, conversation_id, tenant)
        await require_agent(store, agent)
        await require_models(store, named_models(agent), tenant)
        await require_served(store, what.workspace)
        if what.tools:
            offers = await ToolOffers(store).choose(what.tools, limit_seconds=offers_limit_seconds)
            agent = agent.model_copy(update={"tools": (*agent.tools, *offers)})
    except (UsageError, AdmissionRefused):
        earlier = await begun_before(store, conversation_id, key) if key else None
        if earlier is None:
            raise
        return earlier  # it has begun, and what it asked for need not be there any more
    if what.upload is not None:
        await StoredFiles(store).keep(conversation_id, what.upload)
    now = await _now(store, conversation_id, what.timing)
    created = ConversationCreated(
        conversation_id=conversation_id,
        source=EventSource.USER,
        agent=agent,
        workspace=what.workspace,
        limits=what.limits,
        headless=what.headless,
        title=what.title or title_of(what.task),
        tenancy=what.tenancy,
        labels=dict(what.labels) or None,
        not_before=what.timing.begins(now),
        expires=what.timing.ends(now),
        double_texting=what.double_texting,
        traceparent=what.traceparent,
    )
    message = MessageAction(content=what.task, source=EventSource.USER, image_urls=what.image_urls)
    await keep_secrets(secrets, conversation_id, what.secrets)
    return await log.create(created, [message], key=key, awaited=awaited, start=what.timing.start(now))


async def _now(store: Store, conversation_id: str, timing: Timing) -> datetime:
    """Return what the time is: where a time of day has to be compared with it, by the store and not by this machine."""
    if timing.not_before is None and not isinstance(timing.expires, datetime):
        return store.clock.now()
    return await store.now(store.keys(conversation_id).shard)
