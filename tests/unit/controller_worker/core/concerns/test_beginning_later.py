"""A conversation that waits for its time: what is done for it meanwhile, and what begins or ends it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import ConversationStarted
from broker.contract.observations import AgentStateChangedObservation
from broker.log.expiry import EXPIRED_CODE
from controller_worker.core.commit import to_index_fields
from controller_worker.core.effects import AwaitStart, CallModel, Rest
from tests.controller_parts import START, Core, check_snapshots

SOON = START + timedelta(hours=1)
EXPIRED = AgentStateChangedObservation(agent_state=AgentState.ERROR, reason="It is too late.", code=EXPIRED_CODE)


def waiting() -> Core:
    core = Core(not_before=SOON)
    assert core.run() == AwaitStart()
    return core


def shown(core: Core) -> tuple[object, ...]:
    fields = to_index_fields(core.state)
    return fields["planned"], fields["state"], fields["wait_reason"]


def test_nothing_is_done_before_its_time_and_everything_then() -> None:
    core = waiting()
    core.say("and this")  # it belongs to the task
    core.pass_time(7_200)
    assert core.run() == AwaitStart()  # the store counts the time, and nobody's clock
    assert len(core.events) == 3
    assert shown(core) == ("waiting", "loading", "scheduled")
    assert core.append(ConversationStarted()) == CallModel(1, 1)
    assert shown(core) == ("begun", "running", "")
    check_snapshots(core)


def test_conversation_with_only_a_deadline_waits_for_no_time() -> None:
    core = Core(expires=SOON)
    assert core.run() == AwaitStart()
    assert shown(core) == ("waiting", "loading", "")


@pytest.mark.parametrize("end", ["expired", "stopped"])
def test_expired_conversation_starts_only_by_a_persons_message(end: str) -> None:
    core = waiting()
    if end == "expired":
        core.put(EXPIRED)
    else:
        core.ask("stopped")
    assert core.run() == Rest()
    assert shown(core) == ("over", "error" if end == "expired" else "stopped", "")
    core.put(ConversationStarted())  # by an owner that had not heard of it
    assert core.run() == Rest()
    core.say("begin after all")
    assert core.run() == CallModel(1, 1)
    assert shown(core) == ("begun", "running", "")
    check_snapshots(core)


def test_pause_holds_and_resume_starts_before_its_time() -> None:
    core = waiting()
    core.ask("paused")
    assert core.run() == Rest()  # it does not wait for its time any more
    assert shown(core) == ("waiting", "paused", "")
    core.ask("running")
    assert core.run() == CallModel(1, 1)
    assert shown(core) == ("begun", "running", "")
    check_snapshots(core)
