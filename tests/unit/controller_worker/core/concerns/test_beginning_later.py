"""A conversation with a start time: effects while it waits, and events that start or end it."""

from datetime import timedelta

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import ConversationStarted
from broker.contract.observations import AgentStateChangedObservation
from broker.log.status import EXPIRED_CODE
from controller_worker.core.commit import to_index_fields
from controller_worker.core.effects import CallModel
from tests.controller_parts import START, Core
from tests.scenarios import play

SOON = START + timedelta(hours=1)
EXPIRED = AgentStateChangedObservation(agent_state=AgentState.ERROR, reason="It is too late.", code=EXPIRED_CODE)


def play_shown(core: Core, *moments: tuple[str, tuple[str, str, str]]) -> None:
    """Play scenarios; after each, a listing shows whether the work has started, its state, and why it waits."""
    for scenario, shown in moments:
        play(core, scenario, begun=lambda core: core.put(ConversationStarted()), expired=lambda core: core.put(EXPIRED))
        fields = to_index_fields(core.state)
        assert (fields["planned"], fields["state"], fields["wait_reason"]) == shown


def test_nothing_is_done_before_its_time_and_everything_then() -> None:
    core = Core(not_before=SOON)
    # The message belongs to the task; the store counts the time, by no wall clock.
    play_shown(core, ("say -> start, wait 7200 -> start", ("waiting", "loading", "scheduled")))
    assert len(core.events) == 3
    assert core.append(ConversationStarted()) == CallModel(1, 1)
    play_shown(core, ("states running", ("begun", "running", "")))


def test_conversation_with_only_a_deadline_waits_for_no_time() -> None:
    play_shown(Core(expires=SOON), ("wait 0 -> start", ("waiting", "loading", "")))


@pytest.mark.parametrize(("end", "state"), [("expired", "error"), ("stopped", "stopped")])
def test_expired_conversation_starts_only_by_a_persons_message(end: str, state: str) -> None:
    play_shown(
        Core(not_before=SOON),
        (f"wait 0 -> start, {end} -> rest", ("over", state, "")),
        ("begun -> rest, say -> model 1", ("begun", "running", "")),  # started by an owner that had not read it
    )


def test_pause_holds_and_resume_starts_before_its_time() -> None:
    play_shown(
        Core(not_before=SOON),
        ("wait 0 -> start, paused -> rest", ("waiting", "paused", "")),  # it does not wait for its time any more
        ("running -> model 1", ("begun", "running", "")),
    )
