"""Conversations in an editor: an agent of the Agent Client Protocol on standard input and output.

Holds: the id of a session is that of its conversation, so any program can load the session again. The editor shows the
agent's questions to the user; until it answers, nothing is rejected and nothing is confirmed.
Does not: use the files and terminals of the editor; an agent works in its own workspace, the directory of the session.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import acp
from acp.schema import (
    AgentCapabilities,
    AllowedOutcome,
    EmbeddedResourceContentBlock,
    ImageContentBlock,
    Implementation,
    InitializeResponse,
    LoadSessionResponse,
    NewSessionResponse,
    PermissionOption,
    PromptCapabilities,
    PromptResponse,
    ResourceContentBlock,
    TextContentBlock,
    TextResourceContents,
)

from broker.contract import AgentState, Event, MCPAction, RiskyAction, add_remedy, asks_for_server
from broker.runtime import DeckhandsError
from deckhands.client import AsyncConversation, ExitCode, Summary
from deckhands.server.protocols.editor_updates import SessionUpdates, confirmation_call

MAX_SESSIONS = 16
INVALID_PARAMS, INTERNAL_ERROR = -32_602, -32_603
"""JSON-RPC error codes; an editor shows the message."""
ALLOW, REJECT = "allow", "reject"
OPTIONS = [
    PermissionOption(option_id=ALLOW, name="Allow", kind="allow_once"),
    PermissionOption(option_id=REJECT, name="Reject", kind="reject_once"),
]
NO_FORM = "The editor cannot show the form of the MCP server, so the user has not answered it."
REFUSED = "The user has refused this action."

_log = logging.getLogger(__name__)
Stop = Literal["end_turn", "max_turn_requests", "refusal", "cancelled"]
Make = Callable[[str, str | None], AsyncConversation[Any]]
"""Creates the conversation of a session from its directory, and its id if it exists."""


class EditorAgent:
    """All sessions of one editor."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._sessions: dict[str, AsyncConversation[Any]] = {}
        self._updates: defaultdict[str, SessionUpdates] = defaultdict(SessionUpdates)
        self._editor: acp.Client

    def on_connect(self, conn: acp.Client) -> None:
        """Store the connection to the editor."""
        self._editor = conn

    async def initialize(self, protocol_version: int, **_: Any) -> InitializeResponse:
        """Return the agent's name and capabilities."""
        able = PromptCapabilities(image=True, embedded_context=True)
        return InitializeResponse(
            protocol_version=min(protocol_version, acp.PROTOCOL_VERSION),
            agent_capabilities=AgentCapabilities(load_session=True, prompt_capabilities=able),
            agent_info=Implementation(name="deckhands", title="Deckhands", version="1"),
        )

    async def new_session(self, cwd: str, mcp_servers: Sequence[Any] | None = None, **_: Any) -> NewSessionResponse:
        """Create a session for a directory. The conversation starts with the first prompt."""
        talk = self._open(cwd, None, mcp_servers)
        self._sessions[talk.id] = talk
        return NewSessionResponse(session_id=talk.id)

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Sequence[Any] | None = None, **_: Any
    ) -> LoadSessionResponse:
        """Replay an earlier conversation so that it can be continued."""
        talk = self._sessions.get(session_id) or self._open(cwd, session_id, mcp_servers)
        try:
            for event in await talk.events():
                await self._show(session_id, event, is_replayed=True)
        except DeckhandsError as error:
            if session_id not in self._sessions:
                await talk.disconnect()
            raise _refusal(error) from error
        self._sessions[session_id] = talk
        return LoadSessionResponse()

    async def prompt(self, session_id: str, prompt: Sequence[Any], **_: Any) -> PromptResponse:
        """Send the user's prompt, and show the agent's work until the conversation has settled."""
        if session_id not in self._sessions:
            raise _invalid(f"There is no session {ascii(session_id)[:100]}.")
        talk = self._sessions[session_id]
        text, images = content_of(prompt)
        try:
            await talk.send_message(text, images=images)
            while True:
                last = await self._show_until_settled(talk)
                summary = await talk.state()
                if last is None or summary.state != AgentState.AWAITING_USER_CONFIRMATION:
                    return PromptResponse(stop_reason=_stop(summary))
                if not await self._ask_user(talk, last):
                    return PromptResponse(stop_reason="cancelled")
        except DeckhandsError as error:
            raise _refusal(error) from error

    async def cancel(self, session_id: str, **_: Any) -> None:
        """Stop the running work; the next prompt continues the conversation."""
        if (talk := self._sessions.get(session_id)) is not None:
            with contextlib.suppress(DeckhandsError):  # it is already over
                await talk.interrupt()

    async def aclose(self) -> None:
        """Stop everything that was started for the sessions."""
        for talk in self._sessions.values():
            await talk.disconnect()

    def _open(self, cwd: str, session_id: str | None, servers: Sequence[Any] | None) -> AsyncConversation[Any]:
        if len(self._sessions) >= MAX_SESSIONS:
            raise _invalid(f"There are {MAX_SESSIONS} sessions; end this program.")
        if servers:
            _log.warning("MCP servers of the editor are left out; tool workers offer those of their configuration")
        try:
            return self._make(cwd, session_id)
        except DeckhandsError as error:
            raise _refusal(error) from error

    async def _show_until_settled(self, talk: AsyncConversation[Any]) -> RiskyAction | None:
        """Show events until the conversation has settled; return the agent's last action."""
        last = None
        async with contextlib.aclosing(talk.stream()) as events:
            async for event in events:
                assert isinstance(event, Event)
                await self._show(talk.id, event)
                last = event if isinstance(event, RiskyAction) else last
        return last

    async def _show(self, session_id: str, event: Event, *, is_replayed: bool = False) -> None:
        for update in self._updates[session_id].of(event, is_replayed=is_replayed):
            await self._editor.session_update(session_id, update)

    async def _ask_user(self, talk: AsyncConversation[Any], action: RiskyAction) -> bool:
        """Ask the user to answer the agent's question. Returns False if they cancelled the turn instead."""
        answer = await self._editor.request_permission(talk.id, confirmation_call(action), OPTIONS)
        if not isinstance(answer.outcome, AllowedOutcome):
            return False
        if isinstance(action, MCPAction) and asks_for_server(action):
            # An editor has no forms: the user can only agree to visit an address.
            has_form = any(question.fields is not None for question in action.questions)
            if answer.outcome.option_id == ALLOW and not has_form:
                await talk.confirm(action_id=action.id, edited={"answers": {}})
            else:
                await talk.reject(action_id=action.id, reason=NO_FORM if has_form else REFUSED)
        elif answer.outcome.option_id == ALLOW:
            await talk.confirm(action_id=action.id)
        else:
            await talk.reject(action_id=action.id, reason=REFUSED)
        return True


def content_of(blocks: Sequence[Any]) -> tuple[str, list[bytes]]:
    """Return the text and the pictures of a prompt.

    Raises:
        RequestError: the prompt has other content, or no text.
    """
    texts: list[str] = []
    images: list[bytes] = []
    for block in blocks:
        match block:
            case TextContentBlock():
                texts.append(block.text)
            case ResourceContentBlock():
                texts.append(f"[{block.name}]({block.uri})")
            case EmbeddedResourceContentBlock(resource=TextResourceContents() as resource):
                texts.append(f"{resource.uri}:\n{resource.text}")
            case ImageContentBlock():
                try:
                    images.append(base64.b64decode(block.data, validate=True))
                except binascii.Error:
                    raise _invalid("A picture is not in base64.") from None
            case _:
                raise _invalid("A prompt may have texts, resources and pictures.")
    text = "\n".join(texts).strip()
    if not text:
        raise _invalid("The prompt has no text.")
    return text, images


def _stop(summary: Summary) -> Stop:
    """Return why a turn has ended.

    Raises:
        RequestError: the conversation has ended in an error.
    """
    if summary.exit_code is ExitCode.LIMIT:
        return "max_turn_requests"
    if summary.state == AgentState.ERROR:
        raise acp.RequestError(
            INTERNAL_ERROR, add_remedy(summary.last_error, summary.remedy), {"code": summary.error_code}
        )
    if summary.state == AgentState.REJECTED:
        return "refusal"
    return "cancelled" if summary.state in (AgentState.STOPPED, AgentState.PAUSED) else "end_turn"


def _invalid(reason: str) -> acp.RequestError:
    return acp.RequestError(INVALID_PARAMS, reason)


def _refusal(error: DeckhandsError) -> acp.RequestError:
    return acp.RequestError(INVALID_PARAMS, f"{error.message} {error.remedy}".strip(), {"code": error.code})
