"""Parts that the routes share: the conversation of a path, the server's translations, and its open sockets."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Annotated

from fastapi import Depends, Path
from starlette.requests import HTTPConnection

from broker.runtime import SYSTEM_CLOCK
from deckhands.server.dependencies import GatewayOf, Operator, Reader, Writer
from deckhands.server.openhands.conversation_ids import find_conversation
from deckhands.server.openhands.translated_logs import TranslatedLogs


class OpenHandsParts:
    """The state of one server for OpenHands' clients.

    Attributes:
        logs: the translations.
        nudges: for each conversation, the sockets that send its state again once their event is set.
        started: the time of the start, on the monotonic clock.
        unauthenticated: the number of sockets that have not sent their first message.
    """

    def __init__(self) -> None:
        self.logs = TranslatedLogs()
        self.nudges: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.started = SYSTEM_CLOCK.monotonic()
        self.unauthenticated = 0

    async def nudge(self, conversation_id: str) -> None:
        """Let the sockets of a conversation at this server send its state once more."""
        for event in self.nudges.get(conversation_id, ()):
            event.set()


async def parts_of(connection: HTTPConnection) -> OpenHandsParts:
    """Return the server's parts."""
    found: OpenHandsParts = connection.app.state.openhands
    return found


Parts = Annotated[OpenHandsParts, Depends(parts_of)]
Uuid = Annotated[
    str,
    Path(
        max_length=64,
        description="the UUID of a conversation, or its id",
        examples=["019a4b0f-c3a1-4c1f-9c51-2c3d4e5f6071"],
    ),
]


async def find_readable(gateway: GatewayOf, principal: Reader, conversation_id: Uuid) -> str:
    """Return a conversation that the principal may read."""
    return await find_conversation(gateway, principal, conversation_id)


async def find_writable(gateway: GatewayOf, principal: Writer, conversation_id: Uuid) -> str:
    """Return a conversation that the principal may write to."""
    return await find_conversation(gateway, principal, conversation_id)


async def find_operable(gateway: GatewayOf, principal: Operator, conversation_id: Uuid) -> str:
    """Return a conversation that the principal may operate."""
    return await find_conversation(gateway, principal, conversation_id)


ReadableId = Annotated[str, Depends(find_readable)]
WritableId = Annotated[str, Depends(find_writable)]
OperableId = Annotated[str, Depends(find_operable)]
