"""The client: what people and programs do with the conversations of a store, over asyncio.

Holds: everything goes through the log. A call whose reply is lost can be repeated under the same idempotency key.
Does not: start workers; `cluster` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Self

from pydantic import BaseModel

from broker.contract.actions import ChangeAgentStateAction, LoopRecoveryAction, MessageAction
from broker.contract.events import AgentSpec, Event, EventSource, Limits, ModelSwitched
from broker.log.admission import check
from broker.log.append_call import WORK, Condition, message_with
from broker.log.event_log import EventLog
from broker.runtime.errors import UnknownConversation, UsageError
from broker.runtime.settings import BrokerSettings
from broker.specs.agent_state import TERMINAL_STATES, AgentState
from broker.specs.specs import Tenancy
from broker.specs.timing import DoubleTexting, MessagePolicy
from broker.store.store import Store
from deckhands.client.appending import append
from deckhands.client.archived import forget, lend_upload, restore
from deckhands.client.beginning import Beginning, begin, beginning_of
from deckhands.client.confirmations import answer_to
from deckhands.client.deleting import delete
from deckhands.client.errors import IsArchived, NotStopped
from deckhands.client.forking import Point, copied_events, fork_of
from deckhands.client.named_directory import require_served
from deckhands.client.reader import Reader
from deckhands.client.running_cluster import open_cluster
from deckhands.client.secret_keeping import secrets_of
from deckhands.reading.summary import Summary
from deckhands.tasks import inputs
from deckhands.tasks.requests import TaskRequest
from deckhands.tasks.tasks import check_task
from deckhands.transfers.files import WorkspaceFiles


class Client(Reader):
    """The conversations of a store; `archive` has those that have left it."""

    def __init__(self, store: Store, archive: str = "") -> None:
        super().__init__(store, archive)
        self.secrets = secrets_of(store)
        self._masked = EventLog(store, self.secrets)

    @property
    def files(self) -> WorkspaceFiles:
        """The files of the conversations' workspaces."""
        return WorkspaceFiles(self.store)

    @classmethod
    async def connect(
        cls, url: str | None = None, *, shards: int | None = None, patience_seconds: float | None = 30.0
    ) -> Self:
        """Connect to a store; see `open_store` for what else is raised.

        Args:
            url: `redis://…`, `rediss://…` or `unix://…`. None: the one that DECKHANDS_URL names, or that of the cluster
                that `deckhands up` runs on this machine.
            shards: of a store that has never been used; None: DECKHANDS_SHARDS.
            patience_seconds: how long a call is repeated while the store does not answer; None: for ever.

        Raises:
            NoCluster: no URL is given or named, and no cluster is running here.
        """
        store = await open_cluster(url, shards=shards, patience_seconds=patience_seconds)
        return cls(store, BrokerSettings.from_env().archive)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection."""
        await self.store.aclose()

    async def submit(
        self,
        task: str,
        *,
        agent: AgentSpec | str | None = None,
        model: str | None = None,
        workspace: inputs.Directory | None = None,
        limits: Limits | None = None,
        upload: bytes | None = None,
        tools: Sequence[str] = (),
        output: type[BaseModel] | Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        headless: bool = True,
        tenancy: Tenancy | None = None,
        title: str = "",
        labels: Mapping[str, str] | None = None,
        not_before: datetime | None = None,
        delay: timedelta | float | None = None,
        expires: datetime | timedelta | float | None = None,
        double_texting: DoubleTexting | None = None,
        conversation_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> str:
        """Start a conversation with a task and return its id. Idempotent under the same `idempotency_key`.

        Args:
            task: 1 to 100,000 characters.
            agent: its name, or all of its specification.
            model: the model it uses; None: the one of its specification, or LLM_MODEL of the controller worker.
            workspace: a path on the tool workers' machine, `git+https://…#ref`, the name of an archive or a bundle on
                this machine, or a specification. None makes an empty directory.
            upload: the file that the workspace's `UploadedSource` names.
            tools: tools that tool workers offer, for the agent to use: keys, or patterns such as `github/*`.
            output: the form of the output that the agent must return when it finishes, as a Pydantic model or a JSON
                Schema. The output is then in `Summary.outputs`. None leaves it to `agent.output`.
            secrets: values by name, which commands may use and nobody may read.
            headless: True if nobody can be asked.
            tenancy: who it is for: whose budget pays, and who goes first where something is scarce.
            title: for listings; the beginning of the task if empty.
            labels: for selection; see `deckhands.tasks.labels`.
            not_before: the conversation begins at this time, with its zone; `delay`: so long after now, in seconds.
            expires: if it has not begun by then, or after so many seconds, it ends in an error of the code `expired`.
            double_texting: what a message does that comes while the agent works: `enqueue` (None means this), `reject`,
                `interrupt` or `rollback`.
            conversation_id: its id. None makes a new one, or takes the one that belongs to `idempotency_key`.
            idempotency_key: the same key always means the same conversation, whatever else is passed.

        Raises:
            UsageError: an argument is of another type or cannot be used, the id is taken, or no running worker knows
                the agent, offers one of the tools or takes the directory.
            AdmissionRefused: nothing may begin now; says why, and when to try again.
        """
        check_task(inputs.text_in(task, "task"))
        place, upload = await asyncio.to_thread(inputs.workspace_in, workspace, upload)
        beginning = Beginning(
            task=task,
            agent=inputs.with_output(inputs.agent_in(agent, model), output),
            workspace=place,
            limits=inputs.limits_in(limits),
            upload=upload,
            tools=inputs.names_in(tools, "tools"),
            secrets=inputs.secrets_in(secrets),
            headless=headless,
            tenancy=inputs.tenancy_in(tenancy),
            title=inputs.text_in(title, "title"),
            labels=inputs.labels_in(labels),
            timing=inputs.timing_in(not_before, delay, expires),
            double_texting=inputs.policy_in(double_texting),
        )
        conversation_id = inputs.id_in(conversation_id, idempotency_key)
        await begin(self._masked, self.secrets, beginning, conversation_id, key=idempotency_key)
        return conversation_id

    async def submit_request(self, request: TaskRequest, *, conversation_id: str | None = None) -> str:
        """Start a conversation as a producer asked for it, and return its id; see `submit` for what is raised.

        Args:
            conversation_id: its id. None makes a new one, or takes the one that belongs to the request's key.
        """
        key = request.idempotency_key
        conversation_id = inputs.id_in(conversation_id, key)
        await begin(self._masked, self.secrets, beginning_of(request), conversation_id, key=key)
        return conversation_id

    async def fork(
        self,
        conversation_id: str,
        *,
        at: int | None = None,
        model: str | None = None,
        workspace: inputs.Directory | None = None,
        title: str = "",
        idempotency_key: str | None = None,
    ) -> str:
        """Start a conversation with the events of another, continue from there, and return its id.

        Idempotent under the same `idempotency_key`. What ran in the origin does not run again; see `forking`.

        Args:
            at: the last event to copy; None copies all.
            model: another model; the origin's if None.
            workspace: where to work; the origin's if None. Files are not part of a log, see `forking`.

        Raises:
            UsageError, AdmissionRefused: no such conversation or event, or see `submit`.
        """
        events = Point(conversation_id, at).cut(await self.events(conversation_id, is_whole=True))
        fork_id = inputs.id_in(None, idempotency_key)
        place = None if workspace is None else inputs.directory_in(workspace)
        created = fork_of(events, fork_id, model=model, workspace=place, title=title)
        await check(self.store, fork_id, created.tenancy.tenant if created.tenancy else "")
        await require_served(self.store, created.workspace)
        await lend_upload(self.store, self.archive, conversation_id, fork_id, created.workspace)
        await self.log.adopt(created, copied_events(events, model=model), key=f"fork:{created.forked_from}")
        return fork_id

    async def send_message(
        self,
        conversation_id: str,
        text: str,
        *,
        model: str | None = None,
        double_texting: MessagePolicy | None = None,
        idempotency_key: str | None = None,
    ) -> None:
        """Send a message to the agent, which continues whatever its state. Secrets are masked in the text.

        Args:
            model: the profile or model to continue with; None keeps the current one.
            double_texting: what the message does if the agent works; None: what the conversation was submitted with.

        Raises:
            UsageError: the text cannot be used, the conversation is unknown or closed.
            ConversationBusy: the agent works, and messages are rejected meanwhile; nothing was written.
            SecretsLocked: it has secrets, and no key here decrypts them.
        """
        check_task(inputs.text_in(text, "text"), name="message")
        policy = inputs.message_policy_in(double_texting)
        message = MessageAction(content=text, source=EventSource.USER, double_texting=policy)
        events, condition = [*_switch_to(model), message], message_with(policy)
        await self._append(conversation_id, events, idempotency_key, log=self._masked, condition=condition)

    async def pause(self, conversation_id: str) -> None:
        """Ask for a pause: what runs is finished, nothing new is started.

        Raises:
            UsageError: the conversation is unknown, closed or over.
        """
        if (state := await self._ended_in(conversation_id)) is not None:
            what = f"The conversation {conversation_id} is {state}; it cannot be paused."
            raise UsageError(what, remedy="Send it a message to continue it.")
        await self._ask_for(conversation_id, AgentState.PAUSED)

    async def resume(self, conversation_id: str, *, model: str | None = None) -> None:
        """Continue a conversation that was paused, was stopped or has failed, with another `model` if one is named.

        Raises:
            UsageError: the conversation is unknown or closed.
        """
        await self._ask_for(conversation_id, AgentState.RUNNING, *_switch_to(model))

    async def recover(self, conversation_id: str, *, option: int, model: str | None = None) -> None:
        """Get an agent out of its loop: 1 restart before the loop and wait, 2 restart and continue, 3 stop.

        Args:
            model: see `send_message`.

        Raises:
            UsageError: the agent is not in a loop, or there is no such option.
        """
        choice = LoopRecoveryAction(option=inputs.way_in(option), source=EventSource.USER)
        if not (await self._tally(conversation_id)).status.is_in_loop:
            what = f"The agent of the conversation {conversation_id} is not in a loop."
            raise UsageError(what, remedy="Send it a message to continue it.")
        await self._append(conversation_id, [*_switch_to(model), choice], None)

    async def confirm(
        self, conversation_id: str, *, action_id: int | None = None, edited: Mapping[str, Any] | None = None
    ) -> None:
        """Run the action that the agent asks about.

        Args:
            action_id: the action that was shown to the person; None means the one asked about now.
            edited: new values for fields of the action, such as `command`.

        Raises:
            UsageError: the agent asks about no action, or about another one.
        """
        await self._answer(conversation_id, AgentState.USER_CONFIRMED, action_id, edited)

    async def reject(self, conversation_id: str, *, action_id: int | None = None) -> None:
        """Refuse the action that the agent asks about. It then waits for a message. Raises what `confirm` does."""
        await self._answer(conversation_id, AgentState.USER_REJECTED, action_id, None)

    async def close(self, conversation_id: str) -> None:
        """Take no more events, end the workspace's processes, and let its files expire. Idempotent.

        Raises:
            UsageError: the conversation is unknown, or it is not over: cancel it first.
        """
        if await self._ended_in(conversation_id) is None:
            state = (await self.row(conversation_id)).state
            raise UsageError(
                f"The conversation {conversation_id} is {state}; only one that is over can be closed.",
                remedy="Cancel it first.",
            )
        await self._conversations.close(conversation_id)

    async def delete(self, conversation_id: str) -> None:
        """Delete a settled conversation with its delegates, from the store and from the archive.

        Raises what `deleting.delete` does, and `ArchiveUnavailable` if the archive cannot be used.
        """
        try:
            await delete(self.log, conversation_id)
        except UnknownConversation:
            if self.archive is None or not await forget(self.archive, conversation_id):
                raise
        else:
            if self.archive is not None:
                await forget(self.archive, conversation_id)

    async def restore(self, conversation_id: str) -> bool:
        """Bring an archived conversation back into the store; says whether it was not there already.  Idempotent.

        Raises:
            UnknownConversation: it is neither in the store nor in the archive.
            UsageError: it is a delegate, or an event of its log cannot stand where it does.
            CorruptArchive: its file cannot be used.
        """
        return await restore(self.log, self.archive, conversation_id)

    async def cancel(self, conversation_id: str, *, wait_seconds: float | None = None) -> Summary:
        """Stop a conversation and what runs in it. One that is over is left alone. Idempotent.

        Args:
            wait_seconds: how long to wait until the agent has stopped; None does not wait.

        Returns:
            The summary at the end of the wait.

        Raises:
            NotStopped: it has not stopped after `wait_seconds`; the request stays in the log.
        """
        tally = await self._tally(conversation_id)
        if tally.status.is_terminal:
            return tally.summary()
        await self._ask_for(conversation_id, AgentState.STOPPED)
        if wait_seconds is None:
            return await self.summary(conversation_id)
        try:
            async with asyncio.timeout(wait_seconds):
                await self._follow(conversation_id, tally, is_enough=lambda status: status.is_terminal)
        except TimeoutError as error:
            raise NotStopped(conversation_id, wait_seconds) from error
        return tally.summary()

    async def _ended_in(self, conversation_id: str) -> AgentState | None:
        """Return the state in which a conversation is over; None: it is not.  Reads the log only where it may be."""
        if (await self.row(conversation_id)).state not in TERMINAL_STATES:
            return None
        status = (await self._tally(conversation_id)).status
        return status.state if status.is_terminal else None

    async def _answer(
        self, conversation_id: str, answer: AgentState, action_id: int | None, edited: Mapping[str, Any] | None
    ) -> None:
        request = await answer_to(self.store, conversation_id, answer, action_id, edited or {})
        await self._append(conversation_id, [request], None, log=self._masked if edited else self.log)

    async def _ask_for(self, conversation_id: str, state: AgentState, *first: Event) -> None:
        request = ChangeAgentStateAction(agent_state=state, source=EventSource.USER)
        condition: Condition = WORK if state is AgentState.RUNNING else ""
        await self._append(conversation_id, [*first, request], None, condition=condition)

    async def _append(
        self,
        conversation_id: str,
        events: Sequence[Event],
        key: str | None,
        *,
        log: EventLog | None = None,
        condition: Condition = "",
    ) -> None:
        """Append events; pass the `log` that masks secrets for text that a person wrote."""
        try:
            await append(log or self.log, conversation_id, events, key=key, condition=condition)
        except UnknownConversation:
            if await self.is_archived(conversation_id):
                raise IsArchived(conversation_id) from None
            raise


def _switch_to(model: str | None) -> tuple[Event, ...]:
    return (ModelSwitched(model=model, source=EventSource.USER),) if model else ()
