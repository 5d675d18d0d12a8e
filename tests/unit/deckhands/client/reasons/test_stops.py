"""When each party stopped after a request, as the events say."""

from datetime import UTC, datetime, timedelta

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import DelegateEnded, Event, PartyStopped
from broker.contract.observations import AgentStateChangedObservation
from deckhands.client.reasons.history import Stops

ASKED = ChangeAgentStateAction(agent_state=AgentState.STOPPED)
DECIDED = AgentStateChangedObservation(agent_state=AgentState.STOPPED)
CALL = PartyStopped(party="model", seconds=0.002)
ACTION = PartyStopped(party="tool", action_id=7)
DELEGATE = DelegateEnded(delegate_id=3, conversation_id="d1", agent_state=AgentState.STOPPED)


def tell(*events: Event) -> list[str]:
    stops, began = Stops(), datetime(2026, 1, 1, tzinfo=UTC)
    for number, event in enumerate(events):
        stops.add(event.model_copy(update={"id": number + 1, "timestamp": began + timedelta(seconds=number / 4)}))
    return [str(stop) for stop in stops.parties]


def test_each_party_has_its_time_after_the_request() -> None:
    assert tell(ASKED, DECIDED, CALL, ACTION, DELEGATE) == [
        "[2] controller stopped 0.25 s after the request",
        "[3] the model call stopped 0.50 s after the request, 0.002 s after its order",
        "[4] action 7 stopped 0.75 s after the request",
        "[5] delegate d1 stopped 1.00 s after the request",
    ]


def test_only_the_latest_request_counts() -> None:
    assert tell(ASKED, DECIDED, ASKED, CALL) == [
        "[4] the model call stopped 0.25 s after the request, 0.002 s after its order"
    ]
    resumed = AgentStateChangedObservation(agent_state=AgentState.RUNNING)
    assert tell(ASKED, DECIDED, resumed, DELEGATE) == tell(ASKED, DECIDED, CALL, resumed) == []
    assert tell(DELEGATE, DECIDED) == []
    interrupt = ChangeAgentStateAction(agent_state=AgentState.PAUSED, is_interrupt=True)
    pause = ChangeAgentStateAction(agent_state=AgentState.PAUSED)
    assert (len(tell(interrupt, CALL)), len(tell(pause, CALL))) == (1, 0)
