"""Whether a client's calls hold the model to schemas, and what happens where the provider refuses that.

Holds: a request that is refused for its form is sent once more without strict schemas; if that works, all later ones
of the client are sent so. A call in a batch is never strict, because its refusal comes hours later.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from controller_worker.providers.config import LLMConfig, Wish
from controller_worker.providers.errors import BadRequestError
from controller_worker.providers.llm import ModelRequest

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Strict:
    """What of one call is strict: its tools, and the schema of a reply in words; None for no such schema."""

    tools: bool = False
    output: Mapping[str, Any] | None = None


LOOSE = Strict()


class Strictness:
    """Of the calls of one client."""

    def __init__(self, config: LLMConfig, *, is_known: bool) -> None:
        """Read the settings; `is_known` says whether the table knows that the model takes strict schemas."""
        self._model = config.model
        self._tools = _is_wanted(config.strict_tools, is_known=is_known)
        chosen = config.completion_kwargs or {}
        form = chosen.get("output_config")
        has_form = "response_format" in chosen or (isinstance(form, dict) and "format" in form)
        self._output = _is_wanted(config.structured_output, is_known=is_known) and not has_form

    def of(self, request: ModelRequest) -> Strict:
        """Return what of a call is strict."""
        if request.carry is not None:
            return LOOSE
        return Strict(self._tools and bool(request.tools), request.output_schema if self._output else None)

    async def ask(self, request: ModelRequest, ask: Callable[[Strict], Awaitable[Answer]]) -> Answer:
        """Ask strictly, if that is wanted; and otherwise if that is refused. Raises what `ask` does."""
        strict = self.of(request)
        if strict == LOOSE:
            return await ask(strict)
        try:
            return await ask(strict)
        except BadRequestError as error:
            refusal = error
        answer = await ask(LOOSE)
        self._tools = self._output = False
        _log.warning("%s does not take strict schemas; they are not sent any more: %s", self._model, refusal)
        return answer


def _is_wanted(wish: Wish, *, is_known: bool) -> bool:
    return wish == "on" or (wish == "auto" and is_known)
