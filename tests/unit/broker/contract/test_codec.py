"""Events to bytes and back: whole, damaged, hostile, large, old and new."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args, get_origin

import msgpack
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from broker.contract import codec
from broker.contract.actions import CondensationAction, MCPAction, MessageAction
from broker.contract.condenser_specs import DEFAULT_CONDENSER, AmortizedForgettingCondenserSpec, NoOpCondenserSpec
from broker.contract.events import AgentSpec, ConversationCreated, Event, EventValue
from broker.contract.file_events import FileReadObservation
from broker.contract.kinds import share_names
from broker.contract.long_work import Feature
from broker.contract.notes import Note
from broker.contract.observations import CmdOutputObservation, MCPObservation
from broker.contract.plain_json import replace_surrogates, to_plain_json
from broker.contract.policies import ConfirmationPolicy, LoopPolicy
from broker.contract.specs import AcpSpec, GoalSpec, MemorySpec, OutputSpec, Skill, WorkspaceSpec
from broker.contract.tool_specs import McpAddress, OutcomePolicy, ToolOffer
from broker.contract.workspace_sources import GitSource, UploadedSource
from broker.runtime.errors import CorruptEntry, EventUnfit, StoreTooNew, UnknownKind
from tests.exploring import examples

KINDS = dict(sorted(codec.find_kinds().items()))

texts = st.text(max_size=40)
filled = st.text(min_size=1, max_size=40)
names = st.text("ab9", min_size=1, max_size=9)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(texts, json_values, max_size=3)
moments = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(lambda moment: moment.replace(tzinfo=UTC))  # noqa: DTZ001


def _values(name: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    """Values of a field, by its annotation."""
    if name in ("kind", "id", "blobs") and not field.is_required():
        return st.just(field.default)
    annotation = field.annotation
    if name == "thinking_blocks":
        return st.lists(json_objects, max_size=2).map(tuple)
    if annotation == tuple[Feature, ...]:
        return st.lists(st.builds(Feature, id=names, description=filled, check=filled), max_size=3).map(tuple)
    if name == "acp":
        return st.none() | st.just(AcpSpec(command="an-agent --acp"))
    if get_origin(annotation) is tuple and Any in [part for each in get_args(annotation) for part in get_args(each)]:
        return st.lists(json_objects, max_size=2).map(tuple)
    if name == "labels":
        return st.none() | st.dictionaries(names, st.text("ab9", max_size=9), max_size=3)
    if get_origin(annotation) is dict and any("plain_json" in repr(part) for part in field.metadata):
        return json_objects
    if type(None) in get_args(annotation) and "plain_json" in repr(annotation):
        return st.none() | json_objects
    return st.from_type(annotation)  # type: ignore[arg-type]


def _events(event_class: type[Event]) -> st.SearchStrategy[Event]:
    if event_class is CondensationAction:
        ranges = st.fixed_dictionaries(
            {"forgotten_events_start_id": st.integers(1, 9), "forgotten_events_end_id": st.integers(1, 9)}
        )
        ids = st.fixed_dictionaries({"forgotten_event_ids": st.lists(st.integers(1, 99), max_size=5)})
        return st.one_of(ranges, ids).map(lambda fields: CondensationAction(**fields))
    fields = {name: _values(name, field) for name, field in event_class.model_fields.items()}
    return st.fixed_dictionaries(fields).map(lambda values: event_class(**values))


st.register_type_strategy(datetime, moments)
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(str, texts)


def _parts(part: type) -> st.SearchStrategy[Any]:
    ranges = {
        "tool_concurrency": st.integers(1, 16),
        "max_iterations": st.integers(1, 10**6),
        "max_budget_usd": st.none() | st.floats(0.01, 1e6),
        "condenser": st.sampled_from([DEFAULT_CONDENSER, NoOpCondenserSpec(), AmortizedForgettingCondenserSpec()]),
        "max_delegate_level": st.integers(0, 9),
        "delegates": st.sampled_from([{}, {"Helper": AgentSpec(name="CodeActAgent")}]),
        "max_tokens": st.none() | st.integers(1, 10**9),
        "max_seconds": st.none() | st.floats(0.01, 1e6),
        "timeout_seconds": st.floats(0.01, 1e6),
        "goal": st.none() | st.just(GoalSpec(check="make test", max_refusals=0, timeout_seconds=1.5)),
        "output": st.none() | st.just(OutputSpec(json_schema={"type": "object", "required": ["a"]})),
        "allow": st.just(()),
        "image": st.just(""),
        "memory": st.none() | st.just(MemorySpec(user="ada", project="engine")),
        "tenant": st.from_regex(r"[A-Za-z0-9_.-]{0,64}", fullmatch=True),
        "experiment": st.from_regex(r"[A-Za-z0-9_.-]{0,64}", fullmatch=True),
        "loop_policy": st.sampled_from([LoopPolicy(), LoopPolicy(responses=("nudge", "park"), monologue=5)]),
    }
    fields = {name: _values(name, field) for name, field in part.model_fields.items()}  # type: ignore[attr-defined]
    fields |= {name: values for name, values in ranges.items() if name in fields}
    return st.fixed_dictionaries(fields).map(lambda values: part(**values))


st.register_type_strategy(
    McpAddress,
    st.builds(
        McpAddress,
        url=st.just("https://mcp.example.com/mcp"),
        headers=st.sampled_from([{}, {"Authorization": "Bearer ${TOKEN}"}]),
        tools=st.sampled_from([("*",), ("get_*", "list")]),
    ),
)
st.register_type_strategy(
    ToolOffer,
    st.builds(
        ToolOffer,
        key=st.text("abc/", min_size=1, max_size=9),
        name=st.text("abc_-9", min_size=1, max_size=9),
        description=texts,
        parameters=json_objects.map(lambda schema: {**schema, "type": "object"}),
        runner=st.sampled_from(["function", "mcp"]),
        pool=st.text("abc-", max_size=9),
        outcome=st.sampled_from(OutcomePolicy),
    ),
)
st.register_type_strategy(Skill, st.builds(Skill, name=st.text("abc_", min_size=1, max_size=9), content=texts))
st.register_type_strategy(
    Note, st.builds(Note, id=st.text("ab9", min_size=1, max_size=8), text=st.text("ab ü", min_size=1, max_size=20))
)
st.register_type_strategy(
    WorkspaceSpec,
    st.builds(WorkspaceSpec, path=st.none() | texts, network=st.booleans(), pool=texts)
    | st.builds(
        WorkspaceSpec,
        source=st.sampled_from(
            [
                GitSource(url="https://example.org/x.git", ref="main", depth=1, secret="TOKEN"),
                UploadedSource(name="x.zip", format="zip", parcel="0" * 64),
            ]
        ),
    ),
)
st.register_type_strategy(
    ConfirmationPolicy,
    st.builds(
        ConfirmationPolicy,
        mode=st.sampled_from(["never", "always", "risky", "mine"]),
        threshold=st.sampled_from(["LOW", "MEDIUM", "HIGH"]),
        confirm_unknown=st.booleans(),
        analyzer=st.sampled_from(["none", "shell", "mine"]),
        settings=st.none() | json_objects,
    ),
)
for _part in set(EventValue.__subclasses__()) - {Skill, Note, WorkspaceSpec, AcpSpec}:
    st.register_type_strategy(_part, _parts)  # called when it is needed: parts of parts are known by then


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(10))
@given(content=st.data())
def test_round_trip(kind: str, content: st.DataObject) -> None:
    event = content.draw(_events(KINDS[kind]))
    entry, blobs = codec.to_entry(event.wire())
    assert blobs == {}
    assert codec.decode(entry, event.id) == event


@settings(max_examples=examples(50))
@given(event=st.one_of([_events(event_class) for event_class in KINDS.values()]))
def test_an_export_is_the_wire_form_under_its_id(event: Event) -> None:
    exported = event.export()
    assert list(exported)[:5] == ["id", "kind", "source", "cause_id", "timestamp"]
    assert exported["kind"] == event.kind
    assert "cause" not in exported


DICTIONARY = "039e7ffa3d23320597053fbf45f2c4e15f93000b24ba8ecf6f963c3431d7daec"
TINY = codec.encode({"kind": "action.message", "content": "Hello"})
SMALL = codec.encode(MessageAction(content="Hello").wire())
LARGE = codec.encode(CmdOutputObservation(content="line of output\n" * 200, command="ls", cause=2).wire())


def test_tiny_entries_are_plain_and_all_others_compressed() -> None:
    assert TINY[:2] == b"\x02\x00"
    assert msgpack.unpackb(TINY[6:]) == {"kind": "action.message", "content": "Hello"}
    assert SMALL[:2] == LARGE[:2] == b"\x02\x02"
    assert len(SMALL) < 60
    assert len(LARGE) < 150


def test_entry_of_an_earlier_version_without_dictionary_is_read() -> None:
    event = MessageAction(content="Hello" * 300)
    packed = zstandard.ZstdCompressor(level=1).compress(codec.pack(event.wire()))
    assert codec.decode(_sealed(packed, flags=1), 1).content == event.content  # type: ignore[attr-defined]


def test_the_dictionary_never_changes() -> None:
    """Entries in stores can be read with this one only."""
    path = Path(codec.__file__).with_name("events.zdict")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DICTIONARY


@pytest.mark.parametrize("entry", [TINY, LARGE], ids=["plain", "compressed"])
def test_every_flipped_bit_is_found(entry: bytes) -> None:
    for position in range(len(entry)):
        for bit in range(8):
            damaged = bytearray(entry)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptEntry, match="does not match its checksum"):
                codec.decode(bytes(damaged), 1)


def test_every_cut_is_found() -> None:
    for length in range(len(LARGE)):
        with pytest.raises(CorruptEntry):
            codec.decode(LARGE[:length], 1)


def _sealed(payload: bytes, version: int = 1, flags: int = 0) -> bytes:
    """An entry whose checksum is right, whatever is in it."""
    head = bytes((version, flags))
    return head + zlib.crc32(head + payload).to_bytes(4, "big") + payload


def _mutations(random_: random.Random, number: int) -> Iterator[bytes]:
    payloads = [SMALL[6:], msgpack.packb(CmdOutputObservation(content="x" * 300, command="ls").wire())]
    for _ in range(number):
        payload = bytearray(random_.choice(payloads))
        for _ in range(random_.randint(1, 4)):
            at = random_.randrange(len(payload))
            match random_.randrange(4):
                case 0:
                    payload[at] = random_.randrange(256)
                case 1:
                    del payload[at : at + random_.randint(1, 8)]
                case 2:
                    payload[at:at] = random_.randbytes(random_.randint(1, 8))
                case 3:
                    payload[at:at] = payload[random_.randrange(len(payload)) :][:20]
            payload = payload or bytearray(b"\x00")
        yield _sealed(bytes(payload), random_.choice([1, 1, 1, 0, 2]), random_.choice([0, 0, 0, 0, 1, 2, 255]))


def test_hostile_bytes_with_a_right_checksum_raise_nothing_else() -> None:
    outcomes = {"decoded": 0, "refused": 0}
    for entry in _mutations(random.Random(20_260_101), 20_000):
        try:
            event = codec.decode(entry, 7)
        except (CorruptEntry, StoreTooNew, UnknownKind):
            outcomes["refused"] += 1
        else:
            outcomes["decoded"] += 1
            codec.to_entry(event.wire())  # each accepted value can be written again
    assert outcomes["refused"] > 10_000
    assert outcomes["decoded"] > 100  # the mutations reach beyond the unpacking


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        msgpack.packb([1, 2]),
        msgpack.packb({"kind": "action.message"}),
        msgpack.packb({"kind": "action.message", "content": 5}),
        msgpack.packb({"kind": "observation.run", "command": "ls", "content": 5}),
        msgpack.packb({"kind": "action.call_tool_mcp", "name": "x", "arguments": {"a": b"bytes"}}),
        msgpack.packb({"kind": "action.call_tool_mcp", "name": "x", "arguments": {"a": msgpack.Timestamp(1)}}),
        msgpack.packb({"kind": "action.call_tool_mcp", "name": "x", "arguments": {"a": msgpack.ExtType(4, b"x")}}),
        msgpack.packb({"kind": "action.message", "content": "x", "timestamp": "yesterday"}),
        b"\x81" * 2_000,
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_invalid_event_is_corrupt(payload: bytes) -> None:
    with pytest.raises(CorruptEntry):
        codec.decode(_sealed(payload), 1)


def test_a_decompression_bomb_is_refused_before_it_goes_off() -> None:
    bomb = zstandard.ZstdCompressor(level=3).compress(b"\x00" * (64 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(CorruptEntry, match="claims to be larger than any event"):
        codec.decode(_sealed(bomb, flags=1), 1)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(SMALL[6:])
    with pytest.raises(CorruptEntry, match="claims to be larger than any event"):
        codec.decode(_sealed(unsized, flags=1), 1)


def test_a_kind_of_tomorrow_is_named() -> None:
    with pytest.raises(
        UnknownKind, match=r"Event 7 is of the kind 'action\.teleport', which this version does not know"
    ):
        codec.decode(_sealed(msgpack.packb({"kind": "action.teleport"})), 7)
    with pytest.raises(UnknownKind, match="Event 7 is of the kind None"):
        codec.decode(_sealed(msgpack.packb({})), 7)


def test_a_field_of_tomorrow_is_ignored() -> None:
    event = codec.decode(_sealed(msgpack.packb({"kind": "action.message", "content": "x", "mood": "sunny"})), 3)
    assert event == MessageAction(content="x", id=3)


@pytest.mark.parametrize("flags", [3, 4, 128])
def test_unknown_flags_are_refused_though_the_checksum_is_right(flags: int) -> None:
    payload = msgpack.packb({"kind": "action.message", "content": "x"})
    with pytest.raises(CorruptEntry, match=f"schema version 1 and flags {flags}, which never existed"):
        codec.decode(_sealed(payload, flags=flags), 1)


def test_a_schema_of_tomorrow_is_refused() -> None:
    with pytest.raises(StoreTooNew, match="schema version 3; this version of Deckhands reads up to 2"):
        codec.decode(codec.encode(MessageAction(content="x").wire(), schema_version=3), 1)


def test_old_events_are_brought_up_to_date_step_by_step() -> None:
    def name_the_kind(wire: codec.Wire) -> codec.Wire:
        return {"kind": f"action.{wire['type']}", **{key: value for key, value in wire.items() if key != "type"}}

    def text_is_content(wire: codec.Wire) -> codec.Wire:
        return {("content" if key == "text" else key): value for key, value in wire.items()}

    upcasters = {1: name_the_kind, 2: text_is_content}
    oldest = codec.encode({"type": "message", "text": "x"}, schema_version=1)
    older = codec.encode({"kind": "action.message", "text": "x"}, schema_version=2)
    newest = codec.encode({"kind": "action.message", "content": "x"}, schema_version=3)
    for entry in (oldest, older, newest):
        assert codec.decode_wire(entry, upcasters=upcasters, current=3) == {"kind": "action.message", "content": "x"}
    with pytest.raises(CorruptEntry):
        codec.decode_wire(codec.encode({"text": "x"}, schema_version=1), upcasters=upcasters, current=3)


def test_lone_surrogates_are_replaced_once() -> None:
    event = MessageAction(content="a\ud800b🙂", thought="\udfff")
    found = codec.decode(codec.encode(event.wire()), 0)
    assert isinstance(found, MessageAction)
    assert (found.content, found.thought) == ("a\ufffdb🙂", "\ufffd")
    assert replace_surrogates({"\ud800": ["\udc00", 1, None]}) == {"\ufffd": ["\ufffd", 1, None]}
    assert replace_surrogates("\ud83d\ude42") == "🙂"
    assert codec.to_entry(FileReadObservation(path="a", content="\ud800" * 50_000).wire())[1] != {}


def test_values_are_made_plain_when_the_event_is_made() -> None:
    arguments = {"a": float("nan"), "b": [float("inf"), 10**30, -(10**30)], "c": ("x\ud800", True), "d": {"e": None}}
    event = MCPAction(name="x", arguments=arguments)
    assert event.arguments == {
        "a": None,
        "b": [None, str(10**30), str(-(10**30))],
        "c": ["x\ufffd", True],
        "d": {"e": None},
    }
    assert codec.decode(codec.encode(event.wire()), 0) == event


def test_too_deep_or_non_json_values_are_refused() -> None:
    nested: Any = {}
    for _ in range(200):
        nested = {"a": nested}
    for value in (nested, {"a": b"bytes"}, {"a": {1: 2}}, {"a": object()}):
        with pytest.raises(ValueError, match=r"nested more than 100 deep|is not JSON|not a text"):
            MCPAction(name="x", arguments=value)
    assert to_plain_json([1, "a", 2.5, None, True]) == [1, "a", 2.5, None, True]


def test_numbers_beyond_the_log_are_refused() -> None:
    with pytest.raises(EventUnfit, match=r"'model\.reply' cannot be stored"):
        codec.encode(codec.find_kinds()["model.reply"](kind="model.reply", iteration=10**30).wire())


def test_an_event_that_stays_too_large_is_refused() -> None:
    incompressible = random.Random(7)
    many = {str(n): incompressible.randbytes(5_000).hex() for n in range(300)}
    with pytest.raises(EventUnfit, match="the limit is 1 MiB"):
        codec.to_entry(MCPObservation(name="x", arguments=many, content="").wire())
    with pytest.raises(EventUnfit, match="the limit is 16 MiB"):
        codec.to_entry(MCPObservation(name="x", arguments={str(n): "a" * 14_000 for n in range(1_300)}).wire())


def test_up_to_32_kib_nothing_is_moved() -> None:
    wire = FileReadObservation(path="a", content="x" * 32_000).wire()
    assert codec.shorten(wire) == (wire, {})
    assert codec.to_entry(wire) == (codec.encode(wire), {})


def test_a_large_text_keeps_head_and_tail() -> None:
    content = "".join(f"{n:06}\n" for n in range(10_000))
    wire = FileReadObservation(path="a", content=content).wire()
    short, blobs = codec.shorten(wire)
    marker = "\n[... 55000 characters left out; the whole is kept beside the log ...]\n"
    assert short["content"] == content[:7_500] + marker + content[-7_500:]
    ((sha256, kept),) = blobs.items()
    assert kept == content.encode()
    assert short["blobs"] == {"content": {"sha256": sha256, "size_bytes": 70_000}}
    assert wire["content"] == content
    assert codec.restore(short, blobs) == wire


def test_largest_texts_are_stored_apart_first() -> None:
    wire = {"kind": "x", "a": "a" * 20_000, "b": "b" * 40_000, "c": "c" * 100}
    short, blobs = codec.shorten(wire)
    assert set(short["blobs"]) == {"b", "a"}
    assert short["c"] == wire["c"]
    short, blobs = codec.shorten({**wire, "a": "a" * 16_000})
    assert set(short["blobs"]) == {"b"}
    assert len(blobs) == 1


nested_texts = st.recursive(
    st.tuples(st.sampled_from(["x", "ü", "🙂", "z\ud800"]), st.sampled_from([0, 1, 8_000, 20_000])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b.c", "d~e", "~1", "f.g.~0", ""]), inner, max_size=3)
    ),
    max_leaves=6,
)


def _written_out(value: Any) -> Any:
    """Turn each pair of a text and a number into that many texts in a row."""
    if isinstance(value, dict):
        return {name: _written_out(child) for name, child in value.items()}
    return [_written_out(child) for child in value] if isinstance(value, list) else value[0] * value[1]


@settings(max_examples=examples(40))
@given(plan=st.dictionaries(st.sampled_from(["a", "b.c", "~", "0"]), nested_texts, max_size=3))
def test_shorten_and_restore_are_inverse(plan: dict[str, Any]) -> None:
    wire = {"kind": "action.call_tool_mcp", "name": "x", "arguments": _written_out(plan)}
    short, blobs = codec.shorten(wire)
    assert replace_surrogates(codec.restore(short, blobs)) == replace_surrogates(wire)
    entry, same_blobs = codec.to_entry(wire)
    assert same_blobs == blobs
    assert len(msgpack.packb(codec.decode_wire(entry))) <= max(32 * 1024, 6 * 61_000)


def test_a_reference_to_nowhere_is_corrupt() -> None:
    short, blobs = codec.shorten({"kind": "x", "a": {"b": "c" * 40_000}})
    with pytest.raises(CorruptEntry, match=r"There is no field 'a\.b\.c'"):
        codec.restore({**short, "blobs": {"a.b.c": short["blobs"]["a.b"]}}, blobs)


def _created(number: int, **agent: object) -> Event:
    created = ConversationCreated(conversation_id=f"c{number}", agent=AgentSpec(**agent))
    return codec.decode(codec.encode(created.wire()), 1)


def test_conversations_that_begin_with_the_same_hold_it_together() -> None:
    one, two, other = _created(1), _created(2), _created(3, tool_concurrency=4)
    assert isinstance(one, ConversationCreated)
    assert isinstance(two, ConversationCreated)
    assert isinstance(other, ConversationCreated)
    assert one.agent is two.agent
    assert one.limits is two.limits
    assert (one.conversation_id, two.conversation_id) == ("c1", "c2")
    assert one.agent.tool_concurrency != other.agent.tool_concurrency == 4


def test_names_of_fields_are_held_together_and_copies_have_theirs() -> None:
    one, two = _created(1), _created(2)
    share_names(one)
    share_names(two)
    assert one.model_fields_set is two.model_fields_set
    before = set(one.model_fields_set)
    changed = one.model_copy(update={"traceparent": None})
    assert "traceparent" in changed.model_fields_set
    assert one.model_fields_set == before


def test_a_specification_that_does_not_fit_is_refused_each_time() -> None:
    wire = ConversationCreated(conversation_id="c1").wire() | {"limits": {"max_iterations": "many"}}
    for _ in range(2):
        with pytest.raises(CorruptEntry, match="max_iterations"):
            codec.event_from_wire(wire, 1)
