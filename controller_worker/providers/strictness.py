"""Decides whether a client's calls use strict schemas, and falls back if the provider refuses them.

Holds: a request refused as invalid is sent once more without strict schemas. If that succeeds, all later requests of
the client are not strict. A batched call is never strict, because its refusal comes hours later.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from controller_worker.providers.config import LLMConfig, Toggle
from controller_worker.providers.errors import BadRequestError
from controller_worker.providers.llm import ModelRequest

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Strict:
    """The strict parts of one call: its tools, and the schema of a text reply (None for none)."""

    tools: bool = False
    output: Mapping[str, Any] | None = None


LOOSE = Strict()


class Strictness:
    """The strictness of one client's calls."""

    def __init__(self, config: LLMConfig, *, is_known: bool) -> None:
        """Read the settings; `is_known` means that the table lists the model as supporting strict schemas."""
        self._model = config.model
        self._tools = _is_wanted(config.strict_tools, is_known=is_known)
        chosen = config.completion_kwargs or {}
        form = chosen.get("output_config")
        has_form = "response_format" in chosen or (isinstance(form, dict) and "format" in form)
        self._output = _is_wanted(config.structured_output, is_known=is_known) and not has_form

    def of(self, request: ModelRequest) -> Strict:
        """Return the strict parts of a call."""
        if request.carry is not None:
            return LOOSE
        return Strict(self._tools and bool(request.tools), request.output_schema if self._output else None)

    async def ask(self, request: ModelRequest, ask: Callable[[Strict], Awaitable[Answer]]) -> Answer:
        """Call `ask` with strict schemas, if wanted, and without them if refused. Raises the same errors as `ask`."""
        strict = self.of(request)
        if strict == LOOSE:
            return await ask(strict)
        try:
            return await ask(strict)
        except BadRequestError as error:
            refusal = error
        answer = await ask(LOOSE)
        self._tools = self._output = False
        _log.warning("%s does not accept strict schemas; they are no longer sent: %s", self._model, refusal)
        return answer


def _is_wanted(wish: Toggle, *, is_known: bool) -> bool:
    return wish == "on" or (wish == "auto" and is_known)
