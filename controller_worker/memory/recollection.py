"""A conversation's memory, read from its log when it is first needed and kept up from then on.

Holds: after `take_in` of every event since, a prompt costs no look into the log.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker.event_log import EventLog
from broker.events import Event
from controller_worker.llm.messages import Message
from controller_worker.memory.conversation_memory import ConversationMemory

NOT_IN_PROMPTS = frozenset({"old_content", "new_content"})
"""Fields of observations that no model sees; the rest of a shortened event is fetched for the prompt."""


class Recollection:
    """What a model is told of one conversation."""

    def __init__(self, log: EventLog, conversation_id: str) -> None:
        self._log = log
        self._conversation_id = conversation_id
        self._memory: ConversationMemory | None = None

    async def take_in(self, events: Iterable[Event]) -> None:
        """Go on with the next events of the log.

        Raises:
            CorruptEntry: a text kept beside the log is missing or damaged.
        """
        if self._memory is not None:
            for event in events:
                self._memory.add(await self._whole(event))

    async def messages(self, version: int, *, max_message_chars: int) -> tuple[Message, ...]:
        """Return the messages made from the log up to `version`, which is where `take_in` has come to.

        Args:
            max_message_chars: longest text of one observation; counts from the first call on.

        Raises:
            CorruptEntry: an entry is damaged or missing.
        """
        if self._memory is None:
            memory = ConversationMemory(max_message_chars=max_message_chars)
            for event in await self._log.read(self._conversation_id, until=version):
                memory.add(await self._whole(event))
            self._memory = memory
        assert self._memory.version == version, f"remembers {self._memory.version}, asked for {version}"
        return tuple(self._memory.messages())

    async def _whole(self, event: Event) -> Event:
        if not event.blobs or event.blobs.keys() <= NOT_IN_PROMPTS:
            return event
        return await self._log.blobs.whole(self._conversation_id, event)
