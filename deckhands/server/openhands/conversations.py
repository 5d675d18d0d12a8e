"""Conversations by the routes of OpenHands' agent server: create, list, read, and act on one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, BackgroundTasks, Path, Query
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from broker.contract import AgentState, ConversationCreated, SystemMessageAction, decode_any
from broker.coordination import accepts_directory, list_members, serves_pool
from broker.log import ConversationQuery, ConversationRow, Selection
from broker.runtime import DeckhandsError, UnknownConversation, UsageError
from deckhands.client import QUESTION_LABELS, Change, IsArchived, store_secrets
from deckhands.server.conversations import submit_task
from deckhands.server.dependencies import OFFERS_SECONDS, GatewayOf, Operator, Reader, Writer
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.models import format_cursor, parse_cursor
from deckhands.server.openhands import running
from deckhands.server.openhands.caller_workspaces import LABELS
from deckhands.server.openhands.conversation_ids import choose_id, find_conversation
from deckhands.server.openhands.parts import OperableId, Parts, ReadableId, WritableId
from deckhands.server.openhands.requests import (
    ChangedAnalyzer,
    ChangedConversation,
    ChangedModel,
    ChangedPolicy,
    ChangedProfile,
    ChangedSecrets,
    NewFork,
    Question,
    StartConversation,
    refuse,
    to_analyzer,
    to_secret_values,
)
from deckhands.server.openhands.states import STATES_OF, RunState
from deckhands.server.openhands.translated_logs import describe_row
from deckhands.server.problems import Problem

routes = APIRouter(prefix="/api/conversations", tags=["openhands-conversations"])
GREETING_SECONDS = 10.0
"""How long the answer to a creation waits for the agent's system message, behind which all messages stand."""
STOP_SECONDS = 30.0
"""How long a deletion waits until the agent has stopped."""
MAX_PAGE = 100
MAX_IDS = 99
MAX_SORTED = 10_000
"""How many conversations a listing in another order than the newest first may have."""
MAX_ROWS = 1_000
"""How many conversations a request looks at to find those with a status; a search continues on its next page."""
ROWS_AT_ONCE = 50
AT_ONCE = 8
LATEST = 16
"""How many of the last events a listing reads to see whether a conversation is held."""

Status = Literal["idle", "running", "paused", "waiting_for_confirmation", "finished", "error", "stuck"]
SortOrder = Literal["CREATED_AT", "UPDATED_AT", "CREATED_AT_DESC", "UPDATED_AT_DESC"]
INFO: dict[str, Any] = {
    "id": "019a4b0f-c3a1-4c1f-9c51-2c3d4e5f6071",
    "execution_status": "idle",
    "agent": {"kind": "Agent", "llm": {"model": "anthropic/claude-sonnet-4-5", "usage_id": "agent"}},
}
CONFLICT: dict[int | str, dict[str, Any]] = {409: {"description": "its state does not allow this"}}


class Success(BaseModel):
    """The request was carried out."""

    success: bool = Field(default=True, examples=[True])


class FinalResponse(BaseModel):
    """The last message of the agent; empty if there is none yet."""

    response: str = Field(examples=["There are three files."])


class RuntimeInfo(BaseModel):
    """Whether the conversation can be continued."""

    runtime_status: str = Field(default="available", examples=["available"])
    can_resume: bool = True
    runtime_error: str | None = None


SHOWN: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"example": INFO}}}}
CREATED: dict[int | str, dict[str, Any]] = {
    **SHOWN,
    201: {"description": "it was created", "content": {"application/json": {"example": INFO}}},
}
LISTED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"example": {"items": [INFO], "next_page_id": None}}}}
}


@routes.post("", response_class=JSONResponse, responses=CREATED, summary="Create a conversation")
async def create(
    gateway: GatewayOf, principal: Writer, _reader: Reader, parts: Parts, asked: StartConversation
) -> Response:
    """Create a conversation. With an `initial_message` the agent starts to work; otherwise it waits for `…/run`.

    If the conversation with this id exists, it is returned unchanged.
    """
    if asked.conversation_id is not None:
        with contextlib.suppress(UnknownConversation):
            known = await find_conversation(gateway, principal, str(asked.conversation_id))
            return JSONResponse((await parts.logs.load(gateway.client, known)).info())
    conversation_id = await choose_id(gateway, asked.conversation_id, "conversation_id")
    task, has_message = asked.to_task(await _choose_directory(gateway, asked.workspace.working_dir))
    key = sha256(f"openhands\n{principal.tenant}\n{conversation_id}".encode()).hexdigest()
    await submit_task(gateway, principal, task, key, conversation_id=conversation_id, is_held=not has_message)
    await _until_greeted(gateway, conversation_id)
    return JSONResponse((await parts.logs.load(gateway.client, conversation_id)).info(), 201)


async def _choose_directory(gateway: Gateway, path: str) -> str | None:
    """Return the directory if tool workers accept it; None for an empty workspace."""
    if not path.startswith("/"):
        return None
    members = await list_members(gateway.store)
    serving = [member for member in members if serves_pool(member, "bash") and "workspace_roots" in member.about]
    return path if any(accepts_directory(member, path) for member in serving) else None


async def _until_greeted(gateway: Gateway, conversation_id: str) -> None:
    """Wait for the system message, for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GREETING_SECONDS):
            events = gateway.follower.tail(conversation_id, is_lenient=True, is_endless=True)
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, SystemMessageAction):
                        return


@routes.get("/search", response_class=JSONResponse, responses=LISTED, summary="List conversations")
async def search(
    gateway: GatewayOf,
    principal: Reader,
    page_id: Annotated[str | None, Query(max_length=200, description="`next_page_id` of the previous page")] = None,
    *,
    limit: Annotated[int, Query(gt=0, le=MAX_PAGE)] = MAX_PAGE,
    status: Status | None = None,
    sort_order: SortOrder = "CREATED_AT_DESC",
    include_skills: bool = False,  # noqa: ARG001  (agents have none of their skills here)
) -> Response:
    """List the conversations of the key's tenant, newest first unless the request names another order."""
    query = _query(gateway, principal, status)
    found: list[dict[str, Any]] = []
    room = MAX_ROWS
    if sort_order == "CREATED_AT_DESC":
        try:
            place = parse_cursor(page_id or "")
        except UsageError:
            raise _make_page_problem() from None
        while len(found) < limit and room > 0:
            rows, following = await query.load_page(place, limit=min(limit, ROWS_AT_ONCE))
            used = await _fill(gateway, found, rows, status, limit)
            is_cut = used < len(rows)
            place = (
                (round(rows[used - 1].created.timestamp() * 1_000), rows[used - 1].conversation_id)
                if is_cut
                else following
            )
            room -= max(len(rows), 1)
            if place is None:
                break
        return _render_page(found, format_cursor(place))
    rows = await _load_sorted(query, sort_order)
    start = _parse_start(page_id)
    while len(found) < limit and start < len(rows) and room > 0:
        some = rows[start : start + min(limit, ROWS_AT_ONCE)]
        start += await _fill(gateway, found, some, status, limit)
        room -= len(some)
    return _render_page(found, str(start) if start < len(rows) else None)


async def _fill(
    gateway: Gateway, found: list[dict[str, Any]], rows: Sequence[ConversationRow], status: Status | None, limit: int
) -> int:
    """Add descriptions of conversations until there are enough, and return how many of the rows were used."""
    for used, info in enumerate(await _describe(gateway, rows, status), 1):
        if info is not None:
            found.append(info)
            if len(found) == limit:
                return used
    return len(rows)


def _parse_start(page_id: str | None) -> int:
    if page_id is None:
        return 0
    if not (page_id.isascii() and page_id.isdigit()) or int(page_id) > MAX_SORTED:
        raise _make_page_problem()
    return int(page_id)


def _make_page_problem() -> Problem:
    return Problem(400, "unknown_page", "page_id: there is no such page.", remedy="Start without page_id.")


async def _load_sorted(query: ConversationQuery, order: SortOrder) -> list[ConversationRow]:
    rows: list[ConversationRow] = []
    async for page in query.iterate_pages():
        rows += page
        if len(rows) > MAX_SORTED:
            raise UsageError(
                f"There are more than {MAX_SORTED:,} conversations to sort.", remedy="List them by CREATED_AT_DESC."
            )
    by_update = order.startswith("UPDATED_AT")
    rows.sort(
        key=lambda row: (row.updated if by_update else row.created, row.conversation_id),
        reverse=order.endswith("_DESC"),
    )
    return rows


def _render_page(found: Sequence[dict[str, Any]], next_page_id: str | None) -> Response:
    return JSONResponse({"items": list(found), "next_page_id": next_page_id})


def _query(gateway: Gateway, principal: Principal, status: Status | None) -> ConversationQuery:
    tenant = None if principal.is_for_all_tenants else principal.tenant
    states = frozenset(state.value for state in STATES_OF[status]) if status is not None else frozenset()
    return ConversationQuery(gateway.store, Selection(tenant=tenant, states=states))


def _is_listed(row: ConversationRow) -> bool:
    """Return whether a row is a conversation, and neither the workspace of a key nor a fork that answers a question."""
    hidden = (LABELS, QUESTION_LABELS)
    return not any(labels.items() <= row.labels.items() for labels in hidden)


async def _describe(
    gateway: Gateway, rows: Sequence[ConversationRow], status: Status | None
) -> list[dict[str, Any] | None]:
    """Return descriptions of the listed conversations with a status, from their first and last events.

    None for each that is gone, damaged, or in another status.
    """
    room = asyncio.Semaphore(AT_ONCE)

    async def load(row: ConversationRow) -> dict[str, Any] | None:
        if not _is_listed(row) or row.state not in set(AgentState):
            return None
        log, name, after = gateway.client.log, row.conversation_id, max(row.last_event_id - LATEST, 1)
        try:
            async with room:
                first = await log.read(name, after=0, until=1, decode=decode_any)
                latest = await log.read(name, after=after, until=after + LATEST, decode=decode_any)
        except DeckhandsError as error:
            if error.retryable:
                raise
            return None
        if not first or not isinstance(first[0], ConversationCreated):
            return None
        run = RunState.of_row(row.state, latest)
        return describe_row(row, first[0], run) if status in (None, run.execution_status) else None

    return await asyncio.gather(*map(load, rows))


@routes.get("/count", summary="Count conversations")
async def count(gateway: GatewayOf, principal: Reader, status: Status | None = None) -> int:
    """Count the conversations of the key's tenant."""
    query = _query(gateway, principal, status)
    number = described = 0
    async for rows in query.iterate_pages():
        if status is None:
            number += sum(map(_is_listed, rows))
            continue
        described += len(rows)
        if described > MAX_ROWS:
            raise UsageError(
                f"More than {MAX_ROWS:,} conversations may have the status {status}.",
                remedy="Search for them by pages.",
            )
        number += sum(info is not None for info in await _describe(gateway, rows, status))
    return number


@routes.get("", response_class=JSONResponse, summary="Show several conversations")
async def batch(
    gateway: GatewayOf,
    principal: Reader,
    parts: Parts,
    ids: Annotated[list[UUID], Query(max_length=MAX_IDS)],
) -> Response:
    """Show conversations by their ids; null for an unknown id."""
    found: list[dict[str, Any] | None] = []
    for uuid in ids:
        try:
            known = await find_conversation(gateway, principal, str(uuid))
            found.append((await parts.logs.load(gateway.client, known)).info())
        except UnknownConversation:
            found.append(None)
    return JSONResponse(found)


@routes.get("/{conversation_id}", response_class=JSONResponse, responses=SHOWN, summary="Show a conversation")
async def show(gateway: GatewayOf, parts: Parts, conversation_id: ReadableId) -> Response:
    """Show a conversation: its state, its agent, its costs."""
    return JSONResponse((await parts.logs.load(gateway.client, conversation_id)).info())


@routes.get("/{conversation_id}/runtime", summary="Show whether a conversation can be continued")
async def runtime(conversation_id: ReadableId) -> RuntimeInfo:  # noqa: ARG001  (it is known)
    """Show the availability of a conversation. Every known conversation is available on a cluster."""
    return RuntimeInfo()


@routes.get("/{conversation_id}/agent_final_response", summary="Show the agent's last message")
async def final_response(gateway: GatewayOf, conversation_id: ReadableId) -> FinalResponse:
    """Show the message of the agent's finish, or else its last message."""
    return FinalResponse(response=(await gateway.client.summary(conversation_id)).message)


@routes.post("/{conversation_id}/run", responses=CONFLICT, summary="Let the agent work")
async def run(
    gateway: GatewayOf, principal: Operator, parts: Parts, conversation_id: OperableId, after: BackgroundTasks
) -> Success:
    """Let the agent work. An action that awaits confirmation is confirmed."""
    if not await running.run(gateway, parts, principal, conversation_id):
        after.add_task(parts.nudge, conversation_id)  # a client that has its answer then waits for the state
    return Success()


@routes.post("/{conversation_id}/pause", summary="Pause a conversation")
async def pause(
    gateway: GatewayOf, principal: Operator, parts: Parts, conversation_id: OperableId, after: BackgroundTasks
) -> Success:
    """Pause: running work finishes, and nothing new starts."""
    if not await running.pause(gateway, parts, principal, conversation_id):
        after.add_task(parts.nudge, conversation_id)
    return Success()


@routes.post("/{conversation_id}/interrupt", summary="Interrupt a conversation")
async def interrupt(
    gateway: GatewayOf, principal: Operator, parts: Parts, conversation_id: OperableId, after: BackgroundTasks
) -> Success:
    """Pause at once: the command is killed, and the model's reply is discarded."""
    if not await running.pause(gateway, parts, principal, conversation_id, is_interrupt=True):
        after.add_task(parts.nudge, conversation_id)
    return Success()


@routes.delete("/{conversation_id}", responses=CONFLICT, summary="Delete a conversation")
async def delete(gateway: GatewayOf, principal: Operator, conversation_id: OperableId) -> Success:
    """Stop a conversation, and delete it with its delegates."""
    await gateway.record(principal, "delete", conversation_id, "OpenHands' API")
    if not await gateway.client.is_archived(conversation_id):
        await gateway.client_for(principal, "cancel", "").cancel(conversation_id, wait_seconds=STOP_SECONDS)
    try:
        await gateway.client.delete(conversation_id)
    except UnknownConversation:
        raise
    except UsageError as error:
        raise Problem(409, "conflict", error.message, remedy=error.remedy) from error
    return Success()


@routes.patch("/{conversation_id}", summary="Change a conversation's title or tags")
async def update(
    gateway: GatewayOf, principal: Writer, conversation_id: WritableId, new: ChangedConversation
) -> Success:
    """Change the title, the tags, or both."""
    if new.title is not None or new.tags is not None:
        await _change(gateway, principal, conversation_id, Change(title=new.title, labels=new.tags))
    return Success()


async def _change(
    gateway: Gateway, principal: Principal, conversation_id: str, change: Change, *, model: str | None = None
) -> None:
    if change.has_parts:
        await change.event(gateway.store, offers_limit_seconds=OFFERS_SECONDS)
    await gateway.client_for(principal, "change", "").change(conversation_id, change, model=model)


@routes.post("/{conversation_id}/secrets", summary="Set secrets")
async def set_secrets(
    gateway: GatewayOf, principal: Writer, conversation_id: WritableId, new: ChangedSecrets
) -> Success:
    """Add secrets, or replace those of the same names. No log contains their values."""
    values = to_secret_values(new.secrets)
    if await gateway.client.is_archived(conversation_id):
        raise IsArchived(conversation_id)
    await gateway.record(principal, "secrets", conversation_id, ", ".join(sorted(values))[:500])
    await store_secrets(gateway.client.secrets, conversation_id, values)
    return Success()


@routes.post("/{conversation_id}/confirmation_policy", summary="Set the confirmation policy")
async def set_policy(
    gateway: GatewayOf, principal: Writer, parts: Parts, conversation_id: WritableId, new: ChangedPolicy
) -> Success:
    """Set which actions a user must confirm, from the next step on."""
    known = (await parts.logs.load(gateway.client, conversation_id)).run.policy
    await _change(gateway, principal, conversation_id, Change(confirmation=new.policy.to_policy(known.analyzer)))
    return Success()


@routes.post("/{conversation_id}/security_analyzer", summary="Set the risk analyzer")
async def set_analyzer(
    gateway: GatewayOf, principal: Writer, conversation_id: WritableId, new: ChangedAnalyzer
) -> Success:
    """Set the risk analyzer for actions, from the next step on."""
    await _change(gateway, principal, conversation_id, Change(analyzer=to_analyzer(new.security_analyzer)))
    return Success()


@routes.post("/{conversation_id}/switch_llm", summary="Continue with another model")
async def switch_llm(gateway: GatewayOf, principal: Writer, conversation_id: WritableId, new: ChangedModel) -> Success:
    """Continue with another model of the operator's table. A key or an address that is sent is dropped."""
    await _change(gateway, principal, conversation_id, Change(), model=new.llm.model)
    return Success()


@routes.post("/{conversation_id}/switch_profile", summary="Continue with another model by its name")
async def switch_profile(
    gateway: GatewayOf, principal: Writer, conversation_id: WritableId, new: ChangedProfile
) -> Success:
    """Continue with another model of the operator's table, which stands for OpenHands' profiles."""
    await _change(gateway, principal, conversation_id, Change(), model=new.profile_name)
    return Success()


@routes.post("/{conversation_id}/condense", responses=CONFLICT, summary="Shorten the history")
async def condense(gateway: GatewayOf, principal: Writer, parts: Parts, conversation_id: WritableId) -> Success:
    """Let the agent's condenser shorten the history before the next step."""
    if not (await parts.logs.load(gateway.client, conversation_id)).run.agent.condenser.handles_requests:
        raise Problem(409, "no_condenser", "The agent has no condenser that takes requests.")
    await gateway.client_for(principal, "condense", "").condense(conversation_id)
    return Success()


@routes.post("/{conversation_id}/ask_agent", summary="Ask the agent beside its work")
async def ask_agent(
    gateway: GatewayOf, principal: Writer, _reader: Reader, conversation_id: WritableId, asked: Question
) -> FinalResponse:
    """Ask the agent a question. A copy of the conversation without tools answers, and is deleted."""
    return FinalResponse(response=await running.ask(gateway, principal, conversation_id, asked.question))


@routes.post(
    "/{conversation_id}/fork", status_code=201, response_class=JSONResponse, responses=CONFLICT, summary="Fork"
)
async def fork(
    gateway: GatewayOf, principal: Writer, _reader: Reader, parts: Parts, conversation_id: WritableId, *, new: NewFork
) -> Response:
    """Create a conversation with a copy of this one's events. It waits for `…/run`; its costs start at zero."""
    if not new.reset_metrics:
        raise refuse("reset_metrics: the costs of a fork start at zero on a cluster.", "Leave it out.")
    at = None
    if new.from_event_id is not None:
        log = await parts.logs.load(gateway.client, conversation_id, needs_events=True)
        if new.from_event_id not in log.places:
            raise Problem(404, "unknown_event", "from_event_id: the conversation has no such event.")
        at = log.sources[log.places[new.from_event_id]]
    fork_id = await choose_id(gateway, new.id, "id")
    await gateway.record(principal, "fork", conversation_id, "")
    await gateway.client.fork(
        conversation_id, at=at, title=new.title or "", labels=new.tags, fork_id=fork_id, is_held=True
    )
    return JSONResponse((await parts.logs.load(gateway.client, fork_id)).info(), 201)


ELSEWHERE = {
    "goal": "goals of OpenHands; see docs/long-work.md#goals-a-finish-that-is-checked for a goal of a task",
    "goal/stop": "goals of OpenHands",
    "goal/resume": "goals of OpenHands",
    "load_plugin": "plugins: this server loads no code of its clients",
    "switch_acp_model": "switches of the model inside another program; create a conversation with the other one",
    "children": "children that a client starts; agents start their own delegates",
    "navigate": "branches inside a conversation; fork it instead",
    "runtime/reprovision": "runtimes that a client restarts; workers take over by themselves",
}
"""What has no meaning on a cluster, by the last parts of the path."""


@routes.post("/{conversation_id}/{action:path}", responses={501: {"description": "a cluster does not have it"}})
async def refuse_action(conversation_id: WritableId, action: Annotated[str, Path(max_length=100)]) -> Success:  # noqa: ARG001  (it is known)
    """Refuse an action of OpenHands that has no meaning on a cluster."""
    if action not in ELSEWHERE:
        raise Problem(404, "not_found", "There is no such action.")
    raise refuse(f"A cluster has no {ELSEWHERE[action]}.")
