"""`Conversation`: the blocking twin of `AsyncConversation`, for programs that are not asynchronous.

Holds: every method has the name and the parameters of its asynchronous twin, which does the work.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Generic, Self, Unpack

from broker.contract import AgentSpec, ConfirmationPolicy
from broker.tools import CustomTool
from deckhands.client.conversation.async_conversation import AsyncConversation
from deckhands.client.conversation.blocking import Blocking, LoopThread, blocking, blocking_iterator
from deckhands.client.conversation.following import AsyncFiles, Callback
from deckhands.client.conversation.outcome import Outcome, OutputT
from deckhands.client.tasks.spec import TaskFields


class Files(Blocking[AsyncFiles]):
    """Files of the workspace; paths are relative to it. The workspace exists from the first action on."""

    read = blocking(AsyncFiles.read)
    write = blocking(AsyncFiles.write)
    upload = blocking(AsyncFiles.upload)
    download = blocking(AsyncFiles.download)
    list = blocking(AsyncFiles.list)
    checkpoints = blocking(AsyncFiles.checkpoints)


class ConversationFields(TaskFields, total=False):
    """The keywords of `AsyncConversation`."""

    cluster: str | None
    api_key: str | None
    tools: Sequence[str | CustomTool]
    confirmation: ConfirmationPolicy | str | None
    callbacks: Sequence[Callback]
    conversation_id: str | None
    environment: Mapping[str, str] | None


class _Twin(AsyncConversation[OutputT], Generic[OutputT]):
    """Runs callbacks in a thread, because those of a blocking program may block and may call the conversation."""

    is_threaded = True


class Conversation(Blocking[AsyncConversation[OutputT]], Generic[OutputT]):
    """One conversation with an agent; see `AsyncConversation` for the arguments and the methods.

    Callbacks are called in another thread.
    """

    __signature__ = inspect.signature(AsyncConversation)

    def __init__(
        self,
        agent: AgentSpec | str | None = None,
        *,
        output: type[OutputT] | None = None,
        **fields: Unpack[ConversationFields],
    ) -> None:
        """Describe a conversation; nothing is started yet. See `AsyncConversation`."""
        twin: AsyncConversation[OutputT] = _Twin(agent, output=output, **fields)
        super().__init__(twin, LoopThread())
        self._owns_loop = True

    @property
    def id(self) -> str:
        """The id of the conversation; see `AsyncConversation`."""
        return self.twin.id

    @property
    def files(self) -> Files:
        """The files of its workspace."""
        return Files(self.twin.files, self.loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Stop the private workers, or close the connection; see `AsyncConversation.disconnect`. Idempotent."""
        try:
            self.loop.call(self.twin.disconnect)
        finally:
            if self._owns_loop:
                self.loop.close()

    def run(self, text: str | None = None, *, timeout_seconds: float | None = None) -> Outcome[OutputT]:
        """Send a message, if one is given, and wait; see `AsyncConversation.run`."""
        return self.loop.call(lambda: self.twin.run(text, timeout_seconds=timeout_seconds))

    def wait(self, *, timeout_seconds: float | None = None) -> Outcome[OutputT]:
        """Wait until it has settled; see `AsyncConversation.wait`."""
        return self.loop.call(lambda: self.twin.wait(timeout_seconds=timeout_seconds))

    def fork(self, *, at: int | None = None, model: str | None = None, title: str = "") -> Self:
        """Return a conversation that starts from a copy of this one's events; see `AsyncConversation.fork`."""
        fork = type(self).__new__(type(self))
        twin = self.loop.call(lambda: self.twin.fork(at=at, model=model, title=title))
        Blocking.__init__(fork, twin, self.loop)
        fork._owns_loop = False  # noqa: SLF001  (of this class)
        return fork

    send_message = blocking(AsyncConversation.send_message)
    stream = blocking_iterator(AsyncConversation.stream)
    events = blocking(AsyncConversation.events)
    state = blocking(AsyncConversation.state)
    why = blocking(AsyncConversation.why)
    verify = blocking(AsyncConversation.verify)
    trajectory = blocking(AsyncConversation.trajectory)
    metrics = blocking(AsyncConversation.metrics)
    pause = blocking(AsyncConversation.pause)
    resume = blocking(AsyncConversation.resume)
    interrupt = blocking(AsyncConversation.interrupt)
    confirm = blocking(AsyncConversation.confirm)
    reject = blocking(AsyncConversation.reject)
    cancel = blocking(AsyncConversation.cancel)
    close = blocking(AsyncConversation.close)
    execute = blocking(AsyncConversation.execute)
    set_model = blocking(AsyncConversation.set_model)
    set_agent = blocking(AsyncConversation.set_agent)
    set_confirmation_policy = blocking(AsyncConversation.set_confirmation_policy)
    set_analyzer = blocking(AsyncConversation.set_analyzer)
    set_limits = blocking(AsyncConversation.set_limits)
    set_labels = blocking(AsyncConversation.set_labels)
    set_secrets = blocking(AsyncConversation.set_secrets)
    add_tools = blocking(AsyncConversation.add_tools)
