"""The asyncio client for the conversations of a store.

Holds: every request goes through the log. A call whose reply is lost can be repeated under the same idempotency key.
Does not: start workers; `cluster` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from pydantic import BaseModel

from broker.contract import (
    DEFAULT_TIMEOUT_SECONDS,
    AgentSpec,
    ConversationCreated,
    EventSource,
    ExecuteCommandAction,
    MessageAction,
    MessagePolicy,
    Tenancy,
    find_model_names,
)
from broker.log import (
    LivePiece,
    LiveText,
    check_admission,
    find_creation,
    make_changed_fields,
    make_message_condition,
)
from broker.runtime import AdmissionRefused, UnknownConversation, UsageError
from broker.secrets import SecretValue
from deckhands.client.archive_operations import lend_upload, load_binary, remove_files, restore
from deckhands.client.changing import Change, check_note
from deckhands.client.conversation_secrets import store_secrets
from deckhands.client.deleting import delete
from deckhands.client.forking import ForkPoint, build_fork, copy_events
from deckhands.client.known_agents import require_models
from deckhands.client.named_directory import require_served
from deckhands.client.starting import make_hold, start_conversation
from deckhands.client.steering import Steering, to_model_switch
from deckhands.client.tasks import inputs
from deckhands.client.tasks.spec import TaskFields, TaskSpec, with_shown_fields
from deckhands.client.tasks.tasks import Directory, Image, check_task, to_image_urls
from deckhands.client.transfers.commands import CommandResult, execute, start
from deckhands.client.transfers.files import WorkspaceFiles


class Client(Steering):
    """The conversations of a store; `archive` has those that have left it."""

    @property
    def files(self) -> WorkspaceFiles:
        """The files of the conversations' workspaces."""
        return WorkspaceFiles(self.store)

    async def execute(
        self,
        conversation_id: str,
        command: str,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        by: str = "",
        reason: str = "",
        idempotency_key: str | None = None,
    ) -> CommandResult:
        """Run a command in a workspace beside the agent, which does not see it; see `commands.execute`.

        Args:
            timeout_seconds: the command is killed after this time, at most an hour.
            by: the name of the user who runs it.
            reason: the reason; both are written to the log.
            idempotency_key: the same key always means the same command, which runs once.
        """
        return await execute(
            self._masked,
            conversation_id,
            command,
            timeout_seconds=timeout_seconds,
            by=check_note(by, "by"),
            reason=check_note(reason, "reason"),
            first=[self._act] if self._act is not None else (),
            key=idempotency_key or self._act_key,
        )

    async def start_command(
        self, conversation_id: str, command: str, *, timeout_seconds: float, by: str = "", may_open: bool = False
    ) -> int:
        """Start a command in a workspace beside the agent, and return its event id; see `commands.start`.

        Args:
            timeout_seconds: the command is killed after this time, at most an hour.
            by: the name of the user who runs it.
            may_open: the command opens the workspace if it is not open yet.
        """
        action = ExecuteCommandAction(command=command, timeout=timeout_seconds, by=check_note(by, "by"))
        first = [self._act] if self._act is not None else ()
        return await start(self._masked, conversation_id, action, first=first, may_open=may_open)

    @with_shown_fields
    async def submit(
        self,
        task: str | TaskSpec,
        *,
        agent: AgentSpec | str | None = None,
        tools: Sequence[str] = (),
        output: type[BaseModel] | Mapping[str, Any] | None = None,
        upload: bytes | None = None,
        conversation_id: str | None = None,
        idempotency_key: str | None = None,
        role: str = "client",
        is_held: bool = False,
        **fields: Unpack[TaskFields],
    ) -> str:
        """Start a conversation with a task and return its id. Idempotent under the same `idempotency_key`.

        Args:
            task: the text, 1 to 100,000 characters; or the whole task as a `TaskSpec`.
            agent: its name, or its whole specification.
            tools: tools that tool workers offer, for the agent to use: keys, or patterns such as `github/*`.
            output: the schema of the output that the agent must return when it finishes, as a Pydantic model or a JSON
                Schema. The output is then in `Summary.outputs`. None for the schema in `agent.output`.
            upload: the file that the workspace's `UploadedSource` names.
            conversation_id: its id. None derives it from `idempotency_key`, or makes a new one without a key.
            idempotency_key: the same key always means the same conversation, whatever the other arguments are; None for
                the key of the `TaskSpec`.
            role: the role of this process, for its span.
            is_held: the agent takes no step until `resume`; the task `UNNAMED_TASK` then stands for no message.
            fields: see `TaskFields`; `TaskSpec` describes each.

        Raises:
            UsageError: an argument is invalid, the id is taken, or no running worker knows the agent, offers one of the
                tools or accepts the directory.
            AdmissionRefused: the conversation may not start now; has the reason and the time to wait before a retry.
        """
        if not isinstance(task, TaskSpec):
            build = partial(inputs.to_task_spec, task, agent=agent, tools=tools, output=output, upload=upload, **fields)
            spec, upload = await asyncio.to_thread(build)
        elif agent is not None or tools or output is not None or fields:
            raise UsageError("A TaskSpec has all fields of its task.", remedy="Pass it alone, or pass the task's text.")
        else:
            spec = task
        key = spec.idempotency_key if idempotency_key is None else idempotency_key
        conversation_id = inputs.to_conversation_id(conversation_id, key)
        await start_conversation(
            *(self._masked, self.secrets, spec, conversation_id),
            key=key,
            upload=upload,
            recent=self._recent_offers,
            role=role,
            is_held=is_held,
        )
        return conversation_id

    async def exists(self, conversation_id: str) -> bool:
        """Return whether the store has a conversation."""
        try:
            await self.row(conversation_id)
        except UnknownConversation:
            return False
        return True

    async def announce(self, conversation_id: str) -> None:
        """Register a reader of partial replies. Without one, models are not asked to stream."""
        await LiveText(self.store, conversation_id).register_watcher()

    def pieces(self, conversation_id: str) -> AsyncGenerator[LivePiece]:
        """Yield the pieces of replies while they are written; some may be missing."""
        return LiveText(self.store, conversation_id).watch()

    async def set_secrets(self, conversation_id: str, secrets: Mapping[str, SecretValue]) -> None:
        """Add secrets, or replace those with the same names. Their values are in no log."""
        await store_secrets(self.secrets, conversation_id, secrets)

    async def fork(
        self,
        conversation_id: str,
        *,
        at: int | None = None,
        model: str | None = None,
        workspace: Directory | None = None,
        title: str = "",
        labels: Mapping[str, str] | None = None,
        tenancy: Tenancy | None = None,
        fork_id: str | None = None,
        idempotency_key: str | None = None,
        is_held: bool = False,
    ) -> str:
        """Start a conversation from a copy of another's events, and return its id.

        Idempotent under the same `idempotency_key`, even if the origin has grown. Actions that ran in the origin do not
        run again; see `forking`.

        Args:
            at: the last event to copy; None copies all.
            model: another model; the origin's if None.
            workspace: the workspace of the fork; the origin's if None. Files are not part of a log, see `forking`.
            labels: replace the origin's.
            tenancy: the tenant and user it belongs to; the origin's if None.
            fork_id: its id. None derives it from `idempotency_key`, or makes a new one without a key.
            is_held: its agent takes no step until `resume`.

        Raises:
            UsageError: no such conversation or event, or see `submit`.
            AdmissionRefused: see `submit`.
        """
        events = ForkPoint(conversation_id, at).events_until(await self.events(conversation_id, is_whole=True))
        fork_id = inputs.to_conversation_id(fork_id, idempotency_key)
        place = None if workspace is None else inputs.to_directory(workspace)
        named = None if labels is None else inputs.to_labels(labels)
        created = build_fork(events, fork_id, model=model, workspace=place, title=title, labels=named, tenancy=tenancy)
        key = f"fork:{created.forked_from}"

        async def is_repeated() -> bool:
            """Return whether an earlier call under this key has made the fork, when the origin had fewer events."""
            if idempotency_key is None or at is not None or not await self.exists(fork_id):
                return False
            (first,) = await self.log.read(fork_id, until=1)
            assert isinstance(first, ConversationCreated)
            return (first.forked_from or "").partition("@")[0] == conversation_id

        try:
            tenant = created.tenancy.tenant if created.tenancy else ""
            await check_admission(self.store, fork_id, tenant)
            await require_models(self.store, find_model_names(created.agent), tenant)
            await require_served(self.store, created.workspace)
        except (UsageError, AdmissionRefused):
            if await find_creation(self.store, fork_id, key) is None and not await is_repeated():
                raise
            return fork_id
        copied = [*copy_events(events, model=model), *([make_hold()] if is_held else [])]

        blobs = await load_binary(self.log, self.archive, conversation_id, copied)

        async def create(shards: int) -> None:
            await lend_upload(self.store, self.archive, conversation_id, fork_id, created.workspace)
            await self.log.create_from(created, copied, key=key, shards=shards, blobs=blobs)

        try:
            await self.store.repeat_if_raised(fork_id, create)
        except UsageError:
            if not await is_repeated():
                raise
        return fork_id

    async def send_message(
        self,
        conversation_id: str,
        text: str,
        *,
        images: Sequence[Image] = (),
        model: str | None = None,
        double_texting: MessagePolicy | None = None,
        idempotency_key: str | None = None,
        is_held: bool = False,
        seen_id: int | None = None,
        title: str | None = None,
    ) -> None:
        """Send a message to the agent, which continues from any state. Secrets are masked in the text.

        Args:
            images: see `submit`.
            model: the profile or model to continue with; None keeps the current one.
            double_texting: how the message is handled while the agent works; None for the conversation's own policy.
            is_held: the agent gets the message, but takes no step until `resume`.
            seen_id: the last event that the caller has seen; None to send the message in any case.
            title: a new title of the conversation for listings; None keeps the current one.

        Raises:
            UsageError: the text cannot be used, the conversation is unknown or closed.
            ConversationMoved: the log has events after `seen_id`; nothing was written.
            ConversationBusy: the agent works and messages are rejected meanwhile; nothing was written.
            SecretsLocked: the conversation has secrets, and no key here decrypts them.
        """
        check_task(inputs.check_text(text, "text"), name="message")
        policy = inputs.to_message_policy(double_texting)
        urls = await asyncio.to_thread(to_image_urls, images)
        message = MessageAction(content=text, source=EventSource.USER, image_urls=urls, double_texting=policy)
        await self._require_model(conversation_id, model)
        events, condition = [*to_model_switch(model), message], make_message_condition(policy)
        events += [make_hold()] if is_held else []
        fields: list[tuple[str, str]] = []
        if title is not None:
            renamed = await Change(title=title).event(self.store, offers_limit_seconds=0.0)
            events, fields = [renamed, *events], make_changed_fields(renamed)
        await self._append(
            conversation_id,
            events,
            idempotency_key,
            log=self._masked,
            condition=condition,
            seen_id=seen_id,
            fields=dict(fields),
        )

    async def close(self, conversation_id: str) -> None:
        """Close a conversation: refuse further events, end the workspace's processes, and let its files expire.

        Idempotent.

        Raises:
            UsageError: the conversation is unknown, or not over: cancel it first.
        """
        if await self.find_end_state(conversation_id) is None:
            state = (await self.row(conversation_id)).state
            raise UsageError(
                f"The conversation {conversation_id} is {state}; only one that is over can be closed.",
                remedy="Cancel it first.",
            )
        if self._act is not None and not (await self.row(conversation_id)).is_closed:
            log = self._masked if self._act.reason else self.log
            await log.append(conversation_id, [self._act], key=self._act_key, quiet=True)
        await self._conversations.close(conversation_id)

    async def delete(self, conversation_id: str) -> None:
        """Delete a settled conversation with its delegates, from the store and from the archive.

        Raises the errors of `deleting.delete`, and `ArchiveUnavailable`.
        """
        try:
            has_archive = self.archive is not None
            tenant = (await self._conversations.load_row(conversation_id)).tenant if has_archive else ""
            await delete(self.log, conversation_id)
        except UnknownConversation:
            if self.archive is None or not await remove_files(self.archive, conversation_id):
                raise
        else:
            if self.archive is not None:
                await remove_files(self.archive, conversation_id, tenant=tenant)

    async def restore(self, conversation_id: str) -> bool:
        """Restore an archived conversation into the store; return False if it was there already. Idempotent.

        Raises:
            UnknownConversation: it is neither in the store nor in the archive.
            UsageError: it is a delegate, or its log has an event that is not allowed at its position.
            CorruptArchive: its file cannot be used.
        """
        return await restore(self.log, self.archive, conversation_id)
