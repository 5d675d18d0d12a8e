"""Validation of task texts, and their titles, ids and output schemas."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from pydantic import BaseModel, ValidationError

from broker.contract import OutputSpec
from broker.runtime import UsageError
from broker.tools import check_output_schema

MAX_TASK_CHARS = 100_000
MAX_TITLE_CHARS = 80


def to_output_spec(output: type[BaseModel] | Mapping[str, Any]) -> OutputSpec:
    """Return the specification of an output, given as a Pydantic model or a JSON Schema.

    Raises:
        UsageError: the schema cannot be used.
    """
    schema = dict(output) if isinstance(output, Mapping) else output.model_json_schema()
    check_output_schema(schema)
    try:
        return OutputSpec(json_schema=schema)
    except ValidationError as error:
        raise UsageError(f"The schema of the output cannot be used: {error.errors()[0]['msg']}.") from error


def check_task(task: str, *, name: str = "task") -> None:
    """Check that a text can be given to an agent.

    Raises:
        UsageError: it is empty or longer than 100,000 characters.
    """
    if not task.strip():
        raise UsageError(f"The {name} is empty.", remedy="Describe the task.")
    if len(task) > MAX_TASK_CHARS:
        raise UsageError(
            f"The {name} has {len(task):,} characters; the limit is {MAX_TASK_CHARS:,}.",
            remedy="Put the long part into a file of the workspace, and name the file.",
        )


def derive_title(task: str) -> str:
    """Return a title for a task: its first line, cut to 80 characters."""
    line = task.strip().splitlines()[0].strip()
    return line if len(line) <= MAX_TITLE_CHARS else line[: MAX_TITLE_CHARS - 1] + "…"


def derive_conversation_id(idempotency_key: str) -> str:
    """Return the id of the conversation that belongs to an idempotency key.

    Raises:
        UsageError: the key is empty.
    """
    if not idempotency_key:
        raise UsageError("The idempotency key is empty.", remedy="Give one, or leave the option out.")
    return "k" + sha256(idempotency_key.encode("utf-8", "surrogatepass")).hexdigest()[:25]


def derive_task_conversation_id(task_id: str) -> str:
    """Return the id of the conversation for a Celery task `deckhands.run` or `deckhands.submit`.

    Raises:
        UsageError: the task's id is empty.
    """
    if not task_id:
        raise UsageError("The id of the Celery task is empty.", remedy="Give the id that Celery has returned for it.")
    return derive_conversation_id(f"celery:{task_id}")
