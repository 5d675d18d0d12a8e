"""The exact tokens of a rollout, both of its prompts and of the model's samples, in segments.

Holds: the tokens come from the log's records, never from text. Each segment is one sequence of tokens that a model has
continued. If it could not be continued, the next segment starts, with the reason.
Does not: read delegates; each is a separate conversation with its own trajectory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.contract import (
    TOKENS_BLOB,
    UNKNOWN_VERSION,
    Event,
    ModelReply,
    SegmentStarted,
    TokenRecord,
    find_rolled_back,
)
from broker.log import EventLog
from broker.runtime import CorruptEntry
from deckhands.client.archive.archive import Archive
from deckhands.client.archive_operations import load_binary


@dataclass(frozen=True, slots=True)
class SegmentReply:
    """A reply in a segment: its event, and where its sampled tokens are."""

    event_id: int
    start: int
    end: int


@dataclass(slots=True)
class Segment:
    """One sequence of tokens that a model has continued.

    Attributes:
        tokens: of prompts and replies, in order.
        mask: 1 for a sampled token, 0 for a token of a prompt; only sampled tokens count for the loss.
        logprobs: the log-probability of each sampled token; 0 for a token of a prompt, NaN if the server named none.
        versions: the policy version of each sampled token; -1 for a token of a prompt, or if the server named none.
        replies: the replies in it.
        reason: why it does not continue the previous segment; empty for the first.
    """

    tokens: array[int] = field(default_factory=lambda: array("i"))
    mask: array[int] = field(default_factory=lambda: array("b"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    replies: list[SegmentReply] = field(default_factory=list)
    reason: str = ""

    def add(self, event_id: int, record: TokenRecord) -> None:
        """Append the record of the next reply."""
        prompt, sampled = len(record.prompt), len(record.sampled)
        self.tokens += record.prompt + record.sampled
        self.mask += array("b", bytes(prompt) + b"\x01" * sampled)
        self.logprobs += array("f", bytes(4 * prompt)) + record.logprobs
        self.versions += array("i", [UNKNOWN_VERSION]) * prompt
        for count, version in record.versions:
            self.versions += array("i", [version]) * count
        self.replies.append(SegmentReply(event_id, len(self.tokens) - sampled, len(self.tokens)))

    def as_json(self) -> dict[str, Any]:
        """Return the segment as plain JSON; an unknown log-probability is null."""
        return {
            "tokens": self.tokens.tolist(),
            "mask": self.mask.tolist(),
            "logprobs": [None if one != one else one for one in self.logprobs],  # noqa: PLR0124  (NaN)
            "versions": self.versions.tolist(),
            "replies": [{"event_id": one.event_id, "start": one.start, "end": one.end} for one in self.replies],
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Segment:
        """Read a segment from plain JSON."""
        return cls(
            array("i", fields["tokens"]),
            array("b", fields["mask"]),
            array("f", [float("nan") if one is None else one for one in fields["logprobs"]]),
            array("i", fields["versions"]),
            [SegmentReply(one["event_id"], one["start"], one["end"]) for one in fields["replies"]],
            fields["reason"],
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The tokens of one conversation."""

    conversation_id: str
    segments: Sequence[Segment] = ()

    @property
    def sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(sum(segment.mask) for segment in self.segments)

    @property
    def version_bounds(self) -> tuple[int, int] | None:
        """The oldest and the newest policy version that sampled a token; None if none is known."""
        known = set(self._list_versions())
        return (min(known), max(known)) if known else None

    def as_json(self) -> dict[str, Any]:
        """Return the trajectory as plain JSON."""
        return {"conversation_id": self.conversation_id, "segments": [one.as_json() for one in self.segments]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Trajectory:
        """Read a trajectory from plain JSON."""
        return cls(fields["conversation_id"], [Segment.from_json(one) for one in fields["segments"]])

    def _list_versions(self) -> Iterator[int]:
        for segment in self.segments:
            yield from (one for one in set(segment.versions) if one != UNKNOWN_VERSION)


async def read_trajectory(
    log: EventLog, archive: Archive | None, conversation_id: str, events: Sequence[Event]
) -> Trajectory:
    """Return the trajectory of a conversation's events. Replies that were rolled back are left out.

    Raises:
        CorruptEntry: a record is missing or damaged, or does not continue the previous one.
    """
    contents = await load_binary(log, archive, conversation_id, events)
    rolled_back = find_rolled_back(events)
    reasons = {event.reply_id: event.reason for event in events if isinstance(event, SegmentStarted)}
    segments: list[Segment] = []
    for event in events:
        ref = (event.blobs or {}).get(TOKENS_BLOB) if isinstance(event, ModelReply) else None
        if not isinstance(event, ModelReply) or event.tokens is None or ref is None or event.id in rolled_back:
            continue
        if event.tokens.start == 0 or not segments:
            segments.append(Segment(reason=reasons.get(event.id, "")))
        if event.tokens.start != len(segments[-1].tokens):
            raise CorruptEntry(
                f"The tokens of event {event.id} of {conversation_id} start at {event.tokens.start}, "
                f"but the segment has {len(segments[-1].tokens)}."
            )
        segments[-1].add(event.id, TokenRecord.from_bytes(contents[ref.sha256]))
    return Trajectory(conversation_id, segments)
