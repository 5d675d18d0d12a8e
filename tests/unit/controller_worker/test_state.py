"""State and its snapshots."""

from __future__ import annotations

import zlib
from dataclasses import fields
from datetime import UTC, datetime

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.actions import TaskItem
from broker.agent_state import AgentState
from broker.events import AgentSpec, Limits, LLMSpec, Parent, Tenancy, ToolCallMetadata, WorkspaceSpec
from controller_worker.state import (
    SNAPSHOT_VERSION,
    Acceptance,
    Delegate,
    DelegateEnd,
    Gate,
    Opening,
    Order,
    PendingAction,
    Plan,
    State,
    Survey,
    UnansweredMessage,
    Wait,
    snapshot_of,
    state_from,
    without_pending,
)
from controller_worker.stuck_detector import Loop, RecentEvents, Trace
from tests.controller_parts import bash, started

METADATA = ToolCallMetadata(function_name="execute_bash", tool_call_id="c1", reply_id=7, total_calls_in_response=2)
FULL = State(
    version=42,
    conversation_id="conversation-1",
    agent=AgentSpec(llm=LLMSpec(model="acme/large", temperature=0.5), tool_concurrency=4, system_prompt_suffix="ü"),
    workspace=WorkspaceSpec(path="/srv/project", network=True),
    limits=Limits(max_iterations=9, max_budget_usd=2.5),
    tenancy=Tenancy(tenant="acme", experiment="swe", priority="batch"),
    headless=False,
    agent_state=AgentState.RATE_LIMITED,
    requested=AgentState.PAUSED,
    ending=AgentState.FINISHED,
    last_error="RuntimeError: oops",
    error_code="unexpected",
    has_system_message=True,
    message=UnansweredMessage(40, "go on", datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC), is_first=True),
    last_message_id=40,
    is_reply_outdated=True,
    pending=(PendingAction(38, METADATA), PendingAction(39)),
    wait=Wait("rate_limit", datetime(2026, 3, 1, 12, 0, 8, 654321, tzinfo=UTC)),
    gate=Gate("rate_limit", datetime(2026, 3, 1, 12, 0, 9, tzinfo=UTC)),
    attempt=2,
    overflows=1,
    wants_condensation=True,
    opening=Opening(3, 1, is_open=True, has_failed=True),
    survey=Survey(4, 2, 5, is_over=True),
    iteration=6,
    max_iterations=18,
    max_budget_usd=3.75,
    max_tokens=1_000,
    deadline=datetime(2026, 3, 1, 13, 0, tzinfo=UTC),
    cost_usd=0.1 + 0.2,
    delegated_usd=0.1,
    forked_at=2,
    inherited_usd=0.05,
    has_unknown_cost=True,
    task_list=(TaskItem(id="a", title="Look", status="done", notes="ü"),),
    prompt_tokens=12_345_678,
    completion_tokens=321,
    reply_id=37,
    recent=RecentEvents((Trace(38, 37, "aa"),), (Trace(39, 39, "bb", "error"),), is_condensed=True),
    loop=Loop("monologue", 3, 12),
    loops_met=1,
    recovery=2,
    asked_id=38,
    answer_id=41,
    confirmed_id=39,
    parent=Parent(conversation_id="conversation-0", delegate_id=9),
    delegate_level=1,
    delegates=(Delegate(7, "CodeActAgent", METADATA, 6, iterations=5, end=DelegateEnd("d1", "done", {"a": 1})),),
    delegated_iterations=4,
    order=Order(AgentState.PAUSED, 8),
    result_id=36,
    plan=Plan(39, "1. Look", is_edited=True),
    acceptance=Acceptance(
        check_id=41, refusals=1, is_refused=True, is_checked=True, is_accepted=True, is_by_critic=True, corrections=2
    ),
    note_taking=(PendingAction(40, METADATA),),
)


def test_the_example_sets_every_field() -> None:
    empty = State()
    assert [field.name for field in fields(State) if getattr(FULL, field.name) == getattr(empty, field.name)] == []


@pytest.mark.parametrize("state", [State(), FULL])
def test_a_snapshot_gives_the_state_back(state: State) -> None:
    assert state_from(snapshot_of(state)) == state


def test_the_same_state_has_the_same_snapshot() -> None:
    assert snapshot_of(FULL) == snapshot_of(FULL)


def test_there_may_be_no_snapshot() -> None:
    assert state_from(None) is None
    assert state_from(b"") is None


def test_a_snapshot_of_another_version_is_not_used() -> None:
    newer = bytes((SNAPSHOT_VERSION + 1,)) + snapshot_of(FULL)[1:]
    assert state_from(newer) is None


def test_no_damage_goes_unnoticed() -> None:
    whole = snapshot_of(FULL)
    for position in range(len(whole)):
        damaged = whole[:position] + bytes((whole[position] ^ 0x10,)) + whole[position + 1 :]
        assert state_from(damaged) is None, position
        assert state_from(whole[:position]) is None, position


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgpack.packb([1, 2]), msgpack.packb({"version": "x"}), msgpack.packb({"agent_state": "dancing"})],
)
def test_what_is_no_state_is_not_used(payload: bytes) -> None:
    snapshot = bytes((SNAPSHOT_VERSION,)) + zlib.crc32(payload).to_bytes(4, "big") + payload
    assert state_from(snapshot) is None


@given(st.binary(max_size=200))
def test_hostile_bytes_give_no_state_and_raise_nothing(content: bytes) -> None:
    assert state_from(bytes((SNAPSHOT_VERSION,)) + zlib.crc32(content).to_bytes(4, "big") + content) in (None, State())


def test_the_fields_of_a_snapshot_change_only_together_with_its_version() -> None:
    assert (SNAPSHOT_VERSION, [field.name for field in fields(State)]) == (
        20,
        [
            *("version", "conversation_id", "agent", "workspace", "limits", "tenancy", "headless"),
            *("agent_state", "requested", "ending", "last_error", "error_code", "has_system_message"),
            *("message", "last_message_id", "is_reply_outdated", "pending", "wait", "gate", "attempt"),
            *("overflows", "wants_condensation", "opening", "survey"),
            *(
                "iteration",
                "max_iterations",
                "max_budget_usd",
                "max_tokens",
                "deadline",
                "cost_usd",
                "has_unknown_cost",
            ),
            *("task_list", "prompt_tokens", "completion_tokens"),
            *("reply_id", "recent", "loop", "loops_met", "recovery"),
            *("asked_id", "answer_id", "confirmed_id"),
            *("parent", "delegate_level", "delegates", "delegated_iterations", "delegated_usd"),
            *("forked_at", "inherited_usd"),
            *("order", "result_id", "plan", "acceptance", "note_taking"),
        ],
    )


def test_settling_an_action_leaves_the_others() -> None:
    assert without_pending(FULL, 38).pending == (PendingAction(39),)
    assert without_pending(FULL, 1) is FULL


def test_a_snapshot_is_as_large_as_what_is_pending_not_as_the_history() -> None:
    core = started()
    sizes = []
    for n in range(300):
        core.reply(bash(f"true {n}"))
        core.observe(core.state.pending[0].id)
        sizes.append(len(snapshot_of(core.state)))
    assert len(core.events) == 6 + 3 * 300
    # A few digits more in the counters, and nothing else, once stuck detection has its fill.
    assert sizes[-1] - sizes[10] < 100
