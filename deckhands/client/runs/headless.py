"""One task from start to end: the implementation of `deckhands run`, with a private or a running cluster.

Holds: a run ends when the conversation settles, when its time is up, or when the user interrupts it. In every case the
conversation is stopped cleanly first. With a private store, its summary and events are on disk afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from broker.contract import (
    AgentState,
    ConversationCreated,
    ErrorObservation,
    Event,
    MemorySpec,
    ModelCallFailed,
    ModelReply,
    NotebookKey,
)
from broker.coordination import Notebooks, WorkspaceOrders
from broker.log import LivePiece, LiveText, Status
from broker.runtime import (
    DeckhandsError,
    OutcomeUnknown,
    StoreUnavailable,
    UnknownConversation,
    UsageError,
    new_conversation_id,
)
from deckhands.client.client import Client
from deckhands.client.named_directory import wait_for_tool_worker
from deckhands.client.reading.notebook_file import NotebookFile
from deckhands.client.reading.summary import ExitCode, Summary, Tally
from deckhands.client.runs.following import Ask, OnEvent, follow
from deckhands.client.runs.private_cluster import (
    live_controllers,
    private_cluster,
    run_unless_broken,
    warn_of_ignored_settings,
    warn_of_missing_workers,
)
from deckhands.client.runs.records import RunFolder
from deckhands.client.tasks.spec import UNNAMED_TASK, TaskSpec
from deckhands.cluster import Cluster, Home, Notice, supervise

STOP_LIMIT_SECONDS = 15.0
"""How long an interrupted conversation may take to stop."""
END_LIMIT_SECONDS = 5.0
"""How long a workspace's processes may take to end. After that, their time to live ends them."""
CONTROLLER_LIMIT_SECONDS = 60.0
"""How long to wait for the controller workers' report on their settings."""
PATIENCE_SECONDS = 10.0
"""How long the store may be silent. A private one restarts in far less."""

_HOPELESS = frozenset({"not_served", "sandbox_unavailable", "sandbox_unsafe", "workspace_refused"})
"""Codes of a tool worker's errors after which no command can ever run."""

UNUSABLE_MODEL = "llm_config"
"""Code of a failed model call that the operator's settings caused."""

_RESUMABLE = frozenset({AgentState.PAUSED, AgentState.STOPPED, AgentState.ERROR})

OnPiece = Callable[[LivePiece], None]
OnStart = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Task:
    """A task, and how to run it.

    Attributes:
        spec: the task; for a resumed run, used only if the conversation has not started.
        upload: see `Client.submit`.
        text: a message to a resumed run; None for none.
        resumed_id: the conversation to continue; None starts a new one.
        recovery: the option for a resumed run that is in a loop, see `Client.recover`.
        model: the model with which to resume; None keeps the current one.
        time_limit_seconds: None means no limit.
    """

    spec: TaskSpec = field(default_factory=lambda: TaskSpec(task=UNNAMED_TASK))
    upload: bytes | None = field(default=None, repr=False)
    text: str | None = None
    resumed_id: str | None = None
    recovery: int | None = None
    model: str | None = None
    time_limit_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run."""

    summary: Summary
    exit_code: ExitCode


@dataclass(slots=True)
class RunCallbacks:
    """Callbacks of a running task, and the means to interrupt it.

    Attributes:
        ask: returns whether an action may run. With None no user is present, and the run ends at the first question.
        interrupted: set it to stop the conversation cleanly.
        on_piece: gets pieces of replies while they are written, and may miss some. With None there is no streaming.
        reply: returns a message for an agent that waits for one. With None its question ends the run.
        at_once: ends every process at once; the run sets it.
    """

    on_start: OnStart = lambda _: None
    on_event: OnEvent = lambda _: None
    on_notice: Notice = lambda _: None
    on_piece: OnPiece | None = None
    ask: Ask | None = None
    reply: str | None = None
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: Callable[[], None] = lambda: None


async def run_privately(home: Home, task: Task, environment: Mapping[str, str], watcher: RunCallbacks) -> Ending:
    """Run a task with a private store, controller worker and tool worker.

    Raises:
        UsageError: the task, the directory or the run to resume cannot be used.
        DeckhandsError: the store or the workers cannot be started or kept up.
    """
    conversation_id = task.resumed_id or new_conversation_id()
    folder = RunFolder(home.run_folder(conversation_id))
    if task.resumed_id and not folder.path.is_dir():
        raise UnknownConversation(conversation_id)
    home.prepare(folder.path)
    with supervise(folder.path, "A run"):
        # The private tool worker requires the conversation's sandbox, because it serves no other conversation.
        created = _read_first_event(folder) if task.resumed_id else None
        workspace = created.workspace if created else task.spec.workspace_spec()
        agent = created.agent if created else task.spec.agent_spec()
        memory = agent.memory
        spec = private_cluster(folder.path, agent, workspace, environment)
        if created:  # its log knows the model that it has now
            spec = replace(spec, checked_models=(task.model,) if task.model else ())
        cluster = Cluster(spec, on_notice=watcher.on_notice)
        watcher.at_once = cluster.kill_all
        try:
            await cluster.start()
            async with await Client.connect(cluster.url, patience_seconds=PATIENCE_SECONDS) as client:
                notebook = await _copy_notebook(client, home, memory)
                beginning = _start(client, task, conversation_id, watcher, is_starting=True)
                seen_id = await run_unless_broken(beginning, cluster.until_broken())
                watcher.on_start(conversation_id)
                with folder.recording() as recording:
                    has_replied = False

                    def on_event(event: Event) -> None:
                        nonlocal has_replied
                        recording.add(event)
                        has_replied |= isinstance(event, ModelReply)
                        if event.id > seen_id:
                            _require_usable_sandbox(conversation_id, event)
                            if not has_replied:
                                _require_usable_model(event)
                        if notebook is not None:
                            _keep_notes(notebook, event, watcher)
                        if event.id > seen_id:
                            watcher.on_event(event)

                    ending = await follow_run(
                        client, conversation_id, task, watcher, on_event=on_event, broken=cluster.until_broken()
                    )
                folder.finish(ending.summary)
                await WorkspaceOrders(client.store).end_sessions(conversation_id, limit_seconds=END_LIMIT_SECONDS)
        finally:
            await cluster.stop()
    return ending


def _require_usable_sandbox(conversation_id: str, event: Event) -> None:
    """End a run on a machine where no command can run, because model calls would cost money in vain.

    Raises:
        DeckhandsError: the tool worker reports that no sandbox works, or that it does not accept the directory.
    """
    if isinstance(event, ErrorObservation) and event.error_id in _HOPELESS:
        raise DeckhandsError(event.content, remedy=f"Then continue with `deckhands run --resume {conversation_id}`.")


def _require_usable_model(event: Event) -> None:
    """Raise UsageError if the model cannot be called with these settings.

    Raises:
        UsageError: a setting is missing, or the model is unknown.
    """
    if isinstance(event, ModelCallFailed) and event.code == UNUSABLE_MODEL:
        raise UsageError(event.content)


async def run_on_cluster(url: str, task: Task, watcher: RunCallbacks) -> Ending:
    """Run a task on a running cluster. Raises the errors of `run_privately`."""
    conversation_id = task.resumed_id or new_conversation_id()
    async with await Client.connect(url, patience_seconds=PATIENCE_SECONDS) as client:
        seen_id = await _start(client, task, conversation_id, watcher)
        watcher.on_start(conversation_id)
        await warn_of_missing_workers(client, watcher.on_notice)

        def on_event(event: Event) -> None:
            if event.id > seen_id:
                watcher.on_event(event)

        return await follow_run(client, conversation_id, task, watcher, on_event=on_event)


async def follow_run(
    client: Client,
    conversation_id: str,
    task: Task,
    watcher: RunCallbacks,
    *,
    on_event: OnEvent,
    broken: Awaitable[None] | None = None,
) -> Ending:
    """Follow a conversation until it settles, its time is up, or the user interrupts it.

    Args:
        on_event: gets every event, from the first one on.
        broken: raises when the private cluster keeps failing.
    """
    tally, live = Tally(), LiveText(client.store, conversation_id)
    show_rest = partial(_show_rest, live, watcher.on_piece)
    following = asyncio.ensure_future(
        follow(client, conversation_id, tally, on_event, ask=watcher.ask, show_rest=show_rest, reply=watcher.reply)
    )
    interruption = asyncio.ensure_future(watcher.interrupted.wait())
    breakage = asyncio.ensure_future(broken) if broken is not None else asyncio.get_running_loop().create_future()
    waiting: list[asyncio.Future[Any]] = [following, interruption, breakage]
    notifying = warn_of_ignored_settings(client, watcher.on_notice, limit_seconds=CONTROLLER_LIMIT_SECONDS)
    beside = [asyncio.ensure_future(_show(live, watcher.on_piece)), asyncio.ensure_future(notifying)]
    try:
        await asyncio.wait(waiting, timeout=task.time_limit_seconds, return_when=asyncio.FIRST_COMPLETED)
        if breakage.done():
            await breakage
        if following.done():
            await following
            summary = tally.summary()
            return Ending(summary, summary.exit_code)
        code = ExitCode.INTERRUPTED if interruption.done() else ExitCode.OUT_OF_TIME
        watcher.on_notice("interrupted; stopping" if interruption.done() else "out of time; stopping")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_LIMIT_SECONDS):
                await client.cancel(conversation_id)
                if broken is not None or await live_controllers(client):
                    await following
                else:
                    watcher.on_notice("No controller worker is running; the next one stops the conversation.")
        summary = tally.summary() if tally.last_event_id else await client.summary(conversation_id)
        return Ending(summary, ExitCode.FINISHED if summary.state == AgentState.FINISHED else code)
    finally:
        for future in (*waiting, *beside):
            future.cancel()
        await asyncio.gather(*waiting, *beside, return_exceptions=True)


async def _show(live: LiveText, on_piece: OnPiece | None) -> None:
    """Pass on pieces of replies until cancelled."""
    if on_piece is None:
        return
    with contextlib.suppress(StoreUnavailable, OutcomeUnknown):
        async with contextlib.aclosing(live.watch()) as pieces:
            async for piece in pieces:
                on_piece(piece)


async def _show_rest(live: LiveText, on_piece: OnPiece | None) -> None:
    """Pass on the pieces of a reply that `_show` has not reached."""
    if on_piece is None:
        return
    with contextlib.suppress(StoreUnavailable, OutcomeUnknown):
        for piece in await live.read_rest():
            on_piece(piece)


def _read_first_event(folder: RunFolder) -> ConversationCreated | None:
    """Return the first event of a run; None if the run was killed before it was written."""
    created = folder.events()[0] if folder.has_events else None
    return created if isinstance(created, ConversationCreated) else None


async def _copy_notebook(client: Client, home: Home, memory: MemorySpec | None) -> NotebookFile | None:
    """Copy the notebook of a run into its store and return it; None if the run keeps no notes."""
    if memory is None:
        return None
    file = NotebookFile(home.notes, memory)
    await file.copy_to(Notebooks(client.store), NotebookKey.of(memory))
    return file


def _keep_notes(notebook: NotebookFile, event: Event, watcher: RunCallbacks) -> None:
    try:
        notebook.apply_event(event)
    except UsageError as error:  # the note is already in the notebook of the run's store, and the run continues
        watcher.on_notice(f"{error.message} A note of this run is lost.")


async def _start(
    client: Client, task: Task, conversation_id: str, watcher: RunCallbacks, *, is_starting: bool = False
) -> int:
    """Start or resume the conversation. Return the id of the last event that was there before.

    Args:
        is_starting: its tool worker is still starting.
    """
    if watcher.on_piece is not None:  # before the first call, which would not be streamed otherwise
        await LiveText(client.store, conversation_id).register_watcher()
    if task.resumed_id is None:
        if is_starting:
            await wait_for_tool_worker(client.store, task.spec)
        await client.submit(task.spec, upload=task.upload, conversation_id=conversation_id)
        return 0
    tally = Tally.of(await client.events(conversation_id))
    if task.text is not None:
        await client.send_message(conversation_id, task.text, model=task.model)
    elif task.recovery is not None:
        await client.recover(conversation_id, option=task.recovery, model=task.model)
    elif _needs_resume(tally.status, task):
        await client.resume(conversation_id, model=task.model)
    elif tally.status.is_settled:
        watcher.on_notice(f"This run has settled ({tally.status.state}); give it a new task with -t.")
    return tally.last_event_id


def _needs_resume(status: Status, task: Task) -> bool:
    """Return whether a resumed run must be asked to continue, because it rests or gets another model."""
    return status.state in _RESUMABLE if status.is_settled else task.model is not None
