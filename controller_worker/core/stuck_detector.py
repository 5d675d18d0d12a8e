"""Detect an agent in a loop: OpenHands' five patterns (section 2) over a bounded summary of the latest events.

Holds: pure. The cost of adding an event depends on its size, and the cost of the search on the thresholds, neither on
the length of the history. An event counts the same whether its long texts are inline or in blobs.
Does not: decide the response to a loop (`concerns.loops`).
Differs: an action counts when its observation arrives, so that the calls of one reply are in the order in which they
ran. Polling a running command is no step of a loop, because the tool asks for it. A sleeping command with new output
restarts the count, because there is progress. A loop starts with its own first action; the original may name an
earlier, equal action.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from hashlib import blake2b, sha256
from itertools import pairwise
from json.encoder import encode_basestring_ascii
from typing import Any, TypeGuard

from broker.contract import (
    SHORTENED_END_CHARS,
    Action,
    AgentCondensationObservation,
    BlobRef,
    CmdOutputObservation,
    CondensationAction,
    ErrorObservation,
    Event,
    EventSource,
    FinishRefusedObservation,
    IPythonRunCellAction,
    IPythonRunCellObservation,
    LoopPolicy,
    MessageAction,
    ModelReply,
    Observation,
)
from controller_worker.core.concern import evolve

CONDENSATIONS = 10
MAX_CALLS = 128
"""Calls kept of one reply; no more can be carried out."""
MAX_NAME_CHARS = 64
"""Longer ids of calls are kept as digests."""
LONG_TEXT_CHARS = 2 * SHORTENED_END_CHARS + 100
"""Longer texts may be in blobs; their hash is the same there."""
NOT_COMPARED = {
    *("kind", "timestamp", "source", "cause", "tool_call_metadata", "timeout", "blobs", "replaces"),
    "traceparent",
}
STILL_RUNNING = -1
UNTERMINATED = "unterminated string literal (detected at line"
SYNTAX_ERRORS = ("invalid syntax. Perhaps you forgot a comma?", "incomplete input")
# Blanks of one line only, so that runs of empty lines are scanned once; the start of a line also matches.
SLEEPS = re.compile(r"(?:^|[;&|({]|\bdo\b|\bthen\b)[^\S\n]*sleep\s", re.MULTILINE)
SLEEP = "sleep"  # a text without it needs no search
VOLATILE = re.compile(
    r"0x[0-9a-fA-F]{1,16}|pytest-\d{1,9}|\b\d{1,2}:\d\d:\d\d(?:[.,]\d{1,9})?|"
    r"\b\d{1,9}(?:\.\d{1,9})? ?(?:ms|s|secs?|seconds?)\b"
)
"""Parts of an output that differ each time a test runs."""
WAITED = "waited:"
TRAILER = ("[Jupyter current working directory:", "[Jupyter Python interpreter:")

_JSON = json.JSONEncoder(sort_keys=True)
_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


class _Digested:
    """Has a digest that is computed when it is first read. A replay makes thousands of traces and compares few."""

    __slots__ = ("_compute",)

    digest: str
    _compute: Callable[[], str]

    def __getattr__(self, name: str) -> Any:
        if name != "digest":
            raise AttributeError(name)
        digest = self._compute()
        _set(self, "digest", digest)
        _delete(self, "_compute")  # it refers to the event
        return digest


@dataclass(frozen=True, slots=True)
class Trace(_Digested):
    """The summary of an event.

    Attributes:
        id: id of the event.
        turn_id: the reply it belongs to, or the event itself.
        digest: equal for events that OpenHands considers equal; see `trace_later`.
        trait: for an observation: `error`, the digest of a syntax error, or the digest of a sleeping command's output;
            of a condensation: `adjacent` if it directly follows another one; else empty.
    """

    id: int
    turn_id: int
    digest: str
    trait: str = ""


@dataclass(frozen=True)
class RecentEvents:
    """The latest actions, observations and messages of the agent, oldest first; the last ten condensations.

    Attributes:
        messages: messages with no observation in between.
        is_observed: there was an observation after the latest message.
        is_condensed: there was no event after the latest condensation.
    """

    actions: tuple[Trace, ...] = ()
    observations: tuple[Trace, ...] = ()
    messages: tuple[Trace, ...] = ()
    is_observed: bool = False
    condensations: tuple[Trace, ...] = ()
    is_condensed: bool = False


@dataclass(frozen=True, slots=True)
class DetectedLoop:
    """A detected loop.

    Attributes:
        loop_type: OpenHands' name of the pattern.
        start_id: the first event that belongs to it.
        reason: why there is no progress, as a clause; empty for a repetition.
    """

    loop_type: str
    repeat_times: int
    start_id: int
    reason: str = ""


def trace_event(event: Event, turn_id: int) -> Trace:
    """Return the trace of an event; `turn_id` is its reply, 0 for none."""
    return trace_later(event.id, turn_id or event.id, partial(_compute_digest, event), _find_trait(event))


def trace_later(event_id: int, turn_id: int, compute: Callable[[], str], trait: str = "") -> Trace:
    """Return a trace that computes its digest when it is first read, which must give the same at any time."""
    trace = _new(Trace)
    _set(trace, "id", event_id)
    _set(trace, "turn_id", turn_id)
    _set(trace, "_compute", compute)
    _set(trace, "trait", trait)
    return trace


_new = object.__new__
_set = object.__setattr__  # a frozen instance is filled before it is shared
_delete = object.__delattr__


def trace_calls(reply: ModelReply) -> tuple[tuple[str, Trace], ...]:
    """Return the traces of a reply's calls, each paired with the result of `make_call_name` for its id.

    The text beside a call is not compared. The traces serve only for refused calls; equal calls have equal refusals.
    """
    blobs = reply.blobs or {}
    return tuple(
        (
            _name_call(_to_text(call.id, f"tool_calls.{position}.id", blobs)),
            trace_later(reply.id, reply.id, partial(_compute_call_digest, reply, position)),
        )
        for position, call in enumerate(reply.tool_calls[:MAX_CALLS])
    )


def _compute_call_digest(reply: ModelReply, position: int) -> str:
    blobs = reply.blobs or {}
    call, path = reply.tool_calls[position], f"tool_calls.{position}"
    name = encode_basestring_ascii(_to_text(call.name, f"{path}.name", blobs))
    arguments = encode_basestring_ascii(_to_text(call.arguments, f"{path}.arguments", blobs))
    # Written by hand: as JSON, in a third of the encoder's time.
    return _shorten(f'["call", {name}, {arguments}]')


def trace_failure(output: CmdOutputObservation) -> tuple[str, str]:
    """Return digests of a command and of its result, without varying parts such as durations, times and addresses."""
    blobs = output.blobs or {}
    content = output.content
    if "content" in blobs or len(content) > LONG_TEXT_CHARS:
        content = content[:SHORTENED_END_CHARS] + content[-SHORTENED_END_CHARS:]
    command = _shorten(_to_text(output.command, "command", blobs))
    return command, _shorten(f"{output.exit_code} {VOLATILE.sub('', content)}")


def make_call_name(observation: Observation) -> str:
    """Return a short name for the call that an observation belongs to; empty for none."""
    metadata = observation.tool_call_metadata
    if metadata is None:
        return ""
    return _name_call(_to_text(metadata.tool_call_id, "tool_call_metadata.tool_call_id", observation.blobs or {}))


def _name_call(call_id: str) -> str:
    return call_id if len(call_id) <= MAX_NAME_CHARS and call_id.isascii() else _shorten(call_id)


def add_action(recent: RecentEvents, action: Action, trace: Trace, policy: LoopPolicy) -> RecentEvents:
    """Add an action that has run. Users' messages and requests, and condensation requests, are ignored."""
    if not action.counts_for_loops or action.__dict__.get("hidden"):
        return recent
    if isinstance(action, CondensationAction):
        return _add_condensation(recent, trace)
    if isinstance(action, MessageAction):
        if action.source is EventSource.USER:
            return recent
        before = () if recent.is_observed else recent.messages
        recent = evolve(recent, messages=(*before, trace)[-policy.monologue :], is_observed=False)
    return add_settled(recent, trace, policy)


def add_settled(recent: RecentEvents, trace: Trace, policy: LoopPolicy) -> RecentEvents:
    """Add an action by its trace, when its observation arrives."""
    return evolve(recent, actions=(*recent.actions, trace)[-policy.window :], is_condensed=False)


def has_equal_call(recent: RecentEvents, call: Trace) -> bool:
    """Return whether an equal call of the same reply was added."""
    return any(seen.turn_id == call.turn_id and seen.digest == call.digest for seen in recent.actions)


def add_poll(recent: RecentEvents) -> RecentEvents:
    """Record the answer to a poll: it is no step of a loop, but counts as an observation."""
    return evolve(recent, is_observed=True, is_condensed=False)


def add_observation(
    recent: RecentEvents, observation: Observation, policy: LoopPolicy, settled: Trace | None = None
) -> RecentEvents:
    """Add an observation, and the action that it settles. Changes of state and empty observations are ignored."""
    is_ignored = not observation.counts_for_loops or observation.__dict__.get("hidden")
    if is_ignored or isinstance(observation, AgentCondensationObservation):
        recent = recent if settled is None else add_settled(recent, settled, policy)
        return recent if is_ignored else _add_condensation(recent, trace_event(observation, 0))
    actions, observations = recent.actions, recent.observations
    window = policy.window
    return evolve(
        recent,
        actions=actions if settled is None else (*actions, settled)[-window:],
        observations=(*observations, trace_event(observation, 0))[-window:],
        is_observed=True,
        is_condensed=False,
    )


def is_poll(observation: Observation) -> bool:
    """Return whether this answers a poll of a running command, which is no step of a loop."""
    return (
        isinstance(observation, CmdOutputObservation)
        and not observation.command.strip()
        and observation.exit_code == STILL_RUNNING
        and bool(observation.metadata.suffix)  # without a suffix, nothing was running
    )


def forget_repeats(recent: RecentEvents, action: Trace, observation: Observation) -> RecentEvents:
    """Forget the earlier repetitions of a sleeping command if its output has changed."""
    if not _is_sleeping(observation):
        return recent
    seen = trace_event(observation, 0)
    last = next((trace for trace in reversed(recent.observations) if trace.digest == seen.digest), seen)
    if last.trait == seen.trait:
        return recent
    actions = tuple(trace for trace in recent.actions if trace.digest != action.digest)
    observations = tuple(trace for trace in recent.observations if trace.digest != seen.digest)
    return evolve(recent, actions=actions, observations=observations, is_condensed=False)


def find_loop(recent: RecentEvents, policy: LoopPolicy) -> DetectedLoop | None:
    """Return the loop in the latest events: the first matching pattern, in OpenHands' order."""
    return next(_find_patterns(recent, policy), None)


def _find_patterns(recent: RecentEvents, policy: LoopPolicy) -> Iterator[DetectedLoop]:
    actions = recent.actions
    observations = recent.observations
    count = policy.action_observation
    if _has_equal(actions, count) and _has_equal(observations, count):
        yield DetectedLoop("repeating_action_observation", count, actions[-count].turn_id)
    count = policy.action_error
    if _has_equal(actions, count) and _has_errors(observations, count):
        yield DetectedLoop("repeating_action_error", count, actions[-count].turn_id)
    count = policy.monologue
    messages = recent.messages
    if _has_equal(messages, count):
        yield DetectedLoop("monologue", count, messages[-count].turn_id)
    count = policy.alternating_pattern
    if _alternates(actions, count) and _alternates(observations, count):
        yield DetectedLoop("repeating_action_observation_pattern", count // 2, actions[-count].turn_id)
    if len(recent.condensations) == CONDENSATIONS:
        for before, after in pairwise(recent.condensations):
            if after.trait == "adjacent":
                yield DetectedLoop("context_window_error", 2, before.id)


def _has_equal(traces: Sequence[Trace], count: int) -> bool:
    return len(traces) >= count and len({trace.digest for trace in traces[-count:]}) == 1


def _has_errors(observations: Sequence[Trace], count: int) -> bool:
    """Return whether the last observations are all errors, or all the same syntax error in a cell."""
    if len(observations) < count:
        return False
    traits = {observation.trait for observation in observations[-count:]}
    return len(traits) == 1 and traits != {""} and not min(traits).startswith(WAITED)


def _alternates(traces: Sequence[Trace], count: int) -> bool:
    last = traces[-count:]
    return len(last) == count and all(a.digest == b.digest for a, b in zip(last, last[2:], strict=False))


def _add_condensation(recent: RecentEvents, trace: Trace) -> RecentEvents:
    trait = "adjacent" if recent.is_condensed else ""
    condensations = (*recent.condensations, replace(trace, trait=trait))[-CONDENSATIONS:]
    return evolve(recent, condensations=condensations, is_condensed=True)


def _compute_digest(event: Event) -> str:
    """Return a digest that is equal for events that OpenHands considers equal (2.2)."""
    blobs = event.blobs or {}
    compared: Any
    if isinstance(event, CmdOutputObservation):
        return _shorten(f"{event.kind} {event.metadata.exit_code} {_to_text(event.command, 'command', blobs)}")
    if isinstance(event, IPythonRunCellAction) and "edit_file_by_replace(" in event.code:
        lines = event.code.split("\n")
        compared = lines[:3] if len(lines) > 2 else event.id
    else:
        plain = _encode_plain(event)
        if plain is not None:
            return _shorten(plain)
        # Without defaults, so that a field added later leaves the digests of older events unchanged.
        compared = _to_stable(event.model_dump(mode="json", exclude=NOT_COMPARED, exclude_defaults=True), "", blobs)
    return _shorten(_JSON.encode([event.kind, compared]))


def _encode_plain(event: Event) -> str | None:
    """Encode the compared fields of an event with only short texts, numbers and names. Most events are such.

    This runs for every event of every step; `model_dump` takes eight times as long.
    """
    if event.blobs and any(path.partition(".")[0] not in NOT_COMPARED for path in event.blobs):
        return None
    found: list[Any] = [event.kind]
    values = event.__dict__
    for name, default in _find_compared_fields(type(event)):
        value = values[name]
        if value is default or value == default:
            continue
        if type(value) not in _PLAIN_TYPES:
            if not (isinstance(value, Enum) and type(value.value) in _PLAIN_TYPES):
                return None
            value = value.value
        found += (name, value)
    written = repr(found)
    return written if len(written) <= LONG_TEXT_CHARS else None


@cache
def _find_compared_fields(event_class: type[Event]) -> tuple[tuple[str, Any], ...]:
    """Return the compared fields with their defaults, sorted by name: the order of a class's fields must not matter."""
    fields = sorted(event_class.model_fields.items())
    return tuple((name, field.default) for name, field in fields if name not in NOT_COMPARED and not field.exclude)


def _to_stable(value: Any, path: str, blobs: Mapping[str, BlobRef]) -> Any:
    """Copy JSON values, with long texts replaced by their hashes."""
    if isinstance(value, str):
        return _to_text(value, path, blobs)
    if isinstance(value, dict):
        return {
            key: _to_stable(item, _join_path(path, key.replace("~", "~0").replace(".", "~1")), blobs)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_to_stable(item, _join_path(path, str(position)), blobs) for position, item in enumerate(value)]
    return value


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _to_text(text: str, path: str, blobs: Mapping[str, BlobRef]) -> str:
    if path in blobs:
        return blobs[path].sha256
    return text if len(text) <= LONG_TEXT_CHARS else sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _find_trait(event: Event) -> str:
    if isinstance(event, Action):
        return ""
    if isinstance(event, ErrorObservation | FinishRefusedObservation):
        return "error"
    if _is_sleeping(event):
        return f"{WAITED}{_shorten(_to_text(event.content, 'content', event.blobs or {}))}"
    return _find_syntax_error(event.content) if isinstance(event, IPythonRunCellObservation) else ""


def _is_sleeping(event: Event) -> TypeGuard[CmdOutputObservation]:
    """Return whether this is the output of a command that sleeps."""
    if not isinstance(event, CmdOutputObservation):
        return False
    return SLEEP in event.command and SLEEPS.search(event.command) is not None


def _find_syntax_error(content: str) -> str:
    """Return the constant part of a repeated syntax error in a cell; empty for any other output."""
    lines = content.strip().split("\n")
    has_trailer = len(lines) >= 3 and all(map(str.startswith, lines[-2:], TRAILER))
    if not has_trailer:
        return ""
    error = lines[-3]
    if UNTERMINATED in error:
        return f"{UNTERMINATED}{_shorten(error)}"
    is_cell = len(lines) >= 6 and lines[0].strip().startswith("Cell In[1], line")
    for message in SYNTAX_ERRORS:
        if is_cell and message in error:
            return f"{message}{_shorten(lines[0])}{_shorten(error)}"
    return ""


def _shorten(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
