"""Actions on one conversation from a terminal, and the notices about their outcomes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from broker.log import Conversations
from broker.runtime import DeckhandsError
from deckhands.client import Client

Act = Callable[[Client, str], Awaitable[object]]


async def _requeue(client: Client, conversation_id: str) -> None:
    await Conversations(client.store).requeue(conversation_id)
    await client.resume(conversation_id)


ACTIONS: Mapping[str, tuple[str, Act]] = {
    "pause": ("asked to pause", lambda client, cid: client.pause(cid)),
    "interrupt": ("asked to stop its work and pause", lambda client, cid: client.interrupt(cid)),
    "resume": ("asked to continue", lambda client, cid: client.resume(cid)),
    "cancel": ("asked to stop", lambda client, cid: client.cancel(cid)),
    "requeue": ("can continue", _requeue),
}
"""By name: the words for the outcome, and the action."""


async def run_action(client: Client, name: str, conversation_id: str) -> str:
    """Perform one of `ACTIONS` and return a notice of its success, or the reason of its failure."""
    done, act = ACTIONS[name]
    return await run_with_notice(
        act(client, conversation_id),
        f"{conversation_id} was {done}." if name != "requeue" else f"{conversation_id} {done}.",
    )


async def run_with_notice(work: Awaitable[object], done: str) -> str:
    """Wait for an action and return a notice about it."""
    try:
        await work
    except DeckhandsError as error:
        return f"{error.message} {error.remedy}".strip()
    return done
