"""Rules for every agent apply to SDK agents: each test runs for both kinds and expects the same log.

Masking, hooks, quotas, budgets, limits, confirmation, pause, stop and loops. A stand-in takes the place of the SDK.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction, LoopRecoveryAction
from broker.contract.agent_state import AgentState
from broker.contract.events import Event, EventSource, Limits, ModelReply, Tenancy
from broker.contract.observations import ErrorObservation, UserRejectObservation
from broker.contract.policies import ConfirmationPolicy, LoopPolicy, LoopResponse
from broker.coordination.action_streams import ActionQueue, ControlDelivery
from broker.limits.governor import CallGranted, CallOutcome
from broker.limits.ledger import Ledger
from broker.limits.quotas import QuotaPool, QuotaTable
from broker.log.event_log import EventLog
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from broker.secrets.masking import MASK, find_forms
from broker.secrets.secrets import Secrets
from controller_worker.loop.conversation_loop import ConversationLoop
from controller_worker.loop.hooks import HookPoint, Hooks
from controller_worker.loop.replay import replay
from tests.broker_parts import enter, queue, take
from tests.conversation_hands import BASH, CID, THINK, Hands
from tests.integration.test_hooks import Told
from tests.polling import until
from tests.sdk_parts import stand_in, taken_up, with_sdk

LEGACY, SDK = "CodeActAgent", "CodeActAgentSDK"
CANARY = "c4n4ry/Pa+ss w0rd=9f8e7d6c"
FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
ACME = Tenancy(tenant="acme", experiment="swe")
ENDED = "observation.agent_state_changed"


def turns(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return so many replies, each with another thought."""
    return [{"tool_calls": [{"name": "think", "arguments": {"thought": f"hm {n}"}}], **fields} for n in range(count)]


class Trial:
    """One agent of a kind, its worker, and the messages to its SDK.

    Attributes:
        hears: whether there is a stand-in that records its messages.
    """

    def __init__(self, hands: Hands, name: str) -> None:
        self.hands = hands
        self.name = name
        self.hears = name == SDK
        self._heard = hands.folder / "heard"
        self._heard.touch()
        self.use("obedient")

    @property
    def is_sdk(self) -> bool:
        return self.name == SDK

    @property
    def heard(self) -> str:
        """Return the messages to the SDK, unchanged."""
        return self._heard.read_text()

    def told(self, what: str) -> list[Any]:
        """Return the messages of a kind to the SDK: `begin`, `query`, `reply`, `result`."""
        return [line[what] for line in map(json.loads, self.heard.splitlines()) if what in line]

    def use(self, habit: str) -> None:
        """Give the SDK a habit."""
        with_sdk(self.hands, stand_in(habit, self._heard))

    async def begin(self, *script: dict[str, Any], fields: dict[str, Any] | None = None, **created: Any) -> None:
        """Create a conversation; `fields` are the agent's."""
        await self.hands.begin(*script, agent=self.hands.agent(name=self.name, **fields or {}), **created)

    async def rest(self, loop: ConversationLoop | None = None, *, wakes: bool = False) -> ConversationLoop:
        """Let the conversation run until it waits or leaves the worker."""
        loop = loop or await taken_up(self.hands)
        if wakes:
            loop.wake()
        await self.hands.at_rest(loop)
        return loop

    async def answer(self, loop: ConversationLoop, text: str = "a.txt") -> None:
        """Let a tool worker answer the command that runs."""
        await self.hands.observe(loop.state.tools.pending[0].id, text)
        await self.rest(loop, wakes=True)

    async def ask(self, state: str, **fields: Any) -> None:
        request = ChangeAgentStateAction(agent_state=AgentState(state), source=EventSource.USER, **fields)
        await self.hands.log.append(CID, [request])

    async def events(self) -> list[Event]:
        """Return the log, which is whole and has no trace of another agent's help."""
        events = await self.hands.events()
        if fold_status(events).is_settled:
            assert find_violations(events, conversation_id=CID, is_strict=True, last_event_id=len(events)) == []
        assert replay(events).divergence is None
        assert "conversation.changed" not in [event.kind for event in events]
        return events

    async def kinds(self, *, after: str = "observation.recall") -> list[str]:
        """Return the kinds of the log behind its opening."""
        kinds = [event.kind for event in await self.events()]
        return kinds[kinds.index(after) + 1 :]

    async def counts(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in await self.events())

    def has_no_program(self) -> bool:
        return self.hands.services.sdk_sessions.count == 0


@asynccontextmanager
async def tool_worker(hands: Hands) -> AsyncIterator[ActionQueue]:
    """Yield what a tool worker gets to do."""
    await enter(hands.store, "tool-1", node="n1")
    reader = queue(hands.store, "tool-1", node="n1")
    try:
        yield reader
    finally:
        await reader.aclose()


@pytest.fixture(params=[pytest.param(LEGACY, marks=pytest.mark.soak), SDK])
def trial(hands: Hands, request: pytest.FixtureRequest) -> Trial:
    return Trial(hands, request.param)


# Secrets


async def test_neither_the_log_nor_the_sdk_has_a_secret(trial: Trial) -> None:
    hands = trial.hands
    secrets = Secrets(hands.store, lambda: bytes(32))
    await secrets.put(CID, "TOKEN", CANARY)
    hands.log = EventLog(hands.store, secrets)
    hands.services = replace(hands.services, log=hands.log)
    command = {"name": "execute_bash", "arguments": {"command": f"login {CANARY}"}}
    await trial.begin({"text": f"I use {CANARY}.", "tool_calls": [command]}, BASH, FINISH, headless=False)
    await hands.say(f"It is {CANARY}.")
    loop = await trial.rest()
    await trial.answer(loop, f"Welcome, {CANARY}")
    await trial.answer(loop)
    written = json.dumps([event.wire() for event in await trial.events()], default=str, ensure_ascii=False)
    for text in (written, trial.heard):
        assert [form for form in find_forms(CANARY) if form in text] == []
    assert written.count(MASK) >= 4
    assert len([line for line in trial.heard.splitlines() if MASK in line]) == (3 if trial.hears else 0)


# Hooks


async def test_a_hook_forbids_an_action_and_a_finish(trial: Trial) -> None:
    action, finish, seen = Told("not on my machine"), Told("write the changelog first"), Told()
    points = (HookPoint.BEFORE_ACTION, HookPoint.BEFORE_FINISH, HookPoint.AFTER_OBSERVATION)
    hooks = Hooks([told.hook(point) for told, point in zip((action, finish, seen), points, strict=True)])
    trial.hands.services = replace(trial.hands.services, hooks=hooks)
    await trial.begin(BASH, FINISH, BASH, FINISH)
    loop = await trial.rest()
    await trial.answer(loop)
    assert await trial.kinds() == [
        *("model.reply", "action.run", "observation.error", "model.reply", "action.finish"),
        *("observation.finish_refused", "model.reply", "action.run", "observation.run"),
        *("model.reply", "action.finish", ENDED),
    ]
    await until(lambda: "observation.run" in [call["event"]["kind"] for call in seen.calls], what="the hook")
    results = [(result["text"], result["is_error"]) for result in trial.told("result")]
    # The model reads why its finish was refused, as every prompt is made from the log; to the SDK the call is settled.
    vetoed = ("The action was not carried out: not on my machine", True)
    expected = [vetoed, ("The call is settled.", False), ("a.txt", False)]
    assert results == (expected if trial.hears else [])


async def test_a_hook_forbids_a_model_call(trial: Trial) -> None:
    hooks = Hooks([Told(None, "enough for today").hook(HookPoint.BEFORE_MODEL)])
    trial.hands.services = replace(trial.hands.services, hooks=hooks)
    await trial.begin(THINK, FINISH)
    loop = await trial.rest()
    assert (await trial.kinds())[-2:] == ["model.failed", ENDED]
    assert (loop.state.lifecycle.error_code, await trial.counts(ModelReply)) == ("hook_veto", 1)
    assert trial.has_no_program()


# Quotas of models, tenants and tools


def limited(hands: Hands) -> QuotaPool:
    quotas = QuotaTable.parse('[[quota]]\nmodel = "scripted/*"\nconcurrency = 1')
    hands.services = replace(hands.services, quotas=quotas)
    return quotas.pools[0]


async def reserved(hands: Hands, pool: QuotaPool, name: str) -> bool:
    governor = hands.services.permits.governor
    answer = await governor.reserve(pool, name, "controller-2", input_tokens=1, output_tokens=1)
    return isinstance(answer, CallGranted)


async def given_back(hands: Hands, pool: QuotaPool, name: str) -> None:
    await hands.services.permits.governor.settle(pool, name, "controller-2", CallOutcome.OK, took_seconds=2.0)


async def test_a_short_wait_for_a_models_quota_keeps_the_program(trial: Trial) -> None:
    pool = limited(trial.hands)
    assert await reserved(trial.hands, pool, "other")
    await trial.begin(FINISH)
    loop = await trial.rest()
    assert await trial.kinds() == []
    assert trial.has_no_program() is not trial.is_sdk
    await given_back(trial.hands, pool, "other")
    await trial.rest(loop, wakes=True)
    assert await trial.kinds() == ["model.reply", "action.finish", ENDED]
    assert len(trial.told("begin")) == trial.hears


async def test_a_long_wait_for_a_models_quota_holds_no_program(trial: Trial) -> None:
    pool = limited(trial.hands)
    names = [f"other-{n}" for n in range(8)]
    assert [await reserved(trial.hands, pool, name) for name in names] == [True] + [False] * 7
    await trial.begin(FINISH)
    await trial.rest()
    assert (trial.hands.gone, trial.has_no_program()) == ([CID], True)
    for before, name in zip(names, [*names[1:], ""], strict=True):
        await given_back(trial.hands, pool, before)
        assert not name or await reserved(trial.hands, pool, name)
    await trial.rest()
    assert await trial.kinds() == [
        *("model.deferred", ENDED, "model.admitted", ENDED, "model.reply", "action.finish", ENDED),
    ]


async def test_a_tenants_budget_is_waited_for_and_paid_from(trial: Trial) -> None:
    ledger = Ledger(trial.hands.store)
    await ledger.set_limit("tenant:acme", 0.25)
    await trial.begin(*turns(1, cost_usd=0.25), FINISH | {"cost_usd": 0.5}, tenancy=ACME)
    await trial.rest()
    assert trial.has_no_program()
    await ledger.top_up("tenant:acme", 1.0)
    await trial.rest()
    assert await trial.kinds() == [
        *("model.reply", "action.think", "observation.think", "model.deferred", "model.admitted"),
        *("model.reply", "action.finish", ENDED),
    ]
    for name in ("tenant:acme", "experiment:acme/swe"):
        account = await ledger.load_account(name)
        assert (account.spent_usd, account.reserved_usd, account.calls) == (0.75, 0.0, 2)


async def test_tools_the_agent_lacks_are_neither_offered_nor_run(trial: Trial) -> None:
    await trial.begin(BASH, FINISH, fields={"enable_cmd": False})
    await trial.rest()
    assert (await trial.kinds())[:2] == ["model.reply", "observation.error"]
    offered = [tool["name"] for begun in trial.told("begin") for tool in begun["tools"]]
    assert ("finish" in offered, "execute_bash" in offered) == (trial.hears, False)


async def test_so_many_tools_run_at_once_as_the_agent_may(trial: Trial) -> None:
    three = {"tool_calls": [{"name": "execute_bash", "arguments": {"command": f"ls {n}"}} for n in range(3)]}
    await trial.begin(three, FINISH, fields={"tool_concurrency": 2})
    loop = await trial.rest()
    async with tool_worker(trial.hands) as reader:
        given = [delivery.action_id for delivery in await reader.read(limit=5)]
        assert given == [pending.id for pending in loop.state.tools.pending][:2]
        for _ in range(3):
            await trial.answer(loop)
    assert loop.state.lifecycle.agent_state is AgentState.FINISHED


# Limits and the budget of a conversation


@pytest.mark.parametrize(
    ("limits", "code", "replies"),
    [
        (Limits(max_iterations=2), "max_iterations", 2),
        (Limits(max_budget_usd=1.2), "max_budget", 2),
        (Limits(max_tokens=250), "max_tokens", 3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_limit_ends_the_conversation(trial: Trial, limits: Limits, code: str, replies: int) -> None:
    script = turns(6, cost_usd=0.5, usage={"prompt_tokens": 90, "completion_tokens": 10})
    await trial.begin(*script, limits=limits)
    loop = await trial.rest()
    assert (loop.state.lifecycle.error_code, await trial.counts(ModelReply)) == (code, replies)
    assert (await trial.kinds())[-1] == ENDED
    assert trial.has_no_program()


async def test_a_time_limit_stops_the_command_that_runs(trial: Trial) -> None:
    await trial.begin(BASH, limits=Limits(max_seconds=1.0))
    loop = await trial.rest()
    assert loop.state.tools.pending
    await until(lambda: trial.hands.gone == [CID], what="the end of the time")
    assert loop.state.lifecycle.error_code == "max_time"
    assert (await trial.kinds())[-2:] == ["observation.error", ENDED]
    assert trial.has_no_program()


# Confirmation


async def test_a_person_rejects_with_a_reason_and_accepts_another(trial: Trial) -> None:
    asking = {"confirmation": ConfirmationPolicy(mode="always")}
    await trial.begin(BASH, BASH, FINISH, fields=asking, headless=False)
    await trial.rest()
    assert (await trial.kinds())[-2:] == ["action.run", ENDED]
    assert trial.has_no_program()
    await trial.ask("user_rejected", reason="not in production")
    loop = await trial.rest()
    (rejected,) = [event for event in await trial.events() if isinstance(event, UserRejectObservation)]
    assert "not in production" in rejected.content
    assert loop.state.lifecycle.agent_state is AgentState.AWAITING_USER_CONFIRMATION
    assert [pending.is_awaiting for pending in loop.state.tools.pending] == [True]
    await trial.ask("user_confirmed")
    loop = await trial.rest()
    await trial.answer(loop)
    kinds = await trial.kinds()
    assert (kinds.count("observation.run"), kinds.count("model.reply")) == (1, 3)
    assert loop.state.lifecycle.agent_state is AgentState.FINISHED
    # A fresh program after each wait, and each of them is where the log ends.
    texts = [result["text"] for result in trial.told("result")]
    assert texts == ([rejected.content, rejected.content, "a.txt"] if trial.hears else [])


async def test_a_person_edits_what_is_to_run(trial: Trial) -> None:
    await trial.begin(BASH, FINISH, fields={"confirmation": ConfirmationPolicy(mode="always")}, headless=False)
    await trial.rest()
    await trial.ask("user_confirmed", edited={"command": "ls -l"})
    loop = await trial.rest()
    events = await trial.events()
    (pending,) = loop.state.tools.pending
    assert events[pending.id - 1].wire()["command"] == "ls -l"
    await trial.answer(loop, "total 0")
    assert loop.state.lifecycle.agent_state is AgentState.FINISHED
    assert ("total 0" in [result["text"] for result in trial.told("result")]) is trial.hears


# Pause and stop


def is_thinking(loop: ConversationLoop) -> Callable[[], bool]:
    return lambda: loop._call.is_running


async def test_a_pause_while_a_command_runs_waits_for_its_result(trial: Trial) -> None:
    await trial.begin(BASH, FINISH, headless=False)
    loop = await trial.rest()
    await trial.ask("paused")
    await trial.rest(loop, wakes=True)
    action = loop.state.tools.pending[0].id
    await trial.hands.observe(action)
    loop.wake()
    await trial.rest(await taken_up(trial.hands) if trial.hands.gone else loop)
    assert (await trial.counts(ModelReply), trial.has_no_program()) == (1, True)
    await trial.ask("running")
    loop = await trial.rest()
    assert loop.state.lifecycle.agent_state is AgentState.FINISHED
    kinds = await trial.kinds()
    assert (kinds.count("action.run"), kinds.count("observation.run"), kinds.count("model.reply")) == (1, 1, 2)


async def test_a_pause_while_the_model_thinks_keeps_its_reply(trial: Trial) -> None:
    await trial.begin(BASH, FINISH, latency=0.3)
    loop = await taken_up(trial.hands)
    await until(is_thinking(loop), what="a call")
    await trial.ask("paused")
    loop.wake()
    await until(lambda: trial.hands.gone == [CID], what="the pause")
    assert fold_status(await trial.events()).state is AgentState.PAUSED
    assert trial.has_no_program()
    await trial.ask("running")
    loop = await trial.rest()
    await trial.answer(loop)
    await until(lambda: trial.hands.gone == [CID, CID], what="the end")
    assert await trial.counts(ModelReply) == 2


async def test_a_stop_while_a_command_runs_ends_the_command(trial: Trial) -> None:
    await trial.begin(BASH, FINISH)
    loop = await trial.rest()
    action = loop.state.tools.pending[0].id
    async with tool_worker(trial.hands) as reader:
        await reader.claim(await take(reader))
        await trial.ask("stopped")
        loop.wake()
        await trial.rest(loop)
        orders = [order for order in await reader.read(limit=5) if isinstance(order, ControlDelivery)]
    assert (action, "cancel") in [(order.action_id, order.order) for order in orders]
    assert (await trial.counts(ErrorObservation), await trial.counts(ModelReply)) == (1, 1)
    assert (loop.state.lifecycle.agent_state, trial.has_no_program()) == (AgentState.STOPPED, True)


async def test_a_stop_while_the_model_thinks_drops_its_reply(trial: Trial) -> None:
    await trial.begin(THINK, latency=30.0)
    loop = await taken_up(trial.hands)
    await until(is_thinking(loop), what="a call")
    await trial.ask("stopped")
    loop.wake()
    await until(lambda: trial.hands.gone == [CID], what="the stop")
    kinds = [
        kind for kind in await trial.kinds() if kind != "conversation.party_stopped"
    ]  # it follows in the background
    assert kinds == ["action.change_agent_state", ENDED]
    assert trial.has_no_program()


@pytest.mark.parametrize("state", ["paused", "stopped"])
async def test_silent_sdk_does_not_delay_pause_or_stop(hands: Hands, state: str) -> None:
    trial = Trial(hands, SDK)
    trial.use("silent")
    await trial.begin(FINISH)
    loop = await taken_up(hands)
    await until(lambda: trial.told("query"), what="a program")
    await trial.ask(state)
    loop.wake()
    await until(lambda: hands.gone == [CID], what="release")
    assert (fold_status(await trial.events()).state.value, trial.has_no_program()) == (state, True)
    trial.use("obedient")
    await trial.ask("running") if state == "paused" else await hands.say()
    await trial.rest()
    assert (await trial.kinds())[-3:] == ["model.reply", "action.finish", ENDED]


# Loops


async def looped(trial: Trial, **fields: Any) -> ConversationLoop:
    """Let an agent run the same command four times."""
    await trial.begin(*[BASH] * 5, FINISH, fields=fields)
    loop = await trial.rest()
    for _ in range(4):
        await trial.answer(loop)
    return loop


async def test_a_loop_ends_the_conversation(trial: Trial) -> None:
    loop = await looped(trial)
    assert (loop.state.lifecycle.error_code, await trial.counts(ModelReply)) == ("stuck_in_loop", 4)
    assert trial.has_no_program()


@pytest.mark.parametrize("response", [LoopResponse.NUDGE, LoopResponse.RESTART])
async def test_a_loop_is_answered_and_the_agent_continues(trial: Trial, response: LoopResponse) -> None:
    loop = await looped(trial, loop_policy=LoopPolicy(responses=(response,)))
    await trial.answer(loop)
    assert (loop.state.lifecycle.agent_state, await trial.counts(ModelReply)) == (AgentState.FINISHED, 6)
    assert "observation.loop_detection" in await trial.kinds()


async def test_a_person_leads_an_agent_out_of_its_loop(trial: Trial) -> None:
    await looped(trial)
    await trial.hands.log.append(CID, [LoopRecoveryAction(option=2, source=EventSource.USER)])
    loop = await trial.rest()
    await trial.answer(loop)
    assert loop.state.lifecycle.agent_state is AgentState.FINISHED
    assert await trial.counts(ModelReply) == 6
