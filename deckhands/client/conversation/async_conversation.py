"""`AsyncConversation`: one conversation, embedded or on a cluster. `Conversation` is its blocking twin.

Holds: nothing starts before the object is first used. The log is the truth; the object only caches the events it has
seen.
Does not: work in the background. Callbacks run while a method of the object waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, Unpack, cast

from pydantic import BaseModel

from broker.contract import (
    DEFAULT_TIMEOUT_SECONDS,
    AgentSpec,
    ConfirmationPolicy,
    Event,
    Limits,
    MessagePolicy,
    WorkspaceSpec,
)
from broker.log import LivePiece
from broker.runtime import UnknownConversation, UsageError
from broker.secrets import SecretValue
from broker.tools import CustomTool, refuse_while_importing
from deckhands.client.changing import Change
from deckhands.client.conversation.cluster_connection import (
    ClusterConnection,
    build_environment,
    check_cluster,
    is_server,
    to_tool_keys,
)
from deckhands.client.conversation.following import AsyncFiles, Callback, ConversationFollower
from deckhands.client.conversation.outcome import ConversationFailed, NotBegun, Outcome, OutputT
from deckhands.client.errors import NotSettled
from deckhands.client.protocol import ConversationClient
from deckhands.client.reading.metrics import Metrics
from deckhands.client.reading.summary import Summary
from deckhands.client.reasons.link import Why
from deckhands.client.tasks import inputs
from deckhands.client.tasks.spec import UNNAMED_TASK, TaskFields, with_shown_fields
from deckhands.client.tasks.tasks import Image, check_task, to_image_urls
from deckhands.client.trajectories import Trajectory
from deckhands.client.transfers.commands import CommandResult
from deckhands.client.verification import Verification


class AsyncConversation(Generic[OutputT]):
    """One conversation with an agent.

    Attributes:
        id: the id of the conversation, known from the start. On a server it is empty until the first message, because
            the server chooses it.
    """

    is_threaded = False
    """Whether callbacks that are not asynchronous run in a thread."""

    @with_shown_fields
    def __init__(
        self,
        agent: AgentSpec | str | None = None,
        *,
        output: type[OutputT] | None = None,
        cluster: str | None = None,
        api_key: str | None = None,
        tools: Sequence[str | CustomTool] = (),
        confirmation: ConfirmationPolicy | str | None = None,
        callbacks: Sequence[Callback] = (),
        conversation_id: str | None = None,
        environment: Mapping[str, str] | None = None,
        **fields: Unpack[TaskFields],
    ) -> None:
        """Describe a conversation; nothing is started yet.

        Args:
            agent: its name, or its whole specification.
            output: the class of the structured output that the agent must return when it finishes.
            cluster: the address of the cluster's store, or of a server, `https://…`. None: a private store and workers,
                which start on first use and end with the context.
            api_key: the key for the server; None: DECKHANDS_API_KEY.
            tools: keys or patterns of tools that tool workers offer; for a private cluster also tools of this program.
            confirmation: the policy, or its mode.
            callbacks: each gets every event once, in order, while a method waits for the conversation.
            conversation_id: an existing conversation to continue, or the id for a new one.
            environment: environment variables for the workers of a private cluster, over those of this process.
            fields: further fields of a task, as for `Client.submit`: model, workspace, limits, secrets, title,
                labels, tenancy, delay, expires and so on. `headless` is false here by default.

        Raises:
            UsageError: an argument cannot be used.
        """
        refuse_while_importing()
        check_cluster(cluster)
        found = inputs.to_agent_spec(agent, None)
        if confirmation is not None:
            found = found.model_copy(update={"confirmation": inputs.to_confirmation_policy(confirmation)})
        if output is not None and not (isinstance(output, type) and issubclass(output, BaseModel)):
            raise UsageError(f"The argument output is {ascii(output)[:200]}.", remedy="Pass a Pydantic model.")
        if "idempotency_key" in fields:
            raise UsageError(
                "A conversation takes no idempotency_key: it starts once, however often its first message is retried.",
                remedy="Pass conversation_id to find it again, or use Client.submit.",
            )
        fields.setdefault("headless", False)
        self._spec, self._upload = inputs.to_task_spec(
            UNNAMED_TASK, agent=found, tools=to_tool_keys(tools), output=output, **fields
        )
        place = self._spec.workspace_spec()
        is_named_here = bool(place.path) and not isinstance(fields.get("workspace"), WorkspaceSpec)
        self._directory = Path(place.path) if place.path and is_named_here else None
        self._new_id = inputs.to_conversation_id(conversation_id, None)
        self.id = "" if is_server(cluster) and conversation_id is None else self._new_id
        self._is_named = conversation_id is not None
        self._tools = tools
        self._output = output
        self._cluster = cluster
        self._api_key = api_key
        self._environment = dict(environment or {})
        self._callbacks = tuple(callbacks)
        self._following = ConversationFollower(self.id, self._callbacks, is_threaded=self.is_threaded)
        self._opening = asyncio.Lock()
        self._place: ClusterConnection | None = None
        self._owns_place = True
        self._is_begun = False
        self._is_disconnected = False

    @property
    def files(self) -> AsyncFiles:
        """The files of its workspace."""
        return AsyncFiles(self._get_client, lambda: self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.disconnect()

    async def disconnect(self) -> None:
        """Stop the private workers, or close the connection. Idempotent.

        A conversation of a cluster continues meanwhile. A private one stops; pass its id as `conversation_id` to
        continue it.
        """
        place, self._place, self._is_disconnected = self._place, None, True
        if place is not None and self._owns_place:
            await place.aclose()

    async def send_message(
        self,
        text: str,
        *,
        images: Sequence[Image] = (),
        model: str | None = None,
        double_texting: MessagePolicy | None = None,
    ) -> None:
        """Send a message. The agent works at once; the first message starts the conversation.

        Args:
            images: pictures: paths on this machine, bytes, or addresses.
            model: the profile or model to continue with.
            double_texting: how the message is handled while the agent works, see `Client.send_message`.
        """
        place = await self._get_connection()
        if self._is_begun:
            sending = place.client.send_message(
                self.id, text, images=images, model=model, double_texting=double_texting
            )
            await place.run(sending)
            return
        if self._is_named and is_server(self._cluster):
            raise UnknownConversation(self.id)
        check_task(inputs.check_text(text, "task"))
        urls = await asyncio.to_thread(to_image_urls, images) or ()
        await place.wait_until_ready(self._spec)
        agent = inputs.to_agent_spec(self._spec.agent, model)
        begun = {"task": text, "agent": agent, "images": (*self._spec.images, *urls)}
        starting = place.client.submit(
            self._spec.model_copy(update=begun),
            upload=self._upload,
            conversation_id=self._new_id,
            idempotency_key=f"conversation:{self._new_id}",
        )
        self.id = await place.run(starting)
        self._following.conversation_id = self.id
        self._is_begun = True

    async def run(self, text: str | None = None, *, timeout_seconds: float | None = None) -> Outcome[OutputT]:
        """Send a message, if one is given, and wait until the conversation has settled.

        Raises:
            ConversationFailed: it ended in an error.
            NotSettled: it has not settled after `timeout_seconds`.
        """
        if text is not None:
            await self.send_message(text)
        outcome = await self.wait(timeout_seconds=timeout_seconds)
        if outcome.state == "error":
            raise ConversationFailed(outcome)
        return outcome

    async def wait(self, *, timeout_seconds: float | None = None) -> Outcome[OutputT]:
        """Wait until the conversation has settled, in whatever state: nothing more happens without input.

        Raises:
            NotSettled: it has not settled after `timeout_seconds`.
        """
        await self._get_client()
        assert self._place is not None
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._place.run(self._wait_until_settled(self._place))
        except TimeoutError as error:
            raise NotSettled(self.id, timeout_seconds) from error
        summary = self._following.tally.summary()
        if self._output is None or not summary.outputs:
            return Outcome(summary)
        output = cast("type[BaseModel]", self._output).model_validate(summary.outputs)
        return Outcome(summary, cast("OutputT", output))

    async def stream(
        self, text: str | None = None, *, after: int | None = None, deltas: bool = False
    ) -> AsyncGenerator[Event | LivePiece]:
        """Yield each new event until the conversation has settled.

        Args:
            text: a message to send first.
            after: start after this event; None: after the last event that this object has seen.
            deltas: also yield pieces of replies while the model writes them; some may be missing.
        """
        place = await self._get_connection()
        if deltas:
            await place.client.announce(self.id)
        if text is not None:
            await self.send_message(text)
        client, seen_id = await self._get_client(), self._following.tally.last_event_id
        if after is not None and after < seen_id:
            for event in await client.events(self.id, after=after, is_whole=True):
                if event.id <= seen_id:
                    yield event
        source = self._following.with_pieces(place) if deltas else self._following.until_settled(place)
        async with contextlib.aclosing(source) as items:
            async for item in items:
                if isinstance(item, LivePiece) or after is None or item.id > after:
                    yield item

    async def events(self, *, after: int = 0) -> list[Event]:
        """Return the events above `after`, in order, with their long texts whole."""
        return await (await self._get_client()).events(self.id, after=after, is_whole=True)

    async def state(self) -> Summary:
        """Return its current summary: the agent's state, cost and last message."""
        return await (await self._get_client()).summary(self.id)

    async def why(self) -> Why:
        """Return the chain of reasons for its state, down to the cause, with the remedies."""
        return await (await self._get_client()).why(self.id)

    async def verify(self) -> Verification:
        """Check its log against the specification of a log, and return the violations."""
        return await (await self._get_client()).verify(self.id)

    async def trajectory(self) -> Trajectory:
        """Return the exact tokens of a rollout: those of its prompts and those that the model sampled, in segments."""
        return await (await self._get_client()).trajectory(self.id)

    async def metrics(self) -> Metrics:
        """Return cost, tokens and latency of every model call."""
        return (await self.state()).metrics

    async def pause(self) -> None:
        """Request a pause: running work is finished, and no new step starts."""
        await (await self._get_client()).pause(self.id)

    async def resume(self, *, model: str | None = None) -> None:
        """Continue after a pause, a stop or an error; see `Client.resume`."""
        await (await self._get_client()).resume(self.id, model=model)

    async def interrupt(self) -> None:
        """Stop the current step, and pause; see `Client.interrupt`."""
        await (await self._get_client()).interrupt(self.id)

    async def confirm(self, *, action_id: int | None = None, edited: Mapping[str, Any] | None = None) -> None:
        """Run the action that awaits confirmation; see `Client.confirm`."""
        await (await self._get_client()).confirm(self.id, action_id=action_id, edited=edited)

    async def reject(self, *, reason: str = "", action_id: int | None = None) -> None:
        """Refuse the action that awaits confirmation; with a reason, the agent continues. See `Client.reject`."""
        await (await self._get_client()).reject(self.id, reason=reason, action_id=action_id)

    async def cancel(self, *, wait_seconds: float | None = None) -> Summary:
        """Stop the conversation and all its running work; see `Client.cancel`."""
        return await (await self._get_client()).cancel(self.id, wait_seconds=wait_seconds)

    async def close(self) -> None:
        """Refuse further messages, permanently. Only a conversation that is over can be closed; see `Client.close`."""
        await (await self._get_client()).close(self.id)

    async def execute(
        self, command: str, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, by: str = "", reason: str = ""
    ) -> CommandResult:
        """Run a command in its workspace beside the agent, which does not see it; see `Client.execute`."""
        client = await self._get_client()
        return await client.execute(self.id, command, timeout_seconds=timeout_seconds, by=by, reason=reason)

    async def set_model(self, model: str, *, by: str = "", reason: str = "") -> None:
        """Continue with another model."""
        changed = {"agent": inputs.to_agent_spec(self._spec.agent, model)}
        await self._change_or_submit(changed, Change(by=by, reason=reason), model=model)

    async def set_agent(self, agent: AgentSpec | str, *, by: str = "", reason: str = "") -> None:
        """Let another agent continue."""
        spec = inputs.to_agent_spec(agent, None)
        await self._change_or_submit({"agent": spec}, Change(agent=spec, by=by, reason=reason))

    async def set_confirmation_policy(
        self, policy: ConfirmationPolicy | str, *, by: str = "", reason: str = ""
    ) -> None:
        """Change which actions need confirmation: a policy, or its mode."""
        found = inputs.to_confirmation_policy(policy)
        await self._change_or_submit(self._with_policy(found), Change(confirmation=found, by=by, reason=reason))

    async def set_analyzer(self, analyzer: str, *, by: str = "", reason: str = "") -> None:
        """Let another analyzer rate the risk of actions."""
        inputs.to_analyzer(inputs.check_text(analyzer, "analyzer"))
        policy = inputs.to_agent_spec(self._spec.agent, None).confirmation.model_copy(update={"analyzer": analyzer})
        await self._change_or_submit(self._with_policy(policy), Change(analyzer=analyzer, by=by, reason=reason))

    async def set_limits(self, limits: Limits, *, by: str = "", reason: str = "") -> None:
        """Set all limits; earlier usage counts against them."""
        found = inputs.to_limits(limits)
        await self._change_or_submit({"limits": found}, Change(limits=found, by=by, reason=reason))

    async def set_labels(self, labels: Mapping[str, str], *, by: str = "", reason: str = "") -> None:
        """Set all labels."""
        found = inputs.to_labels(labels)
        await self._change_or_submit({"labels": found}, Change(labels=found, by=by, reason=reason))

    async def set_secrets(self, secrets: Mapping[str, SecretValue]) -> None:
        """Add secrets, or replace those with the same names. Their values are in no log."""
        found = inputs.to_secrets(secrets)
        if not await self._is_started():
            self._spec = self._spec.model_copy(update={"secrets": {**self._spec.secrets, **found}})
            return
        await (await self._get_client()).set_secrets(self.id, found)

    async def add_tools(self, *tools: str | CustomTool, by: str = "", reason: str = "") -> None:
        """Let the agent use more tools: keys or patterns of tools that tool workers offer, or tools of this program."""
        keys = to_tool_keys(tools)
        if self._place is None and not self._is_disconnected:
            self._tools = (*self._tools, *tools)
        await self._change_or_submit({"tools": (*self._spec.tools, *keys)}, Change(tools=keys, by=by, reason=reason))

    async def fork(self, *, at: int | None = None, model: str | None = None, title: str = "") -> Self:
        """Return a conversation that starts from a copy of this one's events, up to `at`.

        A private fork runs on the workers of this conversation, and ends with them.
        """
        client = await self._get_client()
        fork_id = await client.fork(self.id, at=at, model=model, title=title)
        return self._of_fork(fork_id)

    def _of_fork(self, fork_id: str) -> Self:
        fork = type(self)(
            self._spec.agent,
            cluster=self._cluster,
            api_key=self._api_key,
            output=self._output,
            callbacks=self._callbacks,
            conversation_id=fork_id,
        )
        fork._place = self._place  # noqa: SLF001  (of this class)
        fork._owns_place = False  # noqa: SLF001  (of this class)
        fork._is_begun = True  # noqa: SLF001  (of this class)
        return fork

    async def _wait_until_settled(self, place: ClusterConnection) -> None:
        async for _ in self._following.until_settled(place):
            continue

    def _with_policy(self, policy: ConfirmationPolicy) -> dict[str, Any]:
        return {"agent": inputs.to_agent_spec(self._spec.agent, None).model_copy(update={"confirmation": policy})}

    async def _change_or_submit(self, changed: Mapping[str, Any], change: Change, *, model: str | None = None) -> None:
        """Change fields of the task, or of the conversation if it has started."""
        if not await self._is_started():
            self._spec = self._spec.model_copy(update=dict(changed))
            return
        assert self._place is not None
        await self._place.run(self._place.client.change(self.id, change, model=model))

    async def _get_connection(self) -> ClusterConnection:
        """Return the place where it runs; start it if needed."""
        if self._is_disconnected:
            raise UsageError("The conversation is disconnected.", remedy="Make another object for it, with its id.")
        async with self._opening:
            if self._place is None:
                self._place = await self._open()
                self._is_begun = bool(self.id) and await self._place.client.exists(self.id)
        return self._place

    async def _open(self) -> ClusterConnection:
        if self._cluster is not None and is_server(self._cluster):
            return ClusterConnection.for_server(self._cluster, self._api_key, self._directory)
        if self._cluster is not None:
            return await ClusterConnection.connect(self._cluster)
        environment = {**self._environment, **build_environment(self._tools, self._environment)}
        return await ClusterConnection.start_private(
            self.id, self._spec.agent_spec(), self._spec.workspace_spec(), environment
        )

    async def _is_started(self) -> bool:
        """Return whether the conversation exists, without starting one."""
        if self._place is None and not self._is_disconnected and not self._is_named:
            return False
        await self._get_connection()
        return self._is_begun

    async def _get_client(self) -> ConversationClient:
        """Return the client of a started conversation; raises `NotBegun` otherwise."""
        place = await self._get_connection()
        if not self._is_begun:
            raise NotBegun
        return place.client
