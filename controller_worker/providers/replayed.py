"""A model that replays a recording: `replay/FILE`, where FILE was written by `deckhands export`.

Holds: step N gets the N-th recorded reply, whatever the prompt is. Replies cost nothing.
Does not: look at the prompt, or make up replies after the end of the recording.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from broker.contract import ModelReply
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.llm import CallUsage, Completion, Delta, ModelRequest
from controller_worker.providers.messages.messages import ToolCall
from controller_worker.providers.model_files import read_model_file

REPLAY_PREFIX = "replay/"
KIND = "model.reply"
RECORDING_LIMIT_BYTES = 256 * 1024 * 1024


class ReplayedLLM:
    """The backend for `replay/FILE`."""

    def __init__(self, config: LLMConfig) -> None:
        """Read the recording.

        Raises:
            LLMConfigError: the file is missing or is not a recording.
        """
        self._path = Path(config.model.removeprefix(REPLAY_PREFIX))
        replies = _read(self._path, config.scripts_dir)
        self._replies = [reply for reply in replies if reply.service == "agent"]
        self._others = [reply for reply in replies if reply.service != "agent"]
        self._others_said: dict[str, int] = {}

    async def complete(self, request: ModelRequest) -> Completion:
        """Return the reply of this step. See `LLM.complete`.

        Raises:
            LLMConfigError: the recording has no reply for the step.
        """
        if request.service == "agent":
            reply = self._reply(self._replies, request.iteration)
        else:
            number = self._others_said.get(request.conversation_id, 0)
            reply = self._reply(self._others, number)
            self._others_said[request.conversation_id] = number + 1
        if request.on_delta is not None and reply.content:
            request.on_delta(Delta("text", reply.content))
        return Completion(
            text=reply.content,
            tool_calls=tuple(
                ToolCall(call.id, call.name, call.arguments, call.problem or "") for call in reply.tool_calls
            ),
            thinking_blocks=reply.thinking_blocks,
            model=reply.model,
            response_id=reply.response_id,
            stop_reason=reply.stop_reason,
            usage=CallUsage(**reply.usage.model_dump()),
            cost_usd=0.0,
            latency_seconds=0.0,
        )

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""

    def _reply(self, replies: Sequence[ModelReply], number: int) -> ModelReply:
        if number >= len(replies):
            raise LLMConfigError(
                f"The recording {str(self._path)!r} ends after {len(replies)} replies; "
                f"this would be number {number + 1}."
            )
        return replies[number]


def _read(path: Path, beneath: str | None) -> list[ModelReply]:
    content = read_model_file(path, beneath, "recording", limit_bytes=RECORDING_LIMIT_BYTES)
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise LLMConfigError(f"The recording {str(path)!r} was not written by `deckhands export`.") from None
    replies: list[ModelReply] = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            if fields["kind"] == KIND:
                known = {name: value for name, value in fields.items() if name in ModelReply.model_fields}
                replies.append(ModelReply.model_validate(known))
        except (ValueError, LookupError, TypeError, RecursionError, ValidationError):
            raise LLMConfigError(
                f"The recording {str(path)!r} was not written by `deckhands export`: line {number} is not an event."
            ) from None
    return replies
