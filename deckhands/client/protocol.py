"""The client interface that `Conversation` needs, whether it runs on a cluster, in a private store or behind a server.

Holds: `Client` and `RemoteClient` have the same methods, so an object, an example and a test work with both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from broker.contract import DEFAULT_TIMEOUT_SECONDS, Event, MessagePolicy
from broker.log import LivePiece
from broker.secrets import SecretValue
from deckhands.client.changing import Change
from deckhands.client.reading.summary import Summary
from deckhands.client.reasons.link import Why
from deckhands.client.remote.remote_files import RemoteFiles
from deckhands.client.tasks.spec import TaskSpec
from deckhands.client.tasks.tasks import Image
from deckhands.client.trajectories import Trajectory
from deckhands.client.transfers.commands import CommandResult
from deckhands.client.transfers.files import WorkspaceFiles
from deckhands.client.verification import Verification


class ConversationClient(Protocol):
    """A client of conversations, local or remote. `Client` documents each method."""

    @property
    def files(self) -> WorkspaceFiles | RemoteFiles:
        """The files of the conversations' workspaces."""
        ...

    async def submit(
        self, task: TaskSpec, *, upload: bytes | None, conversation_id: str | None, idempotency_key: str
    ) -> str:
        """Start a conversation and return its id, which a server chooses."""
        ...

    async def exists(self, conversation_id: str) -> bool:
        """Return whether there is a conversation."""
        ...

    async def last_id(self, conversation_id: str) -> int:
        """Return the id of its last event."""
        ...

    async def events(self, conversation_id: str, *, after: int = 0, is_whole: bool = False) -> list[Event]:
        """Return its events."""
        ...

    def tail(
        self, conversation_id: str, *, after: int = 0, is_whole: bool = False, is_endless: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Yield its events, then each new one; see `Client.tail`."""
        ...

    async def announce(self, conversation_id: str) -> None:
        """Announce a reader of replies as they are written."""
        ...

    def pieces(self, conversation_id: str) -> AsyncGenerator[LivePiece]:
        """Yield the pieces of replies while they are written."""
        ...

    async def summary(self, conversation_id: str) -> Summary:
        """Return its summary."""
        ...

    async def why(self, conversation_id: str) -> Why:
        """Return the reasons for its current state."""
        ...

    async def trajectory(self, conversation_id: str) -> Trajectory:
        """Return the exact tokens of a rollout."""
        ...

    async def verify(self, conversation_id: str) -> Verification:
        """Check its log against the specification of a log."""
        ...

    async def send_message(
        self,
        conversation_id: str,
        text: str,
        *,
        images: Sequence[Image] = (),
        model: str | None = None,
        double_texting: MessagePolicy | None = None,
    ) -> None:
        """Send a message to its agent."""
        ...

    async def pause(self, conversation_id: str) -> None:
        """Ask for a pause."""
        ...

    async def resume(self, conversation_id: str, *, model: str | None = None) -> None:
        """Continue a paused, stopped or failed conversation."""
        ...

    async def interrupt(self, conversation_id: str) -> None:
        """Stop the current step, and pause."""
        ...

    async def confirm(
        self, conversation_id: str, *, action_id: int | None = None, edited: Mapping[str, Any] | None = None
    ) -> None:
        """Run the action that awaits confirmation."""
        ...

    async def reject(self, conversation_id: str, *, reason: str = "", action_id: int | None = None) -> None:
        """Refuse the action that awaits confirmation."""
        ...

    async def cancel(self, conversation_id: str, *, wait_seconds: float | None = None) -> Summary:
        """Stop the conversation and all its running work."""
        ...

    async def close(self, conversation_id: str) -> None:
        """Refuse further messages, permanently."""
        ...

    async def execute(
        self,
        conversation_id: str,
        command: str,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        by: str = "",
        reason: str = "",
    ) -> CommandResult:
        """Run a command in its workspace beside its agent."""
        ...

    async def change(self, conversation_id: str, change: Change, *, model: str | None = None) -> None:
        """Change the conversation from its next step on."""
        ...

    async def set_secrets(self, conversation_id: str, secrets: Mapping[str, SecretValue]) -> None:
        """Add secrets, or replace those of the same names."""
        ...

    async def fork(
        self, conversation_id: str, *, at: int | None = None, model: str | None = None, title: str = ""
    ) -> str:
        """Start a conversation from a copy of another's events, and return its id."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...
