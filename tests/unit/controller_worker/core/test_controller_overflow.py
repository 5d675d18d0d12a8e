"""A prompt that does not fit the model: condense and continue, as the core decides it."""

from __future__ import annotations

import pytest

from broker.contract.actions import CondensationAction, CondensationRequestAction
from broker.contract.condenser_specs import LLMSummarizingCondenserSpec, NoOpCondenserSpec
from broker.contract.events import AgentSpec, ModelCallFailed, ModelReply, TokenUsage
from controller_worker.core.concerns.model_calls import MAX_OVERFLOWS
from controller_worker.core.effects import CallModel, Rest
from controller_worker.core.state import parse_snapshot, to_snapshot
from tests.controller_parts import Core, started

TOO_LONG = "LLMContextWindowExceedError: prompt is too long"


def overflow(core: Core) -> object:
    return core.fail("context_window", retry_in=None, last_error=TOO_LONG)


def test_overflow_leads_to_a_request_and_next_step() -> None:
    """Golden trace 20."""
    core = started()
    assert overflow(core) == CallModel(1, 1)
    assert core.trace(after=6) == ["7 ModelCallFailed(environment)", "8 CondensationRequestAction(agent)"]
    assert core.states() == ["running"]


def test_step_after_a_condensation_takes_no_iteration() -> None:
    """Golden trace 21."""
    core = started()
    assert core.append(CondensationAction(forgotten_event_ids=(4,))) == CallModel(1, 1)
    assert core.trace(after=6) == ["7 CondensationAction(agent)"]


def test_repeated_overflows_end_in_an_error() -> None:
    core = started()
    for _ in range(MAX_OVERFLOWS):
        assert overflow(core) == CallModel(1, 1)
        core.append(CondensationAction(forgotten_event_ids=()))
    assert isinstance(overflow(core), Rest)
    assert core.states() == ["running", "error"]
    assert core.state.lifecycle.last_error == TOO_LONG


def test_a_condensers_reply_does_not_begin_the_count_again() -> None:
    core = started(agent=AgentSpec(condenser=LLMSummarizingCondenserSpec()))
    for _ in range(MAX_OVERFLOWS):
        assert overflow(core) == CallModel(1, 1)
        core.append(ModelReply(service="condenser", content="notes"), CondensationAction(forgotten_event_ids=()))
    assert core.state.calls.reply_id == 0
    assert isinstance(overflow(core), Rest)
    assert core.states() == ["running", "error"]


def test_a_reply_or_a_person_begins_the_count_anew() -> None:
    core = started()
    for _ in range(2):
        overflow(core)
    assert core.state.calls.overflows == 2
    core.reply(text="It fits.")
    assert core.state.calls.overflows == 0
    core.say()
    core.run()
    overflow(core)
    core.say()
    assert core.state.calls.overflows == 0


@pytest.mark.parametrize(
    "agent",
    [AgentSpec(condenser=NoOpCondenserSpec()), AgentSpec(enable_history_truncation=False)],
    ids=["nobody answers requests", "switched off"],
)
def test_overflow_with_nothing_to_condense_is_an_error(agent: AgentSpec) -> None:
    core = started(agent=agent)
    overflow(core)
    assert core.states() == ["running", "error"]
    assert not any(isinstance(event, CondensationRequestAction) for event in core.events)


def test_condenser_costs_are_counted_without_a_step() -> None:
    core = started(agent=AgentSpec(condenser=LLMSummarizingCondenserSpec()))
    reply = ModelReply(
        service="condenser", content="notes", cost_usd=0.5, usage=TokenUsage(prompt_tokens=7, completion_tokens=3)
    )
    wanted = core.append(reply, CondensationAction(forgotten_event_ids=(4,), summary="notes", summary_offset=1))
    assert wanted == CallModel(1, 1)
    assert (core.state.usage.cost_usd, core.state.usage.prompt_tokens, core.state.usage.completion_tokens) == (
        0.5,
        7,
        3,
    )
    assert core.state.usage.iteration == 0


def test_a_request_that_is_not_made_yet_survives_a_snapshot() -> None:
    core = started()
    core.put(ModelCallFailed(code="context_window", last_error=TOO_LONG))
    assert (core.state.calls.overflows, core.state.calls.wants_condensation) == (1, True)
    assert parse_snapshot(to_snapshot(core.state)) == core.state
    assert core.run() == CallModel(1, 1)
    assert core.trace(after=7) == ["8 CondensationRequestAction(agent)"]
