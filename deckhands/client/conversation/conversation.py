"""`Conversation`: the blocking twin of `AsyncConversation`, for programs that are not asynchronous.

Each method is one line, with the same name, parameters and types as its twin:

    class Twin(Blocking[AsyncThing]):
        ask = blocking(AsyncThing.ask)
        watch = blocking_iterator(AsyncThing.watch)

The asynchronous object lives in an event loop of another thread (anyio's portal), which ends with the twin.

Holds: every method has the name and the parameters of its asynchronous twin, which does the work.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, cast, overload

from anyio.from_thread import BlockingPortal, start_blocking_portal

from broker.contract import AgentSpec, ConfirmationPolicy
from broker.tools import CustomTool
from deckhands.client.conversation.async_conversation import AsyncConversation
from deckhands.client.conversation.following import AsyncFiles, Callback
from deckhands.client.conversation.outcome import Outcome, OutputT
from deckhands.client.tasks.spec import TaskFields

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
S = TypeVar("S")

_END = object()


class LoopThread:
    """An event loop in another thread, started when it is first used."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def call(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine function in the loop and return its result. Must not be called in the loop's own thread."""
        if self._portal is None:
            self._portal = self._stack.enter_context(start_blocking_portal())
        result: R = self._portal.call(work)
        return result

    def close(self) -> None:
        """End the loop and its thread. Idempotent."""
        self._portal = None
        self._stack.close()


class Blocking(Generic[A]):
    """An object whose asynchronous `twin` does the work, in `loop`."""

    def __init__(self, twin: A, loop: LoopThread) -> None:
        self.twin = twin
        self.loop = loop


class BlockingMethod(Generic[P, R]):
    """A blocking form of a coroutine method of the twin."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    @overload
    def __get__(self, instance: None, owner: type) -> BlockingMethod[P, R]: ...

    @overload
    def __get__(self, instance: Blocking[Any], owner: type) -> Callable[P, R]: ...

    def __get__(self, instance: Blocking[Any] | None, owner: type) -> BlockingMethod[P, R] | Callable[P, R]:
        """Bind the method to an object."""
        if instance is None:
            return self
        method = self._method

        @functools.wraps(getattr(instance.twin, method.__name__))
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return instance.loop.call(functools.partial(method, instance.twin, *args, **kwargs))

        return call


class BlockingIterator(Generic[P, R]):
    """An asynchronous generator of the twin, as an iterator."""

    def __init__(self, method: Callable[Concatenate[Any, P], AsyncGenerator[R]]) -> None:
        self._method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    @overload
    def __get__(self, instance: None, owner: type) -> BlockingIterator[P, R]: ...

    @overload
    def __get__(self, instance: Blocking[Any], owner: type) -> Callable[P, Iterator[R]]: ...

    def __get__(self, instance: Blocking[Any] | None, owner: type) -> BlockingIterator[P, R] | Callable[P, Iterator[R]]:
        """Bind the method to an object."""
        if instance is None:
            return self
        method = self._method

        @functools.wraps(getattr(instance.twin, method.__name__))
        def iterate(*args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
            items, call = method(instance.twin, *args, **kwargs), instance.loop.call

            async def next_one() -> R | object:
                return await anext(items, _END)

            try:
                while (item := call(next_one)) is not _END:
                    yield cast("R", item)
            finally:
                call(items.aclose)

        return iterate


def blocking(method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]]) -> BlockingMethod[P, R]:
    """Return the blocking twin of an asynchronous method."""
    return BlockingMethod(method)


def blocking_iterator(method: Callable[Concatenate[S, P], AsyncGenerator[R]]) -> BlockingIterator[P, R]:
    """Return the blocking twin of an asynchronous generator."""
    return BlockingIterator(method)


class Files(Blocking[AsyncFiles]):
    """Files of the workspace; paths are relative to it. The workspace exists from the first action on."""

    read = blocking(AsyncFiles.read)
    write = blocking(AsyncFiles.write)
    upload = blocking(AsyncFiles.upload)
    download = blocking(AsyncFiles.download)
    list = blocking(AsyncFiles.list)


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
