"""Skips work of litellm and the openai SDK whose result is unused. The bytes of requests stay the same.

The SDK walks the whole history to rename fields by their types, although no field of a chat completion is renamed. That
is two thirds of the CPU of a step with 60 messages. litellm assembles a record of each call for its callbacks, which we
disable (`no-log`), and computes a price, which we compute ourselves.

Holds: a library without one of these functions works as before, only slower.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

COMPLETIONS = "openai.resources.chat.completions.completions"
LOGGING = "litellm.litellm_core_utils.litellm_logging"


def install_shortcuts() -> None:
    """Replace the functions, for the whole process. Call this after the import of litellm. Idempotent."""
    completions: Any = importlib.import_module(COMPLETIONS)
    if hasattr(completions, "async_maybe_transform"):
        completions.async_maybe_transform = _keep_given
    record = getattr(importlib.import_module(LOGGING), "Logging", None)
    for name, shortcut in (
        ("dispatch_success_handlers", _record_nothing),
        ("async_success_handler", _record_nothing),
        ("response_cost_calculator", _compute_nothing),
    ):
        if hasattr(record, name):
            setattr(record, name, shortcut)


async def _keep_given(body: Mapping[str, Any], _expected: object) -> dict[str, Any]:
    """Return the given fields of a request, as the SDK's function does."""
    sdk: Any = importlib.import_module(COMPLETIONS)
    return {name: value for name, value in body.items() if not isinstance(value, (sdk.Omit, sdk.NotGiven))}


async def _record_nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _compute_nothing(*_: object, **__: object) -> None:
    """Return no price."""
