"""Messages and runs as OpenHands has them: a message waits until a run is asked for.

Holds: whether a message is held follows from the log that it is appended to, so a run that ends meanwhile changes
nothing of it.
"""

from __future__ import annotations

from broker.runtime import ConversationMoved, UsageError
from deckhands.client import Change, Client, derive_title
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.openhands.parts import OpenHandsParts
from deckhands.server.openhands.requests import ConfirmationReply, SentMessage
from deckhands.server.openhands.states import ERROR, FINISHED, PAUSED, RUNNING, STUCK, WAITING
from deckhands.server.problems import Problem

MAX_ATTEMPTS = 10
"""How often a message is written again because the log has grown meanwhile."""


async def send_message(
    gateway: Gateway, parts: OpenHandsParts, principal: Principal, conversation_id: str, message: SentMessage
) -> None:
    """Send a message to the agent, which starts to work if the message says so, or works already.

    Raises:
        UsageError: the message cannot be used.
        Problem: the log grows faster than the message can be written.
    """
    text, images = message.text, message.images
    for _ in range(MAX_ATTEMPTS):
        log = await parts.logs.load(gateway.client, conversation_id)
        is_held = not message.run and log.run.execution_status != RUNNING
        seen_id = log.last_id
        try:
            await gateway.client_for(principal, "message", "").send_message(
                conversation_id, text, images=images, is_held=is_held, seen_id=seen_id if is_held else None
            )
        except ConversationMoved:
            continue
        if not (log.run.has_message or log.run.title):
            title = Change(title=derive_title(text))
            await gateway.client_for(principal, "title", "").change(conversation_id, title)
        return
    raise Problem(503, "conversation_busy", "The conversation changes too fast for the message.", remedy="Try again.")


async def run(gateway: Gateway, parts: OpenHandsParts, principal: Principal, conversation_id: str) -> None:
    """Let the agent work. A conversation that has finished stays as it is, and its state is sent again.

    Raises:
        Problem: it works already, or there is nothing to do.
    """
    log = await parts.logs.load(gateway.client, conversation_id)
    status = log.run.execution_status
    client = gateway.client_for(principal, "run", "")
    if status == RUNNING:
        raise Problem(409, "already_running", "The conversation is running already.", remedy="Wait, or pause it first.")
    if status == FINISHED:
        parts.nudge(conversation_id)
        return
    if status == WAITING:
        await confirm(client, conversation_id)
        return
    if not log.run.has_message:
        raise Problem(400, "no_message", "The conversation has no message yet.", remedy="Send one first.")
    await client.resume(conversation_id)


async def confirm(client: Client, conversation_id: str) -> None:
    """Run the action that awaits confirmation; nothing happens if none does any more."""
    try:
        await client.confirm(conversation_id)
    except UsageError as error:
        raise Problem(409, "conflict", error.message, remedy=error.remedy) from error


async def pause(
    gateway: Gateway, parts: OpenHandsParts, principal: Principal, conversation_id: str, *, is_interrupt: bool = False
) -> None:
    """Pause a conversation; one that rests stays as it is.

    Args:
        is_interrupt: also stop the action and the model call in flight.
    """
    log = await parts.logs.load(gateway.client, conversation_id)
    if log.run.execution_status in (FINISHED, ERROR, STUCK, PAUSED, WAITING):
        parts.nudge(conversation_id)
        return
    client = gateway.client_for(principal, "interrupt" if is_interrupt else "pause", "")
    try:
        await (client.interrupt if is_interrupt else client.pause)(conversation_id)
    except UsageError:
        if await client.find_end_state(conversation_id) is None:
            raise


async def respond(
    gateway: Gateway, parts: OpenHandsParts, principal: Principal, conversation_id: str, reply: ConfirmationReply
) -> None:
    """Run the action that awaits confirmation, or reject it. Nothing happens if none does.

    Differs: after a rejection OpenHands waits for a run; here the agent reads the reason, and continues by itself.
    """
    log = await parts.logs.load(gateway.client, conversation_id)
    if log.run.execution_status != WAITING:
        return
    if reply.accept:
        await confirm(gateway.client_for(principal, "confirm", ""), conversation_id)
        return
    await gateway.client_for(principal, "reject", reply.reason).reject(conversation_id, reason=reply.reason)
