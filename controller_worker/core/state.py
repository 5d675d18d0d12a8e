"""State: the controller's knowledge of a conversation. A fold of its log, without the history.

Holds: one part per concern; plain values only, so that a snapshot is the state and nothing else. Immutable.
Does not: hold the View of the model, which is read from the log (`memory`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from controller_worker.core.concerns.acceptance import Acceptance
from controller_worker.core.concerns.confirmation import ConfirmationProgress
from controller_worker.core.concerns.delegation import Delegation
from controller_worker.core.concerns.double_texting import DoubleTexting
from controller_worker.core.concerns.greeting import Greeting
from controller_worker.core.concerns.inbox import MessageInbox
from controller_worker.core.concerns.lifecycle import Lifecycle
from controller_worker.core.concerns.limits import ConversationUsage
from controller_worker.core.concerns.long_work import LongWork
from controller_worker.core.concerns.loops import Loops
from controller_worker.core.concerns.model_calls import ModelCalls
from controller_worker.core.concerns.notes import Notes
from controller_worker.core.concerns.opening import Opening
from controller_worker.core.concerns.planning import ProposedPlan, TaskList
from controller_worker.core.concerns.progress import Progress
from controller_worker.core.concerns.rules import Rules
from controller_worker.core.concerns.setup import Setup
from controller_worker.core.concerns.start import ScheduledStart
from controller_worker.core.concerns.survey import Survey
from controller_worker.core.pending import Tools

SNAPSHOT_VERSION = 5
PLAIN_VERSION = 2
"""An earlier version, which is still read: its payload is not compressed."""
COMPRESSION_LEVEL = 1
MAX_UNPACKED_BYTES = 16 << 20
"""A limit for damaged or forged bytes. A state has some kilobytes."""


@dataclass(frozen=True)
class State:
    """A conversation's state (OpenHands section 4.1, without the history): one part for each concern.

    Attributes:
        version: id of the last folded event; 0 for an empty log.
        before: the state before the current stretch of work, if a message may roll back to it; see `double_texting`.
    """

    version: int = 0
    before: State | None = None
    setup: Setup = field(default_factory=Setup)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    greeting: Greeting = field(default_factory=Greeting)
    inbox: MessageInbox = field(default_factory=MessageInbox)
    tools: Tools = field(default_factory=Tools)
    confirmation: ConfirmationProgress = field(default_factory=ConfirmationProgress)
    calls: ModelCalls = field(default_factory=ModelCalls)
    usage: ConversationUsage = field(default_factory=ConversationUsage)
    opening: Opening = field(default_factory=Opening)
    survey: Survey = field(default_factory=Survey)
    rules: Rules = field(default_factory=Rules)
    plan: ProposedPlan = field(default_factory=ProposedPlan)
    work: LongWork = field(default_factory=LongWork)
    acceptance: Acceptance = field(default_factory=Acceptance)
    notes: Notes = field(default_factory=Notes)
    loops: Loops = field(default_factory=Loops)
    progress: Progress = field(default_factory=Progress)
    delegation: Delegation = field(default_factory=Delegation)
    tasks: TaskList = field(default_factory=TaskList)
    start: ScheduledStart = field(default_factory=ScheduledStart)
    double_texting: DoubleTexting = field(default_factory=DoubleTexting)


EMPTY = State()
"""The state of an empty log. A state is immutable, so all conversations share it."""

_ADAPTER = TypeAdapter(State)


def to_snapshot(state: State) -> bytes:
    """Return the bytes of a snapshot: version, CRC-32, then the state in msgpack, compressed.

    A state consists mostly of field names and defaults. An empty state therefore serves as the dictionary of the
    compression, so that these take no space.
    """
    compressor = zlib.compressobj(COMPRESSION_LEVEL, zdict=_load_dictionary())
    payload = compressor.compress(_pack(state)) + compressor.flush()
    return bytes((SNAPSHOT_VERSION,)) + zlib.crc32(payload).to_bytes(4, "big") + payload


def parse_snapshot(snapshot: bytes | None) -> State | None:
    """Return the state of a snapshot; None if there is none or this version cannot read it.

    A version with other fields or defaults has another dictionary and cannot read it. A snapshot only saves time:
    without one, the owner folds the whole log.
    """
    if not snapshot or snapshot[0] not in (SNAPSHOT_VERSION, PLAIN_VERSION):
        return None
    payload = snapshot[5:]
    if zlib.crc32(payload) != int.from_bytes(snapshot[1:5], "big"):
        return None
    try:
        packed = _decompress(payload) if snapshot[0] == SNAPSHOT_VERSION else payload
        fields: dict[str, Any] = msgpack.unpackb(packed)
        return _ADAPTER.validate_python(fields)
    except (ValueError, ValidationError, msgpack.UnpackException, zlib.error):
        return None


def _pack(state: State) -> bytes:
    packed: bytes = msgpack.packb(_ADAPTER.dump_python(state, mode="json"))
    return packed


@cache
def _load_dictionary() -> bytes:
    return _pack(EMPTY)


def _decompress(payload: bytes) -> bytes:
    decompressor = zlib.decompressobj(zdict=_load_dictionary())
    packed = decompressor.decompress(payload, MAX_UNPACKED_BYTES)
    if not decompressor.eof:
        raise ValueError("The snapshot is cut off, or larger than any state.")
    return packed
