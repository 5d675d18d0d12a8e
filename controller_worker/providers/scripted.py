"""Models without a provider.

`scripted/FILE` follows a script; docs/models.md describes the format. `replay/FILE` replays a recording that `deckhands
export` wrote. `silent` makes no call and costs nothing. It serves agents that decide without a model; for an agent
whose loop is a program in the sandbox, it returns the program's message and reported cost.

Holds: the request's iteration alone selects a turn, so a step repeated after a crash gets the same reply with the same
ids. A file named by a conversation lies below the operator's directory, even through links. Only regular files are
read, up to a size limit. Step N gets the N-th recorded reply, whatever the prompt is. Replies cost nothing.
Does not: read the messages, or use the network. The number of failures of a turn is kept in this process only: after a
crash, a turn with `times: 1` fails once more. Neither does it invent replies after the end of a recording.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from broker.contract import ModelReply
from broker.runtime import Clock, read_regular_file
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import MODEL_ERRORS, LLMConfigError
from controller_worker.providers.llm import CallUsage, Completion, Delta, ModelRequest
from controller_worker.providers.messages.messages import ToolCall
from controller_worker.providers.model_table import compute_call_cost_usd

SCRIPT_LIMIT_BYTES = 16 * 1024 * 1024


def read_model_file(path: Path, beneath: str | None, what: str, *, limit_bytes: int = SCRIPT_LIMIT_BYTES) -> bytes:
    """Return the content of a script or a recording.

    Args:
        beneath: the directory below which a conversation may name files, by relative or absolute path. None: the
            operator named this file.
        what: the kind of file, for errors.

    Raises:
        LLMConfigError: the file is unreadable, not a regular file, too large, or outside of the directory.
    """
    shown = ascii(str(path))[:300]
    try:
        if beneath is None:
            return read_regular_file(str(path.expanduser()), limit_bytes=limit_bytes)
        root = Path(beneath).expanduser().absolute()
        if path.is_absolute():
            if root not in path.parents:
                raise LLMConfigError(
                    f"The {what} {shown} is not in the directory of scripts of this cluster.",
                    remedy="Use a path relative to that directory.",
                )
            path = path.relative_to(root)
        return read_regular_file(str(path), limit_bytes=limit_bytes, beneath=str(root))
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise LLMConfigError(f"The {what} {shown} cannot be read: {why}.") from None


SCRIPTED_PREFIX = "scripted/"
WORKSPACE_PLACEHOLDER = "{workspace}"
FAILURES_REMEMBERED = 10_000


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ScriptedCall(_Part):
    """A tool call of a turn.

    Attributes:
        arguments: an object, or the raw text that the model writes, JSON or not.
        id: None generates one that is unique in the conversation.
    """

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)
    id: str | None = None


class ScriptedUsage(_Part):
    """Token counts of a turn; see `Usage`."""

    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)
    cache_read_tokens: int = Field(default=0, ge=0)
    cache_write_tokens: int = Field(default=0, ge=0)


class ScriptedError(_Part):
    """A failure before a turn succeeds.

    Attributes:
        code: one of `MODEL_ERRORS`.
        times: the number of attempts that fail first; None for all of them.
        text: the provider's error text.
        retry_after_seconds: the wait that the provider asks for.
    """

    code: str
    times: int | None = Field(default=1, ge=1)
    text: str = ""
    retry_after_seconds: float | None = Field(default=None, ge=0)

    @field_validator("code")
    @classmethod
    def _check_code(cls, code: str) -> str:
        if code not in MODEL_ERRORS:
            raise ValueError(f"{code!r} is not an error code; use one of {', '.join(MODEL_ERRORS)}")
        return code


class ScriptedTurn(_Part):
    """One reply.

    Attributes:
        stop_reason: None derives it from whether there are tool calls.
        cost_usd: None computes it from the configured prices per token, if there are any.
        latency_seconds: overrides the script's.
        critic: the critic's answer about this turn's finish; None accepts it.
    """

    text: str = ""
    tool_calls: tuple[ScriptedCall, ...] = ()
    thinking: str = ""
    stop_reason: str | None = None
    usage: ScriptedUsage = ScriptedUsage()
    cost_usd: float | None = Field(default=None, ge=0)
    latency_seconds: float | None = Field(default=None, ge=0)
    error: ScriptedError | None = None
    critic: ScriptedTurn | None = None


CRITIC_TURN = ScriptedTurn(text="ACCEPTED")
CONDENSATION_TURN = ScriptedTurn(text="What the script did so far was left out here.")
THE_END = "The script has ended."
FINISH_TURN = ScriptedTurn(tool_calls=(ScriptedCall(name="finish", arguments={"message": THE_END}),))
LAST_WORDS_TURN = ScriptedTurn(text=THE_END)
"""Replaces the last turn if the agent has no such tool."""


class Script(_Part):
    """The turns of a scripted model. After the last turn, the model finishes or says that the script has ended.

    Attributes:
        condensation: the reply to every request for a summary of the history.
    """

    description: str = ""
    latency_seconds: float = Field(default=0.0, ge=0)
    turns: tuple[ScriptedTurn, ...] = ()
    condensation: ScriptedTurn = CONDENSATION_TURN

    @classmethod
    def load(cls, path: Path, *, beneath: str | None = None) -> Self:
        """Read a script.

        Args:
            beneath: see `read_model_file`.

        Raises:
            LLMConfigError: the file is missing, not regular, too large, not JSON or not a script; the text names the
                place.
        """
        content = read_model_file(path, beneath, "model script")
        try:
            return cls.model_validate(json.loads(content))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole"
            complaint = str(first["msg"]).removeprefix("Value error, ")
            raise LLMConfigError(f"The model script {str(path)!r} is not a script: {where}: {complaint}.") from None
        except (ValueError, RecursionError) as error:
            raise LLMConfigError(f"The model script {str(path)!r} is not JSON: {error}.") from None

    def get_turn(self, iteration: int) -> ScriptedTurn:
        """Return the turn after this many replies, from 0."""
        return self.turns[iteration] if iteration < len(self.turns) else FINISH_TURN

    def find_turn(self, request: ModelRequest) -> ScriptedTurn:
        """Return the turn that answers a request."""
        if request.service == "critic":  # about the latest turn
            return self.get_turn(request.iteration - 1).critic or CRITIC_TURN
        if request.service != "agent":
            return self.condensation
        turn = self.get_turn(request.iteration)
        can_finish = any(tool.name == "finish" for tool in request.tools)
        return LAST_WORDS_TURN if turn is FINISH_TURN and not can_finish else turn


class ScriptedLLM:
    """The backend for `scripted/FILE`."""

    def __init__(self, config: LLMConfig, clock: Clock) -> None:
        self._config = config
        self._script = Script.load(Path(config.model.removeprefix(SCRIPTED_PREFIX)), beneath=config.scripts_dir)
        self._failures: dict[tuple[str, str, int], int] = {}
        self._clock = clock

    async def complete(self, request: ModelRequest) -> Completion:
        """Return the turn of this iteration after the script's latency. See `LLM.complete`."""
        began = self._clock.monotonic()
        turn = self._script.find_turn(request)
        latency = self._script.latency_seconds if turn.latency_seconds is None else turn.latency_seconds
        if latency:
            await asyncio.sleep(latency)
        if turn.error is not None:
            number = -1 if request.service == "condenser" else request.iteration
            self._fail(turn.error, (request.conversation_id, request.service, number))
        usage = CallUsage(**turn.usage.model_dump())
        if request.on_delta is not None:
            for piece in re.findall(r"\S+\s*|\s+", turn.text):
                request.on_delta(Delta("text", piece))
        return Completion(
            text=turn.text,
            tool_calls=write_tool_calls(turn.tool_calls, request.iteration, request.workspace),
            thinking_blocks=({"type": "thinking", "thinking": turn.thinking},) if turn.thinking else (),
            model=self._config.model,
            response_id=f"scripted-{request.conversation_id}-{request.iteration}",
            stop_reason=turn.stop_reason or ("tool_calls" if turn.tool_calls else "stop"),
            usage=usage,
            cost_usd=compute_call_cost_usd(self._config, None, usage) if turn.cost_usd is None else turn.cost_usd,
            latency_seconds=self._clock.monotonic() - began,
        )

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""

    def _fail(self, error: ScriptedError, step: tuple[str, str, int]) -> None:
        failures = self._failures.pop(step, 0)
        if error.times is not None and failures >= error.times:
            return
        if len(self._failures) >= FAILURES_REMEMBERED:
            del self._failures[next(iter(self._failures))]
        self._failures[step] = failures + 1
        raise MODEL_ERRORS[error.code](
            error.text or f"The script fails with {error.code}.",
            provider_text=error.text,
            retry_after_seconds=error.retry_after_seconds,
        )


def write_tool_calls(calls: Sequence[ScriptedCall], iteration: int, workspace: str | None) -> tuple[ToolCall, ...]:
    """Return a turn's calls as a model would write them, with `{workspace}` replaced unless it is None."""
    return tuple(
        ToolCall(
            id=call.id or f"call_{iteration + 1:04d}_{index}",
            name=call.name,
            arguments=_write_arguments(call.arguments, workspace),
        )
        for index, call in enumerate(calls)
    )


def _write_arguments(arguments: dict[str, Any] | str, workspace: str | None) -> str:
    if workspace is not None:
        arguments = _put_workspace(arguments, workspace)
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _put_workspace(value: Any, workspace: str) -> Any:
    if isinstance(value, str):
        return value.replace(WORKSPACE_PLACEHOLDER, workspace)
    if isinstance(value, dict):
        return {key: _put_workspace(item, workspace) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_workspace(item, workspace) for item in value]
    return value


SILENT_MODEL = "silent"


class SilentLLM:
    """The backend for the model `silent`."""

    async def complete(self, request: ModelRequest) -> Completion:
        """Return the answer in the request, or an empty one. See `LLM.complete`."""
        if isinstance(request.answer, Exception):
            raise request.answer
        if request.answer is not None:
            return request.answer
        return Completion(
            text="",
            tool_calls=(),
            thinking_blocks=(),
            model=SILENT_MODEL,
            response_id="",
            stop_reason="stop",
            usage=CallUsage(),
            cost_usd=0.0,
            latency_seconds=0.0,
        )

    async def aclose(self) -> None:
        """See `LLM.aclose`."""


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
