"""Actions that change a running conversation: interrupt it, change its settings, run a command beside the agent."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from broker.contract import ConfirmationPolicy
from broker.log import Conversations
from broker.runtime import ConversationMoved, UnknownConversation
from deckhands.client import Change, Client, IsArchived, store_secrets
from deckhands.server.conversations import CONFLICT, ActionRunner, OperableId, WritableId, result_of
from deckhands.server.dependencies import (
    MATCHED,
    OFFERS_SECONDS,
    GatewayOf,
    IfMatch,
    Operator,
    Reader,
    Reason,
    Writer,
    etag_of,
)
from deckhands.server.models import ChangedConversation, Command, Done, Executed, NewSecrets
from deckhands.server.problems import Problem

routes = APIRouter(prefix="/conversations", tags=["conversations"])


@routes.post("/{conversation_id}/interrupt", status_code=202, response_model=Done, responses=CONFLICT)
async def interrupt(principal: Operator, conversation_id: OperableId, acts: ActionRunner, why: Reason) -> Response:
    """Stop running work, and pause: the command is killed, and the model's reply is discarded."""
    return await acts(
        principal, conversation_id, "interrupt", why.reason, lambda client: client.interrupt(conversation_id)
    )


@routes.post("/{conversation_id}/requeue", status_code=202, response_model=Done, responses=CONFLICT)
async def requeue(
    gateway: GatewayOf, principal: Operator, conversation_id: OperableId, acts: ActionRunner, why: Reason
) -> Response:
    """Continue a conversation that was paused or stopped, has failed, or has crashed three workers."""

    async def again(client: Client) -> None:
        await Conversations(gateway.store).requeue(conversation_id)
        await client.resume(conversation_id)

    return await acts(principal, conversation_id, "requeue", why.reason, again)


@routes.patch("/{conversation_id}", status_code=202, response_model=Done, responses=CONFLICT | MATCHED)
async def change(
    gateway: GatewayOf,
    principal: Writer,
    conversation_id: WritableId,
    acts: ActionRunner,
    new: ChangedConversation,
    *,
    precondition: IfMatch,
) -> Response:
    """Change settings of a conversation from its next step on. Omitted fields keep their values.

    With `If-Match`, the change applies only if the conversation has no new event, because its ETag changes with each
    event.
    """
    is_compared = precondition.is_given
    confirmation = new.confirmation
    if isinstance(confirmation, str):
        confirmation = ConfirmationPolicy(mode=confirmation)
    wanted = Change(
        agent=new.agent,
        confirmation=confirmation,
        analyzer=new.analyzer,
        limits=new.limits,
        tools=new.tools,
        labels=new.labels,
        title=new.title,
        by=principal.author,
        reason=new.reason,
    )
    if wanted.has_parts or new.model is None:
        await wanted.event(gateway.store, offers_limit_seconds=OFFERS_SECONDS)

    async def change_it(client: Client) -> None:
        seen_id, stale = None, None
        if is_compared:
            known = await result_of(client, conversation_id)
            seen_id = known.summary["last_event_id"]
            try:
                precondition.check(etag_of(known))
            except Problem as problem:
                # The ETag may be stale because this very request has changed the conversation and its answer was lost.
                # The log then knows the request's key and answers as before. Other appends fail: there is no event 0.
                seen_id = 0
                stale = problem
        try:
            await client.change(conversation_id, wanted, model=new.model, seen_id=seen_id)
        except ConversationMoved as moved:
            raise stale or moved from None

    return await acts(principal, conversation_id, "change", new.reason, change_it)


@routes.put("/{conversation_id}/secrets", status_code=204, responses={409: {"description": "it is archived"}})
async def set_secrets(gateway: GatewayOf, principal: Writer, conversation_id: WritableId, new: NewSecrets) -> Response:
    """Add secrets, or replace those of the same names. No log contains their values."""
    try:
        await gateway.client.log.load_last_id(conversation_id)
    except UnknownConversation:  # secrets stored for an unknown conversation would never be removed
        if await gateway.client.is_archived(conversation_id):
            raise IsArchived(conversation_id) from None
        raise
    await gateway.record(principal, "secrets", conversation_id, ", ".join(sorted(new.secrets)))
    await store_secrets(gateway.client.secrets, conversation_id, new.secrets)
    return Response(status_code=204)


@routes.post("/{conversation_id}/execute", response_model=Executed, responses=CONFLICT)
async def execute(
    principal: Writer, _reader: Reader, conversation_id: WritableId, acts: ActionRunner, asked: Command
) -> Response:
    """Run a command in the workspace in a separate shell, and answer when it has ended. The agent does not see it."""

    async def run(client: Client) -> dict[str, Any]:
        done = await client.execute(
            conversation_id,
            asked.command,
            timeout_seconds=asked.timeout_seconds,
            by=principal.author,
            reason=asked.reason,
        )
        return {"event_id": done.event_id, "output": done.output, "exit_code": done.exit_code}

    return await acts(principal, conversation_id, "execute", asked.reason, run, status=200)
