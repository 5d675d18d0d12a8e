"""Messages and runs by OpenHands' rules: a message waits until a run is requested.

Holds: the log to which a message is appended decides whether the message is held, so a run that ends meanwhile makes no
difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from broker.contract import (
    AgentSpec,
    AgentState,
    ConfirmationPolicy,
    Event,
    Limits,
    Observation,
    WorkspaceSpec,
    action_kinds,
    asks_for_server,
)
from broker.runtime import ConversationMoved, DeckhandsError, UsageError, new_conversation_id
from deckhands.client import QUESTION_LABELS, QUESTION_PREFIX, Change, Client, NotSettled, derive_title
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.openhands.parts import OpenHandsParts
from deckhands.server.openhands.requests import ConfirmationReply, SentMessage, refuse
from deckhands.server.openhands.states import ERROR, FINISHED, PAUSED, RUNNING, STUCK, WAITING, RunState
from deckhands.server.problems import Problem
from deckhands.server.streams import reserve_stream

ANSWER_SECONDS = 300.0
"""How long the answer to a question beside the work may take."""
STOP_SECONDS = 30.0
SILENT_AGENTS = frozenset({"CodeActAgent"})
"""The agents that have the tools of their specification only."""
_FURTHER_FLAGS = frozenset({"enable_search", "enable_browsing_delegate"})
"""The fields of an agent that offer tools which have no kind of action to themselves."""
MAX_ATTEMPTS = 10
"""How often a message is written again because the log has grown meanwhile."""

NO_FORM = "The person's program cannot show the form of the MCP server, so it was not answered."


async def send_message(
    gateway: Gateway, parts: OpenHandsParts, principal: Principal, conversation_id: str, message: SentMessage
) -> None:
    """Send a message to the agent, which starts to work if the message requests a run; no effect on an agent at work.

    Raises:
        UsageError: the message cannot be used.
        Problem: the log grows faster than the message can be written.
    """
    text, images = message.text, message.images
    for _ in range(MAX_ATTEMPTS):
        log = await parts.logs.load(gateway.client, conversation_id)
        is_held = not message.run and log.run.execution_status != RUNNING
        seen_id = None if message.run else log.last_id  # whether it is held depends on all events before it
        title = None if log.run.has_message or log.run.title else derive_title(text)
        try:
            await gateway.client_for(principal, "message", "").send_message(
                conversation_id, text, images=images, is_held=is_held, seen_id=seen_id, title=title
            )
        except ConversationMoved:
            continue
        return
    raise Problem(503, "conversation_busy", "The conversation changes too fast for the message.", remedy="Try again.")


async def run(gateway: Gateway, parts: OpenHandsParts, principal: Principal, conversation_id: str) -> bool:
    """Start the agent, and return whether this had an effect. A finished conversation does not change.

    Raises:
        Problem: the agent works already, or there is nothing to do.
    """
    log = await parts.logs.load(gateway.client, conversation_id)
    status = log.run.execution_status
    client = gateway.client_for(principal, "run", "")
    if status == RUNNING:
        raise Problem(409, "already_running", "The conversation is running already.", remedy="Wait, or pause it first.")
    if status == FINISHED:
        return False
    if status == WAITING:
        await confirm(client, conversation_id)
        return True
    if not log.run.has_message:
        raise Problem(400, "no_message", "The conversation has no message yet.", remedy="Send one first.")
    await client.resume(conversation_id)
    return True


async def confirm(client: Client, conversation_id: str) -> None:
    """Run the action that awaits confirmation; no effect if there is none.

    A question of an MCP server is rejected, because OpenHands has no form for its answers.
    """
    asked_id = (await client.summary(conversation_id)).asked_id
    try:
        if asked_id is not None:
            (asked, *_) = await client.events(conversation_id, after=asked_id - 1)
            if asks_for_server(asked):
                await client.reject(conversation_id, reason=NO_FORM, action_id=asked_id)
                return
        await client.confirm(conversation_id, action_id=asked_id)
    except UsageError as error:
        raise Problem(409, "conflict", error.message, remedy=error.remedy) from error


async def pause(
    gateway: Gateway, parts: OpenHandsParts, principal: Principal, conversation_id: str, *, is_interrupt: bool = False
) -> bool:
    """Pause a conversation, and return whether this had an effect. A resting conversation does not change.

    Args:
        is_interrupt: also stop the action and the model call in flight.
    """
    log = await parts.logs.load(gateway.client, conversation_id)
    if log.run.execution_status in (FINISHED, ERROR, STUCK, PAUSED, WAITING):
        return False
    client = gateway.client_for(principal, "interrupt" if is_interrupt else "pause", "")
    try:
        await (client.interrupt if is_interrupt else client.pause)(conversation_id)
    except UsageError:
        if await client.find_end_state(conversation_id) is None:
            raise
    return True


async def respond(
    gateway: Gateway, parts: OpenHandsParts, principal: Principal, conversation_id: str, reply: ConfirmationReply
) -> None:
    """Run the action that awaits confirmation, or reject it; no effect if there is none.

    Differs: after a rejection, OpenHands waits for a run; here, the agent reads the reason and continues without one.
    """
    log = await parts.logs.load(gateway.client, conversation_id)
    if log.run.execution_status != WAITING:
        return
    if reply.accept:
        await confirm(gateway.client_for(principal, "confirm", ""), conversation_id)
        return
    await gateway.client_for(principal, "reject", reply.reason).reject(conversation_id, reason=reply.reason)


async def ask(gateway: Gateway, principal: Principal, conversation_id: str, question: str) -> str:
    """Return the agent's answer to a question beside its work.

    A fork without tools answers. It contains the events up to the last one at which no action was running, so no action
    runs twice. It is deleted after the answer.

    Raises:
        Problem: there is no answer in time, too many streams are open, or the agent has its own tools.
    """
    reserve_stream(gateway, principal)
    client = gateway.client
    events = await client.events(conversation_id, is_lenient=True)
    run = RunState()
    for event in events:
        run.add(event)
    if run.agent.name not in SILENT_AGENTS:
        raise refuse("The agent has tools that cannot be taken from it, so it answers no questions.", "Send a message.")
    await gateway.record(principal, "ask", conversation_id, "")
    fork_id = await client.fork(
        conversation_id,
        at=find_quiet_event(events),
        workspace=WorkspaceSpec(),
        title="A question",
        labels=QUESTION_LABELS,
        fork_id=f"{QUESTION_PREFIX}{new_conversation_id()}",
        is_held=True,
    )
    try:
        await client.change(fork_id, Change(agent=make_silent(run.agent), limits=Limits()))
        await client.send_message(fork_id, question)
        found = await gateway.follower.wait_until_settled(fork_id, timeout_seconds=ANSWER_SECONDS)
    except NotSettled:
        raise Problem(504, "no_answer", "The agent has not answered in time.", remedy="Ask again.") from None
    finally:
        await _delete_fork(client, fork_id)
    if found.state == AgentState.ERROR:
        raise Problem(502, "no_answer", f"The agent could not answer: {found.last_error}"[:500], remedy="Ask again.")
    return found.message


def make_silent(agent: AgentSpec) -> AgentSpec:
    """Return an agent that can only answer: it has no tools, and no check or hook runs after its answer."""
    flags = {kind.enabled_by for kind in action_kinds() if kind.enabled_by.startswith("enable_")} | _FURTHER_FLAGS
    own = {"tools": (), "memory": None, "goal": None, "output": None, "confirmation": ConfirmationPolicy()}
    return agent.model_copy(update={**dict.fromkeys(flags, False), **own})


def find_quiet_event(events: Sequence[Event]) -> int:
    """Return the id of the last observation after which no action was waiting for its result."""
    pending: set[int] = set()
    found = 1
    for event in events:
        if event.runnable:
            pending.add(event.id)
        if isinstance(event, Observation):
            pending.discard(event.cause or 0)
            found = found if pending else event.id
    return found


async def _delete_fork(client: Client, fork_id: str) -> None:
    """Stop and delete the fork that answers. If it does not stop in time, the job `orphans` deletes it."""
    with contextlib.suppress(DeckhandsError):
        await client.cancel(fork_id, wait_seconds=STOP_SECONDS)
        await client.delete(fork_id)
