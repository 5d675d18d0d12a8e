"""The structure of a whole V0 trajectory: the events of delegates, and the actions with results.

OpenHands writes the events of a delegate into its parent's stream, between the delegating action and the observation of
its result (OpenHands 5), and leaves them out when it reads the parent's history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from deckhands.interop.openhands.v0_kinds import EXTENSION

Fields = Mapping[str, Any]

WITHOUT_PLACE = {
    "action": {"null", "change_agent_state", "condensation", "condensation_request"},
    "observation": {"null", "agent_state_changed"},
}
"""Events that OpenHands does not show to a model (OpenHands 4.2, 8)."""
DELEGATED_TASK = "TASK: "


@dataclass(frozen=True, slots=True)
class TrajectoryShape:
    """The structure, as positions in the sequence of records.

    Attributes:
        is_ours: Deckhands has written it.
        of_delegates: events of delegates.
        delegate_of: the delegating action, by the observation of a delegate's result.
        answered: actions that some observation answers.
        has_recalls: whether recalls are recorded at all.
    """

    is_ours: bool
    of_delegates: frozenset[int]
    delegate_of: Mapping[int, int]
    answered: frozenset[int]
    has_recalls: bool

    @classmethod
    def of(cls, records: Sequence[Fields]) -> TrajectoryShape:
        """Analyze a trajectory."""
        is_ours = any(EXTENSION in record for record in records)
        levels = [0] * (len(records) + 1)
        results: dict[int, int] = {}
        asked: list[int] = []
        by_id: dict[int, int] = {}
        answered: set[int] = set()
        for index, record in enumerate(records):
            family, name = parse_record_name(record)
            if (family, name) == ("action", "delegate"):
                asked.append(index)
            elif (family, name) == ("observation", "delegate") and asked and not is_ours:
                results[index] = asked.pop()
                answered.add(results[index])
                if _begins_delegate(records[results[index] + 1]):
                    levels[results[index] + 1] += 1
                    levels[index] -= 1
            cause = record.get("cause")
            if family == "observation" and name != "agent_state_changed" and type(cause) is int and cause in by_id:
                answered.add(by_id[cause])
            if type(record.get("id")) is int:
                by_id[record["id"]] = index
        has_recalls = any(record.get("action") == "recall" for record in records)
        inner = frozenset(index for index, level in enumerate(accumulate(levels)) if level > 0)
        return cls(is_ours, inner, results, frozenset(answered), has_recalls)


def parse_record_name(record: Fields) -> tuple[str, str]:
    """Return the family and the name of a recorded event; no name if it has none."""
    for family in ("action", "observation"):
        if family in record:
            return family, record[family] if isinstance(record[family], str) else ""
    return "", ""


def is_hidden_from_model(record: Fields, family: str, name: str) -> bool:
    """Return whether OpenHands never shows an event to a model."""
    own = record.get("args" if family == "action" else "extras")
    return name in WITHOUT_PLACE.get(family, ()) or (isinstance(own, dict) and own.get("hidden") is True)


def _begins_delegate(record: Fields) -> bool:
    """Return whether an event is the first of a delegate: its system message, or in the first versions its task."""
    args = record.get("args")
    text = args.get("content") if isinstance(args, dict) else None
    is_task = record.get("action") == "message" and isinstance(text, str) and text.startswith(DELEGATED_TASK)
    return record.get("action") == "system" or is_task
