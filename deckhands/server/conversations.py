"""Conversations: create, list, read, and act on one."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import Response

from broker.contract import AgentState, ModelNotOffered
from broker.coordination import NoWorkspace
from broker.log import (
    SCHEDULED,
    WAITING,
    ConversationQuery,
    ConversationRow,
    IndexPosition,
    LiveText,
    Selection,
    fold_status,
    has_appended,
)
from broker.runtime import DeckhandsError, UnknownConversation, UsageError, is_conversation_id, parse_traceparent
from broker.tools import ToolOffers
from deckhands.client import (
    Client,
    Summary,
    TaskSpec,
    derive_task_conversation_id,
    load_quoted_texts,
    summarize,
    to_conversation_id,
    to_labels,
)
from deckhands.server.dependencies import (
    MAX_EVENT_ID,
    OFFERS_SECONDS,
    ConversationId,
    GatewayOf,
    IdempotencyKey,
    Operator,
    Reader,
    Reason,
    ReasonQuery,
    Writer,
    etag_of,
    fingerprint,
    run_once,
    scoped_key,
)
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.models import (
    ConfirmationAnswer,
    ConversationPage,
    ConversationResult,
    CreatedConversation,
    Done,
    Fork,
    NewConversation,
    NewMessage,
    Rejection,
    Resumption,
    conversation_json,
    format_cursor,
    parse_cursor,
)
from deckhands.server.problems import Problem, status_of_error

routes = APIRouter(prefix="/conversations", tags=["conversations"])
MAX_IDS = 100
STATES = frozenset({*(state.value for state in AgentState), WAITING, SCHEDULED})

Act = Callable[[Client], Awaitable[Any]]


def _limit_to_tenant(principal: Principal, request: TaskSpec) -> TaskSpec:
    """Return a task, limited to the key's tenant.

    Raises:
        UsageError: the task names another tenant, or an idempotency key besides the header.
    """
    if request.idempotency_key is not None:
        raise UsageError("idempotency_key: the header Idempotency-Key is the key here.", remedy="Leave it out.")
    if principal.is_for_all_tenants:
        return request
    if request.tenant not in ("", principal.tenant):
        raise UsageError("tenant: the key is for another tenant.", remedy="Leave it out.")
    return request.model_copy(update={"tenant": principal.tenant})


def _with_trace(request: Request, task: TaskSpec) -> TaskSpec:
    """Return the task with the trace context of the request, if its header has one."""
    found = parse_traceparent(request.headers.get("traceparent"))
    return task if found is None or task.traceparent else task.model_copy(update={"traceparent": found})


async def submit_task(
    gateway: Gateway,
    principal: Principal,
    task: TaskSpec,
    own: str | None,
    *,
    conversation_id: str | None = None,
    is_watched: bool = False,
    is_held: bool = False,
) -> str:
    """Create a conversation for a principal, and return its id. Idempotent under the same key; see `Client.submit`.

    Args:
        conversation_id: its id; None derives it from the key, or makes a new one without a key.
        is_watched: stream pieces of its replies, from the first one on.
        is_held: see `Client.submit`.
    """
    request = _limit_to_tenant(principal, task).model_copy(update={"idempotency_key": own})
    if own is None and request.tools:  # a repeated request gets its answer even if the offers have changed
        await ToolOffers(gateway.store).choose(request.tools, limit_seconds=OFFERS_SECONDS)
    conversation_id = to_conversation_id(conversation_id, own)
    source = task.workspace_spec().source
    await gateway.uploads.require(conversation_id, source)
    if is_watched:
        await LiveText(gateway.store, conversation_id).register_watcher()
    begun = await gateway.client.submit(request, conversation_id=conversation_id, role="server", is_held=is_held)
    # last, so that the upload of a refused task still expires
    await gateway.uploads.claim(principal.tenant, conversation_id, source)
    return begun


async def submit_once(
    gateway: Gateway,
    principal: Principal,
    request: Request,
    task: TaskSpec,
    key: str | None,
    *,
    is_watched: bool = False,
) -> str:
    """Create the conversation of a request, and return its id.

    A repeated request with the same key returns the same id.

    Args:
        is_watched: stream pieces of its replies, from the first one on.

    Raises:
        KeyReused: the key belongs to another request.
    """
    own = scoped_key(principal, key)
    task = _with_trace(request, task)
    if own is None:
        return await submit_task(gateway, principal, task, None, is_watched=is_watched)
    await gateway.repeated.start(own, await fingerprint(request))
    try:
        return await submit_task(gateway, principal, task, own, is_watched=is_watched)
    except DeckhandsError as error:
        if status_of_error(error) < 500:
            await gateway.repeated.forget(own)
        raise


@routes.post("", status_code=201, response_model=CreatedConversation, summary="Create a conversation")
async def create(
    gateway: GatewayOf, principal: Writer, request: Request, task: NewConversation, key: IdempotencyKey = None
) -> Response:
    """Create a conversation with a task. It takes the fields of docs/producing-work.md except `idempotency_key`."""
    own = scoped_key(principal, key)
    traced = _with_trace(request, task)

    async def act() -> dict[str, str]:
        return {"conversation_id": await submit_task(gateway, principal, traced, own)}

    answer = await run_once(gateway, request, own, act, status=201)
    answer.headers["Location"] = f"/conversations/{json.loads(bytes(answer.body))['conversation_id']}"
    return answer


@routes.get("", response_model=ConversationPage, summary="List conversations")
async def listing(
    gateway: GatewayOf,
    principal: Reader,
    state: Annotated[
        list[str], Query(description="only conversations in one of these states; also `waiting` and `scheduled`")
    ] = [],  # noqa: B006
    *,
    label: Annotated[list[str], Query(description="KEY=VALUE; all must match")] = [],  # noqa: B006
    tenant: Annotated[
        str | None, Query(description="only this tenant's; for keys of all tenants", max_length=64)
    ] = None,
    model: Annotated[str, Query(description="a part of the name of the last model", max_length=300)] = "",
    title: Annotated[str, Query(description="a part of the title", max_length=300)] = "",
    min_cost_usd: Annotated[float, Query(ge=0, le=1e9, description="its minimum cost")] = 0.0,
    task: Annotated[str, Query(description="the id of a Celery task; only its conversation", max_length=256)] = "",
    ids: Annotated[
        list[str], Query(alias="id", description="only conversations with these ids, up to 100", max_length=MAX_IDS)
    ] = [],  # noqa: B006
    cursor: Annotated[str, Query(description="`next_cursor` of the previous page", max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Response:
    """List the conversations of the key's tenant in the store, newest first.

    Pages skip and repeat nothing while conversations are created or deleted. A page may hold fewer than `limit`.
    """
    selection = make_selection(principal, state, label, tenant, model=model, min_cost_usd=min_cost_usd, title=title)
    if not principal.is_for_all_tenants and tenant not in (None, principal.tenant):
        return _render_page([], None)
    selected = ConversationQuery(gateway.store, selection)
    if task:
        return _render_page(await selected.load_matching_rows([derive_task_conversation_id(task)]), None)
    if ids:
        return _render_page(await selected.load_matching_rows([name for name in ids if is_conversation_id(name)]), None)
    rows, place = await selected.load_page(parse_cursor(cursor), limit=limit)
    return _render_page(rows, place)


def make_selection(
    principal: Principal, states: Sequence[str], labels: Sequence[str], tenant: str | None, **further: Any
) -> Selection:
    """Return a selection within the rights of a principal.

    Args:
        labels: `KEY=VALUE` each.
        tenant: ignored unless the principal is for all tenants.

    Raises:
        UsageError: there is no such state, or a label is none.
    """
    if unknown := sorted(set(states) - STATES):
        raise UsageError(
            f"There is no state {ascii(unknown[0])[:100]}.", remedy=f"States: {', '.join(sorted(STATES))}."
        )
    pairs = [text.partition("=") for text in labels]
    return Selection(
        to_labels({name: value for name, _, value in pairs}),
        frozenset(states),
        tenant if principal.is_for_all_tenants else principal.tenant,
        **further,
    )


def _render_page(rows: Sequence[ConversationRow], place: IndexPosition | None) -> Response:
    """Return a page. Rows are validated once, when read, because long pages are requested often."""
    page = {"conversations": [conversation_json(row) for row in rows], "next_cursor": format_cursor(place)}
    text = json.dumps(page, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), media_type="application/json")


async def find_readable(gateway: GatewayOf, principal: Reader, conversation_id: ConversationId) -> str:
    """Return a conversation that the principal may read."""
    return await gateway.require_visible(principal, conversation_id)


async def find_writable(gateway: GatewayOf, principal: Writer, conversation_id: ConversationId) -> str:
    """Return a conversation that the principal may write to."""
    return await gateway.require_visible(principal, conversation_id)


async def find_operable(gateway: GatewayOf, principal: Operator, conversation_id: ConversationId) -> str:
    """Return a conversation that the principal may operate."""
    return await gateway.require_visible(principal, conversation_id)


ReadableId = Annotated[str, Depends(find_readable)]
WritableId = Annotated[str, Depends(find_writable)]
OperableId = Annotated[str, Depends(find_operable)]


async def result_of(client: Client, conversation_id: str, *, at: int | None = None) -> ConversationResult:
    """Return a conversation and its summary, with whole texts, from the store or the archive.

    Args:
        at: the event after which to show the conversation; None for its end.

    Raises:
        Problem: there is no such event.
    """
    events = await client.events(conversation_id, is_lenient=True)
    if at is not None and at > len(events):
        raise Problem(404, "unknown_event", f"The conversation has no event {at}.", remedy=f"It has {len(events)}.")
    events = await load_quoted_texts(client, conversation_id, events[:at])
    is_settled = fold_status(events).is_settled
    summary = summarize(events).as_json()
    return ConversationResult(conversation_id=conversation_id, is_settled=is_settled, summary=summary)


def settled_result(conversation_id: str, summary: Summary) -> ConversationResult:
    """Return the result of a conversation that has settled; the caller must have just read and checked its summary."""
    return ConversationResult.model_construct(
        conversation_id=conversation_id, is_settled=True, summary=summary.as_json()
    )


@routes.get("/{conversation_id}", summary="Show a conversation", responses={304: {"description": "it has not changed"}})
async def show(
    gateway: GatewayOf,
    conversation_id: ReadableId,
    response: Response,
    at: Annotated[int | None, Query(ge=1, le=MAX_EVENT_ID, description="show the state after this event")] = None,
    if_none_match: Annotated[str | None, Header(alias="If-None-Match")] = None,
) -> ConversationResult:
    """Show the summary of a conversation, archived ones included. The ETag changes with the summary."""
    found = await result_of(gateway.client, conversation_id, at=at)
    etag = etag_of(found)
    if if_none_match is not None and etag in if_none_match:
        raise Problem(304, "not_modified", "The conversation has not changed.", headers={"ETag": etag})
    response.headers["ETag"] = etag
    return found


async def _current_version(client: Client, conversation_id: str) -> dict[str, Any]:
    return {"conversation_id": conversation_id, "version": await client.log.load_last_id(conversation_id)}


class _ActionRunner:
    """Performs one action on a conversation: recorded with its author and reason, once per idempotency key."""

    def __init__(self, gateway: GatewayOf, request: Request, key: IdempotencyKey = None) -> None:
        self._gateway = gateway
        self._request = request
        self._key = key

    async def __call__(
        self, principal: Principal, conversation_id: str, action: str, reason: str, act: Act, *, status: int = 202
    ) -> Response:
        """Perform the action, and return its result or, without one, the conversation's new state.

        Raises:
            Problem: the action is not possible in the conversation's current state.
        """
        own = scoped_key(principal, self._key)
        client = self._gateway.client_for(principal, action, reason, key=own)

        async def carry_out() -> dict[str, Any]:
            try:
                found = await act(client)
            except (UnknownConversation, NoWorkspace):
                raise
            except UsageError as error:
                if own is None or not await has_appended(client.store, conversation_id, own):
                    if isinstance(error, ModelNotOffered):
                        raise
                    raise Problem(409, "conflict", error.message, remedy=error.remedy) from error
                found = None  # an earlier attempt succeeded, its answer was lost, and the conversation has moved on
            return found if isinstance(found, dict) else await _current_version(client, conversation_id)

        return await run_once(self._gateway, self._request, own, carry_out, status=status)


ActionRunner = Annotated[_ActionRunner, Depends()]
CONFLICT: dict[int | str, dict[str, Any]] = {409: {"description": "its state does not allow this"}}


@routes.post("/{conversation_id}/messages", status_code=202, response_model=Done, responses=CONFLICT)
async def message(principal: Writer, conversation_id: WritableId, acts: ActionRunner, new: NewMessage) -> Response:
    """Send a message to the agent, which then continues from any state."""
    return await acts(
        principal,
        conversation_id,
        "message",
        "",
        lambda client: client.send_message(
            conversation_id,
            new.content,
            images=new.images,
            model=new.model,
            double_texting=new.double_texting,
        ),
    )


@routes.post("/{conversation_id}/pause", status_code=202, response_model=Done, responses=CONFLICT)
async def pause(principal: Operator, conversation_id: OperableId, acts: ActionRunner, why: Reason) -> Response:
    """Pause: running work finishes, and nothing new starts."""
    return await acts(principal, conversation_id, "pause", why.reason, lambda client: client.pause(conversation_id))


@routes.post("/{conversation_id}/resume", status_code=202, response_model=Done, responses=CONFLICT)
async def resume(principal: Operator, conversation_id: OperableId, acts: ActionRunner, why: Resumption) -> Response:
    """Continue a conversation that was paused or stopped, or has failed."""
    return await acts(
        principal,
        conversation_id,
        "resume",
        why.reason,
        lambda client: client.resume(conversation_id, model=why.model),
    )


@routes.post("/{conversation_id}/confirm", status_code=202, response_model=Done, responses=CONFLICT)
async def confirm(
    principal: Writer, conversation_id: WritableId, acts: ActionRunner, answer: ConfirmationAnswer
) -> Response:
    """Run the action that awaits confirmation."""
    return await acts(
        principal,
        conversation_id,
        "confirm",
        answer.reason,
        lambda client: client.confirm(conversation_id, action_id=answer.action_id, edited=answer.edited),
    )


@routes.post("/{conversation_id}/reject", status_code=202, response_model=Done, responses=CONFLICT)
async def reject(principal: Writer, conversation_id: WritableId, acts: ActionRunner, answer: Rejection) -> Response:
    """Reject the action that awaits confirmation. The agent reads the reason, if given, and continues."""
    return await acts(
        principal,
        conversation_id,
        "reject",
        answer.reason,
        lambda client: client.reject(conversation_id, reason=answer.reason, action_id=answer.action_id),
    )


@routes.post("/{conversation_id}/cancel", status_code=202, response_model=Done, responses=CONFLICT)
async def cancel(principal: Operator, conversation_id: OperableId, acts: ActionRunner, why: Reason) -> Response:
    """Stop a conversation and its running work. A conversation that is over does not change."""
    return await acts(principal, conversation_id, "cancel", why.reason, lambda client: client.cancel(conversation_id))


@routes.post("/{conversation_id}/close", status_code=202, response_model=Done, responses=CONFLICT)
async def close(principal: Operator, conversation_id: OperableId, acts: ActionRunner, why: Reason) -> Response:
    """Close a conversation that is over: it accepts no more events, its processes end, and its files expire."""
    return await acts(principal, conversation_id, "close", why.reason, lambda client: client.close(conversation_id))


@routes.post("/{conversation_id}/fork", status_code=201, response_model=CreatedConversation)
async def fork(
    gateway: GatewayOf,
    principal: Writer,
    conversation_id: WritableId,
    request: Request,
    *,
    new: Fork,
    key: IdempotencyKey = None,
) -> Response:
    """Create a conversation with a copy of this one's events, and continue from there. This one does not change."""
    own = scoped_key(principal, key)

    async def act() -> dict[str, str]:
        await gateway.record(principal, "fork", conversation_id, "")
        fork_id = await gateway.client.fork(
            conversation_id, at=new.at, model=new.model, title=new.title, idempotency_key=own
        )
        return {"conversation_id": fork_id}

    return await run_once(gateway, request, own, act, status=201)


@routes.post("/{conversation_id}/restore", status_code=202, responses=CONFLICT)
async def restore(gateway: GatewayOf, principal: Operator, conversation_id: OperableId, why: Reason) -> Done:
    """Bring an archived conversation back into the store, so that it can be continued. Idempotent."""
    await gateway.record(principal, "restore", conversation_id, why.reason)
    await gateway.client.restore(conversation_id)
    return Done.model_validate(await _current_version(gateway.client, conversation_id))


@routes.delete("/{conversation_id}", status_code=204, responses=CONFLICT)
async def delete(gateway: GatewayOf, principal: Operator, conversation_id: OperableId, reason: ReasonQuery) -> Response:
    """Delete an idle conversation and its delegates from the store and the archive."""
    await gateway.record(principal, "delete", conversation_id, reason)
    try:
        await gateway.client.delete(conversation_id)
    except UnknownConversation:
        raise
    except UsageError as error:
        raise Problem(409, "conflict", error.message, remedy=error.remedy) from error
    return Response(status_code=204)
