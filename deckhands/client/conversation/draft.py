"""What a conversation is to be, until its first message begins it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from broker.contract.events import AgentSpec, Limits, WorkspaceSpec
from broker.contract.policies import ConfirmationPolicy
from broker.contract.specs import Tenancy
from broker.runtime.errors import UsageError
from deckhands.client.client import Client
from deckhands.client.remote.remote_client import RemoteClient
from deckhands.client.tasks import inputs
from deckhands.client.tasks.images import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What `Client.submit` gets besides the task.

    Attributes:
        directory: the one of this machine that was named as the workspace; None: none was.
        tools: keys or patterns.
    """

    agent: AgentSpec
    workspace: WorkspaceSpec
    upload: bytes | None = None
    directory: Path | None = None
    limits: Limits | None = None
    tools: tuple[str, ...] = ()
    output: type[BaseModel] | Mapping[str, Any] | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    title: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    tenancy: Tenancy | None = None

    def with_model(self, model: str) -> Draft:
        """Return it with another model."""
        return replace(self, agent=inputs.agent_in(self.agent, model))

    def with_policy(self, policy: ConfirmationPolicy) -> Draft:
        """Return it with another confirmation policy."""
        return replace(self, agent=self.agent.model_copy(update={"confirmation": policy}))

    async def begin(
        self, client: Client | RemoteClient, conversation_id: str, task: str, images: Sequence[Image]
    ) -> str:
        """Begin the conversation, and return its id; raises what `Client.submit` does. Idempotent under the same id.

        Args:
            conversation_id: that it gets, unless a server chooses it.
        """
        chosen: dict[str, Any] = {"conversation_id": conversation_id}
        if isinstance(client, RemoteClient):
            chosen = {"directory": self.directory}
        return await client.submit(
            task,
            agent=self.agent,
            workspace=self.workspace,
            upload=self.upload,
            images=images,
            limits=self.limits,
            tools=self.tools,
            output=self.output,
            secrets=self.secrets,
            headless=False,
            title=self.title,
            labels=self.labels,
            tenancy=self.tenancy,
            idempotency_key=f"conversation:{conversation_id}",
            **chosen,
        )


def policy_of(policy: ConfirmationPolicy | str) -> ConfirmationPolicy:
    """Return the confirmation policy that is meant.

    Raises:
        UsageError: it is none.
    """
    if isinstance(policy, ConfirmationPolicy):
        return policy
    try:
        return ConfirmationPolicy(mode=policy)
    except ValueError as error:
        raise UsageError(
            f"The confirmation policy {ascii(policy)[:100]} cannot be used.",
            remedy="Pass 'never', 'always', 'risky', the name of a plug-in, or a ConfirmationPolicy.",
        ) from error
