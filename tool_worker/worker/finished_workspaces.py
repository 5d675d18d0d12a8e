"""Ends the workspace hosts of finished conversations when a tool worker stops together with its cluster.

Holds: a host is asked to end only if its conversation has ended, and it ends only if nothing runs in it except an idle
shell. With a command or a background program, the host runs on for its usual idle time.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from broker.contract import TERMINAL_STATES
from broker.log import Conversations
from broker.runtime import DeckhandsError, UnknownConversation
from broker.store import Store
from tool_worker.workspace import HostFolder, Workspaces, retire

LIMIT_SECONDS = 2.0
AT_ONCE = 16

_log = logging.getLogger(__name__)


async def end_finished(store: Store, workspaces: Workspaces, root: Path) -> None:
    """End the idle hosts of finished conversations. Never raises; gives up after two seconds."""
    conversations, room = Conversations(store), asyncio.Semaphore(AT_ONCE)

    async def end(conversation_id: str) -> None:
        async with room:
            try:
                row = await conversations.row(conversation_id)
            except UnknownConversation:
                return
            if row.is_closed or row.state in TERMINAL_STATES:
                await retire(HostFolder(root, conversation_id), may_kill=False)

    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            living = [found.conversation_id for found in workspaces.list() if found.is_alive]
            await asyncio.gather(*(end(conversation_id) for conversation_id in living))
    except (OSError, TimeoutError, DeckhandsError) as error:
        _log.warning("cannot end all workspaces of finished conversations: %s", error or "out of time")
