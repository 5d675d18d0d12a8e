"""State and its snapshots."""

import zlib
from dataclasses import fields
from datetime import UTC, datetime

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, Limits, LLMSpec, Parent, Tenancy, ToolCallMetadata, WorkspaceSpec
from broker.contract.long_work import Feature
from broker.contract.task_list import TaskItem
from broker.contract.tool_specs import McpAddress
from controller_worker.core.concerns.acceptance import Acceptance
from controller_worker.core.concerns.confirmation import ConfirmationProgress
from controller_worker.core.concerns.delegation import Delegate, DelegateEnd, DelegateOrder, Delegation, ManagingAction
from controller_worker.core.concerns.double_texting import DoubleTexting
from controller_worker.core.concerns.greeting import Greeting
from controller_worker.core.concerns.inbox import MessageInbox, UnansweredMessage
from controller_worker.core.concerns.lifecycle import Lifecycle
from controller_worker.core.concerns.limits import ConversationUsage, LatestCall
from controller_worker.core.concerns.long_work import CheckResult, FeatureRequest, LongWork
from controller_worker.core.concerns.loops import Loops
from controller_worker.core.concerns.model_calls import Deferral, ModelCalls, RetryWait
from controller_worker.core.concerns.notes import Notes
from controller_worker.core.concerns.opening import Opening
from controller_worker.core.concerns.planning import ProposedPlan, TaskList
from controller_worker.core.concerns.progress import Mark, Progress, RepeatedFailure
from controller_worker.core.concerns.rules import DueRule, Rules
from controller_worker.core.concerns.setup import Setup
from controller_worker.core.concerns.start import ScheduledStart
from controller_worker.core.concerns.survey import Survey
from controller_worker.core.controller import CONCERNS
from controller_worker.core.pending import PendingAction, Tools
from controller_worker.core.state import (
    MAX_UNPACKED_BYTES,
    PLAIN_VERSION,
    SNAPSHOT_VERSION,
    State,
    parse_snapshot,
    to_snapshot,
)
from controller_worker.core.stuck_detector import DetectedLoop, RecentEvents, Trace
from tests.controller_parts import bash, started

METADATA = ToolCallMetadata(function_name="execute_bash", tool_call_id="c1", reply_id=7, total_calls_in_response=2)
FULL = State(
    version=42,
    before=State(version=39),
    setup=Setup(
        conversation_id="conversation-1",
        agent=AgentSpec(llm=LLMSpec(model="acme/large", temperature=0.5), tool_concurrency=4, system_prompt_suffix="ü"),
        workspace=WorkspaceSpec(path="/srv/project", network=True),
        limits=Limits(max_iterations=9, max_budget_usd=2.5),
        tenancy=Tenancy(tenant="acme", experiment="swe", priority="batch"),
        headless=False,
        parent=Parent(conversation_id="conversation-0", delegate_id=9),
        delegate_level=1,
        forked_at=2,
        chosen_id=3,
        pinned_version="0.1.0",
        rollout=True,
        mcp_servers={"wiki": McpAddress(url="https://wiki.example.com/mcp", headers={"X-Key": "${KEY}"})},
        skills=("/srv/skills",),
    ),
    lifecycle=Lifecycle(
        agent_state=AgentState.RATE_LIMITED,
        requested=AgentState.PAUSED,
        ending=AgentState.FINISHED,
        last_error="RuntimeError: oops",
        error_code="unexpected",
        result_id=36,
    ),
    greeting=Greeting(is_said=True),
    inbox=MessageInbox(
        UnansweredMessage(40, "continue", datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC), is_first=True),
        last_message_id=40,
        is_reply_outdated=True,
    ),
    tools=Tools((PendingAction(38, METADATA), PendingAction(39)), ((36, 37),)),
    confirmation=ConfirmationProgress(
        asked_id=38,
        answer_id=41,
        confirmed_id=39,
        reason="No.",
        asked_at=datetime(2026, 3, 1, tzinfo=UTC),
        is_reminded=True,
        question_id=38,
    ),
    calls=ModelCalls(
        reply_id=37,
        attempt=2,
        wait=RetryWait("rate_limit", datetime(2026, 3, 1, 12, 0, 8, 654321, tzinfo=UTC)),
        deferral=Deferral("rate_limit", datetime(2026, 3, 1, 12, 0, 9, tzinfo=UTC)),
        overflows=1,
        wants_condensation=True,
    ),
    usage=ConversationUsage(
        iteration=6,
        max_iterations=18,
        max_budget_usd=3.75,
        max_tokens=1_000,
        deadline=datetime(2026, 3, 1, 13, 0, tzinfo=UTC),
        cost_usd=0.1 + 0.2,
        has_unknown_cost=True,
        latest=(LatestCall("agent", "openai/a", 0.1, longest_reply_tokens=200, prompt_tokens=9, estimated_tokens=8),),
        inherited_usd=0.05,
        prompt_tokens=12_345_678,
        completion_tokens=321,
        is_changed=True,
        forked=datetime(2026, 1, 1, tzinfo=UTC),
    ),
    opening=Opening(3, 1, is_open=True, has_failed=True),
    survey=Survey(4, 2, 5, is_over=True, scripts=("setup.sh",), has_failed=True, is_repeated=True),
    rules=Rules((("style", ("*.py",)),), ("style",), (DueRule("docs", "docs/**", "docs/a"),), 9),
    plan=ProposedPlan(39, "1. Look", is_edited=True),
    work=LongWork(
        features=(Feature(id="a", description="ü", steps=("try it",), check="true", passes=True),),
        contexts=2,
        is_context_due=False,
        requests=(FeatureRequest(41, "verify", ids=("a",)),),
        action_id=42,
        checking="a",
        results=(CheckResult("b", passes=False, output="oh no"),),
        is_saved=True,
        was_edited=True,
        written_sha256="ab" * 32,
        is_verified=True,
    ),
    acceptance=Acceptance(
        check_id=41, refusals=1, is_refused=True, is_checked=True, is_accepted=True, is_by_critic=True, corrections=2
    ),
    notes=Notes((PendingAction(40, METADATA),)),
    loops=Loops(
        RecentEvents((Trace(38, 37, "aa"),), (Trace(39, 39, "bb", "error"),), is_observed=True, is_condensed=True),
        found=DetectedLoop("monologue", 3, 12),
        met=1,
        recovery=2,
        calls=(("c1", Trace(37, 37, "cc")),),
    ),
    progress=Progress(
        action_id=42,
        digest="dd",
        looked=Mark(30, 5, 0.2),
        changed=Mark(20, 4, 0.1),
        failures=(RepeatedFailure("ee", "ff", 2, 33),),
    ),
    delegation=Delegation(
        (Delegate(7, "CodeActAgent", METADATA, 6, iterations=5, end=DelegateEnd("d1", "done", {"a": 1})),),
        iterations=4,
        spent_usd=0.1,
        order=DelegateOrder(AgentState.PAUSED, 8),
        managing=(ManagingAction(9, METADATA, "wait", "any"),),
    ),
    tasks=TaskList((TaskItem(id="a", title="Look", status="done", notes="ü"),)),
    start=ScheduledStart("begun", has_time=True),
    double_texting=DoubleTexting("rollback", begun_id=40, wanted="interrupt", message_ids=(41, 42), pause_id=43),
)


PARTS = [field.name for field in fields(State) if field.name not in ("version", "before")]


def test_the_example_sets_every_field() -> None:
    same = [
        f"{part}.{field.name}"
        for part in PARTS
        for field in fields(getattr(FULL, part))
        if getattr(getattr(FULL, part), field.name) == getattr(getattr(State(), part), field.name)
    ]
    assert same == []


def test_every_part_of_the_state_has_one_concern() -> None:
    assert sorted(concern.name for concern in CONCERNS) == sorted(PARTS)


@pytest.mark.parametrize("state", [State(), FULL])
def test_a_snapshot_gives_the_state_back(state: State) -> None:
    assert parse_snapshot(to_snapshot(state)) == state
    assert to_snapshot(state) == to_snapshot(state)


def snapshot_of(payload: bytes, version: int = PLAIN_VERSION) -> bytes:
    return bytes((version,)) + zlib.crc32(payload).to_bytes(4, "big") + payload


def compress(packed: bytes, dictionary: bytes) -> bytes:
    compressor = zlib.compressobj(zdict=dictionary)
    return compressor.compress(packed) + compressor.flush()


def unpack_snapshot(snapshot: bytes) -> bytes:
    return zlib.decompressobj(zdict=EMPTY).decompress(snapshot[5:])


EMPTY = msgpack.packb(TypeAdapter(State).dump_python(State(), mode="json"))


def test_snapshot_of_the_version_before_is_read() -> None:
    assert parse_snapshot(snapshot_of(unpack_snapshot(to_snapshot(FULL)))) == FULL


def test_snapshot_holds_what_differs_from_an_empty_state() -> None:
    assert len(EMPTY) > 2_000
    assert len(to_snapshot(State())) < 60


def test_snapshot_with_other_defaults_is_not_used() -> None:
    packed = unpack_snapshot(to_snapshot(FULL))
    assert parse_snapshot(snapshot_of(compress(packed, EMPTY), SNAPSHOT_VERSION)) == FULL
    assert parse_snapshot(snapshot_of(compress(packed, EMPTY + b"another"), SNAPSHOT_VERSION)) is None


@pytest.mark.parametrize(
    "snapshot",
    [
        None,
        b"",
        bytes((SNAPSHOT_VERSION + 1,)) + to_snapshot(FULL)[1:],
        snapshot_of(b""),
        snapshot_of(b"", SNAPSHOT_VERSION),
        snapshot_of(compress(EMPTY, EMPTY)[:-1], SNAPSHOT_VERSION),
        snapshot_of(compress(bytes(MAX_UNPACKED_BYTES + 1), EMPTY), SNAPSHOT_VERSION),
        snapshot_of(b"\xc1"),
        snapshot_of(msgpack.packb([1, 2])),
        snapshot_of(msgpack.packb({"version": "x"})),
        snapshot_of(msgpack.packb({"lifecycle": {"agent_state": "dancing"}})),
    ],
    ids=[
        "none",
        "nothing",
        "other version",
        "empty",
        "no zlib",
        "cut off",
        "a bomb",
        "no msgpack",
        "no state",
        "bad version",
        "bad lifecycle",
    ],
)
def test_unusable_snapshot_is_not_used(snapshot: bytes | None) -> None:
    assert parse_snapshot(snapshot) is None


def test_no_damage_goes_unnoticed() -> None:
    whole = to_snapshot(FULL)
    for position in range(len(whole)):
        damaged = whole[:position] + bytes((whole[position] ^ 0x10,)) + whole[position + 1 :]
        assert parse_snapshot(damaged) is None, position
        assert parse_snapshot(whole[:position]) is None, position


@given(st.binary(max_size=200))
def test_hostile_bytes_give_no_state_and_raise_nothing(content: bytes) -> None:
    for snapshot in (snapshot_of(content), snapshot_of(content, SNAPSHOT_VERSION)):
        assert parse_snapshot(snapshot) in (None, State())
    assert parse_snapshot(snapshot_of(compress(content, EMPTY), SNAPSHOT_VERSION)) in (None, State())


def test_snapshot_fields_change_only_with_their_version() -> None:
    assert (
        SNAPSHOT_VERSION,
        {part: " ".join(field.name for field in fields(getattr(State(), part))) for part in PARTS},
    ) == (
        5,
        {
            "setup": (
                "conversation_id agent workspace limits tenancy headless parent delegate_level forked_at chosen_id "
                "pinned_version rollout mcp_servers skills"
            ),
            "lifecycle": "agent_state requested ending last_error error_code result_id",
            "greeting": "is_said",
            "inbox": "message last_message_id is_reply_outdated",
            "tools": "pending questions",
            "confirmation": "asked_id answer_id confirmed_id reason asked_at is_reminded question_id",
            "calls": "reply_id attempt wait deferral overflows wants_condensation",
            "usage": (
                "iteration max_iterations max_budget_usd max_tokens deadline cost_usd has_unknown_cost "
                "latest inherited_usd prompt_tokens completion_tokens is_changed forked"
            ),
            "opening": "action_id attempts is_open has_failed",
            "survey": "action_id attempts answer_id is_over scripts has_failed is_repeated",
            "rules": "known shown due shown_chars",
            "plan": "action_id text is_edited",
            "work": (
                "features contexts is_context_due requests action_id checking results is_saved was_edited "
                "written_sha256 is_verified"
            ),
            "acceptance": "check_id refusals is_refused is_checked is_accepted is_by_critic corrections",
            "notes": "pending",
            "loops": "recent found met recovery calls",
            "progress": "action_id digest looked changed failures",
            "delegation": "delegates iterations spent_usd order managing",
            "tasks": "items",
            "start": "standing has_time",
            "double_texting": "policy begun_id wanted message_ids pause_id",
        },
    )


def test_snapshot_size_follows_pending_items_not_history() -> None:
    core = started()
    sizes = []
    for n in range(300):
        core.reply(bash(f"true {n}"))
        core.observe(core.state.tools.pending[0].id)
        sizes.append(len(to_snapshot(core.state)))
    assert len(core.events) == 6 + 3 * 300
    # A few digits more in the counters, and nothing else, once stuck detection has its fill.
    assert sizes[-1] - sizes[10] < 100
