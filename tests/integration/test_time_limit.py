"""A conversation whose time is up while it waits: nobody else has to speak up for it to end."""

from __future__ import annotations

from broker.contract.events import Limits
from broker.contract.observations import AgentStateChangedObservation, ErrorObservation
from tests.conversation_hands import BASH, THINK, Hands
from tests.polling import until

SHORT = Limits(max_seconds=0.4)


async def ended(found: Hands) -> bool:
    last = (await found.events())[-1]
    return isinstance(last, AgentStateChangedObservation) and last.code == "max_time"


async def test_a_tool_that_outlasts_the_time_is_ended(hands: Hands) -> None:
    await hands.begin(BASH, limits=SHORT)
    await hands.go()
    await until(lambda: ended(hands), what="the end of the time")
    answer = (await hands.events())[-2]
    assert isinstance(answer, ErrorObservation)
    assert answer.error_id == "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_ERROR"


async def test_a_model_that_outlasts_the_time_is_not_waited_for(hands: Hands) -> None:
    await hands.begin(THINK, latency=60.0, limits=SHORT)
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: ended(hands), what="the end of the time")
    await until(lambda: loop.is_idle, what="rest")
    assert "model.reply" not in await hands.kinds()


async def test_released_conversation_is_woken_at_its_time_limit(hands: Hands) -> None:
    await hands.begin(BASH, limits=Limits(max_seconds=20.0))
    loop = await hands.go()
    await loop.release_idle()
    parked = hands.store.keys(loop.conversation_id).shard.parked
    _, due = await hands.store.connection.call("ZRANGE", parked, 0, -1, "WITHSCORES")
    assert loop.state.usage.deadline is not None
    assert abs(float(due) / 1000 - loop.state.usage.deadline.timestamp()) < 5.0
