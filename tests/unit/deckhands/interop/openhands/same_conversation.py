"""The parts of a log that must be the same after an export and an import."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.contract.events import Event
from controller_worker.memory.conversation_memory import ConversationMemory
from controller_worker.memory.view import ViewFold
from controller_worker.providers.messages.messages import Message
from deckhands.interop.openhands.recordings import ImportFindings
from deckhands.interop.openhands.trajectory_export import to_trajectory
from deckhands.interop.openhands.trajectory_import import read_trajectory
from deckhands.interop.openhands.v0_kinds import EARLIER_EVENTS, PLACES

NUMBERS = {*EARLIER_EVENTS, *PLACES, "cause", "timestamp", "note_id"}


def again(events: Sequence[Event], folder: Path) -> tuple[list[Event], ImportFindings]:
    """Write a log as a trajectory, and read it."""
    path = folder / "trajectory.json"
    path.write_text(json.dumps(to_trajectory(events)[0], allow_nan=False))
    return read_trajectory(path, "again")


def fold_of(events: Sequence[Event]) -> ViewFold:
    fold = ViewFold()
    for event in events:
        fold.add(event)
    return fold


def shown(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the events that a model would see, without the numbers by which they name each other."""
    found = []
    for event in fold_of(events).view().events:
        wire = {key: value for key, value in event.wire().items() if key not in NUMBERS}
        wire.get("tool_call_metadata", {}).pop("reply_id", None)
        found.append(wire)
    return found


def linked(events: Sequence[Event]) -> list[tuple[int, str, int]]:
    """Return which place of the view answers or replaces which other one, and how."""
    view = fold_of(events).view().events
    places = {event.id: place for place, event in enumerate(view)}
    return [
        (place, name, places.get(other, -1))
        for place, event in enumerate(view)
        for name in ("cause", "replaces", "delegate_id")
        if (other := getattr(event, name, None))
    ]


def messages(events: Sequence[Event]) -> list[Message]:
    """Return the model's messages."""
    fold, memory = fold_of(events), ConversationMemory()
    for event in fold.list_events(fold.view().events):
        memory.add(event)
    return memory.messages()
