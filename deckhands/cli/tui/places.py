"""The place of a chat: a private store and workers that end with it, or a cluster that outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from broker.contract import ConversationCreated, Event
from broker.coordination import WorkspaceOrders
from broker.runtime import UnknownConversation, new_conversation_id
from deckhands.client import (
    END_LIMIT_SECONDS,
    PATIENCE_SECONDS,
    Client,
    RunFolder,
    Summary,
    Task,
    check_task,
    private_cluster,
    to_image_urls,
    wait_for_tool_worker,
)
from deckhands.cluster import Cluster, Home, Notice, supervise
from deckhands.settings import CliSettings


@dataclass(slots=True)
class ChatPlace:
    """The place of a chat.

    Attributes:
        conversation_id: the conversation to continue; empty if the first message creates one.
        is_private: its workers end with the chat.
        record: called with each event of the conversation, from the first one on.
        finish: called with the summary at the end.
    """

    client: Client
    task: Task
    conversation_id: str = ""
    is_private: bool = False
    record: Callable[[Event], None] = lambda _: None
    finish: Callable[[Summary], None] = lambda _: None
    images: list[str] = field(default_factory=list)
    _own_id: str = ""

    async def start(self, text: str) -> str:
        """Create a conversation with a message and return its id.

        Raises:
            UsageError: the task is invalid; see `Client.submit`.
        """
        check_task(text)
        spec = self.task.spec
        if self.is_private:
            await wait_for_tool_worker(self.client.store, spec)
        urls = await asyncio.to_thread(to_image_urls, self.images) or ()
        said = {"task": text, "images": (*spec.images, *urls)}
        self.conversation_id = await self.client.submit(
            spec.model_copy(update=said), upload=self.task.upload, conversation_id=self._own_id or None
        )
        self.images.clear()
        return self.conversation_id

    async def send(self, text: str) -> None:
        """Send a message to the conversation. Raises the errors of `Client.send_message`."""
        await self.client.send_message(self.conversation_id, text, images=tuple(self.images))
        self.images.clear()


@asynccontextmanager
async def private_place(
    settings: CliSettings, task: Task, conversation_id: str, on_notice: Notice
) -> AsyncIterator[ChatPlace]:
    """Run a private store and workers for one conversation; it leaves the files of a run, like `deckhands run`.

    Args:
        conversation_id: the run to continue; empty for a new one.

    Raises:
        UnknownConversation: there is no such run.
        DeckhandsError: the store or the workers cannot be started.
    """
    home = Home(settings.home)
    own_id = conversation_id or new_conversation_id()
    folder = RunFolder(home.run_folder(own_id))
    if conversation_id and not folder.path.is_dir():
        raise UnknownConversation(conversation_id)
    home.prepare(folder.path)
    with supervise(folder.path, "A run"):
        created = folder.events()[0] if conversation_id and folder.has_events else None
        agent = task.spec.agent_spec()
        workspace = task.spec.workspace_spec()
        if isinstance(created, ConversationCreated):
            agent, workspace = created.agent, created.workspace
        spec = private_cluster(folder.path, agent, workspace, settings.environment)
        if created:  # its log knows the model that it has now
            spec = replace(spec, checked_models=())
        cluster = Cluster(spec, on_notice=on_notice)
        try:
            await cluster.start()
            async with await Client.connect(cluster.url, patience_seconds=PATIENCE_SECONDS) as client:
                place = ChatPlace(client, task, conversation_id, is_private=True, finish=folder.finish, _own_id=own_id)
                try:
                    with folder.recording() as recording:
                        place.record = recording.add
                        yield place
                finally:
                    if place.conversation_id:
                        orders = WorkspaceOrders(client.store)
                        await orders.end_sessions(place.conversation_id, limit_seconds=END_LIMIT_SECONDS)
        finally:
            await cluster.stop()
