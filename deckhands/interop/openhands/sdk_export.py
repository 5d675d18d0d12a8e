"""A log as a conversation directory of OpenHands' SDK (V1): its files, which the SDK opens and `sdk_directory` reads.

Holds: `base_state.json` has, under `agent_state`, data that only Deckhands reads: the agent's state, and the events
that became messages in the SDK. A reader validates it, because any program can write a directory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from broker.contract import Event, Observation
from deckhands.interop.openhands.sdk_directory import STATE_FILE
from deckhands.interop.openhands.sdk_events import to_sdk_conversation_id
from deckhands.interop.openhands.sdk_kinds import Fields
from deckhands.interop.openhands.sdk_state import SdkConversation, SdkPlace
from deckhands.interop.openhands.v0_kinds import EXTENSION


def to_sdk_directory_name(conversation_id: str) -> str:
    """Return the name by which the SDK finds a conversation in its `persistence_dir`."""
    return UUID(to_sdk_conversation_id(conversation_id)).hex


def to_sdk_files(conversation_id: str, events: Sequence[Event]) -> tuple[dict[str, str], Counter[str]]:
    """Return the files of a conversation directory by their paths in it, and the counts of events left out, by kind.

    Args:
        events: whole, from the first one on.
    """
    conversation = SdkConversation(conversation_id)
    notes: Fields = {}
    written: list[Fields] = []
    for event in events:
        written += conversation.add(event)
        names = conversation.translation.find_notes(event.id)
        if isinstance(event, Observation) and names:
            notes[names[0]] = event.wire()
    written += conversation.end()
    workspace = conversation.created.workspace.path if conversation.created is not None else None
    state = conversation.to_state(SdkPlace(workspace or "workspace"))
    state["agent_state"][EXTENSION]["notes"] = notes
    files = {STATE_FILE: _to_json({name: value for name, value in state.items() if value is not None})}
    for number, fields in enumerate(written):
        files[f"events/event-{number:05}-{fields['id']}.json"] = _to_json(fields)
    return files, conversation.translation.left_out


def _to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
