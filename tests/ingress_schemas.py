"""JSON Schemas of producers' messages and answers, generated from the code; `make docs` writes docs/schemas."""

from __future__ import annotations

import json
from typing import Any

from deckhands.client.tasks.spec import TaskSpec
from deckhands.ingress.inbox import InboxRequest
from deckhands.ingress.replies import NAME, NUMBERS, VERSION

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string"}


def schemas() -> dict[str, dict[str, Any]]:
    """Return each schema under the name of its file."""
    return {
        "task-request.json": {"$schema": DIALECT, **TaskSpec.model_json_schema()},
        "inbox-request.json": {"$schema": DIALECT, **InboxRequest.model_json_schema()},
        "inbox-entry.json": _object(
            "An entry of deck:inbox: its fields, all of them texts.",
            {
                "v": {"const": VERSION},
                "request": {**_TEXT, "description": "JSON, see inbox-request.json"},
                "reply_to": {**_TEXT, "pattern": f"^{NAME.pattern}$"},
            },
            ["v", "request"],
        ),
        "reply-entry.json": _object(
            "An entry of deck:replies:<name>: its fields, all of them texts.",
            {
                "v": {"const": VERSION},
                "id": {**_TEXT, "description": "the producer's own id, or that of the entry"},
                "event": {"enum": list(NUMBERS)},
                "n": {"enum": sorted({str(number) for number in NUMBERS.values()})},
                "conversation_id": {**_TEXT, "description": "empty if nothing has begun"},
                "json": {**_TEXT, "description": "JSON: the reason of a rejection, or the summary"},
            },
            ["v", "id", "event", "n", "conversation_id", "json"],
        ),
        "rejection.json": _object(
            "Why an entry was rejected.",
            {
                **dict.fromkeys(("code", "message", "remedy"), _TEXT),
                "retry_after_seconds": {
                    "type": "number",
                    "description": "only with the code admission_refused: when to send the entry again",
                },
            },
            ["code", "message", "remedy"],
        ),
    }


def written_schema(name: str) -> str:
    """Return a schema from its file."""
    return json.dumps(schemas()[name], indent=2, sort_keys=True) + "\n"


def _object(title: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    shape = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"$schema": DIALECT, "title": title, **shape}
