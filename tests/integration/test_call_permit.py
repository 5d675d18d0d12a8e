"""The permit of model calls, in the loop of a conversation: its cost, its writes, and its release."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import (
    AgentSpec,
    Event,
    EventSource,
    LLMSpec,
    ModelCallAdmitted,
    ModelCallDeferred,
    ModelReply,
    ModelSwitched,
    Tenancy,
)
from broker.contract.fencing import Ownership
from broker.coordination.membership import read_figures
from broker.limits.governor import CallGranted, CallOutcome, CallQueued
from broker.limits.ledger import Ledger
from broker.limits.quotas import QuotaPool, QuotaTable
from broker.runtime.clock import SystemClock
from controller_worker.core import State
from controller_worker.loop.conversation_loop import ConversationLoop
from controller_worker.model.models import Models
from controller_worker.model.permits.call_permit import CallPermit
from controller_worker.model.permits.permits import FIRST_GUESS_TOKENS
from controller_worker.providers import CallUsage, Completion, LLMConfig, Message, ModelRequest
from deckhands.client.forking import build_fork
from deckhands.client.reading.metrics import compute_spending
from tests.conversation_hands import CID, Hands
from tests.polling import until

THINK = {"tool_calls": [{"name": "think", "arguments": {"thought": "hm"}}], "cost_usd": 0.25}
FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}], "cost_usd": 0.25}
ACME = Tenancy(tenant="acme", experiment="swe")


def limit(hands: Hands, *tables: str, model: str = "scripted/*", profiles: Path | None = None) -> QuotaPool:
    """Give the worker a quota of a model, further quotas as they are, and profiles of models; return the first."""
    quotas = QuotaTable.parse("\n".join([f'[[quota]]\nmodel = "{model}"\n{tables[0]}', *tables[1:]]))
    models = Models({"LLM_CONFIG": str(profiles)}, SystemClock(), is_open=True) if profiles else hands.services.models
    hands.services = replace(hands.services, models=models, quotas=quotas)
    return quotas.pools[0]


async def occupy(hands: Hands, pool: QuotaPool, *, others: int = 0) -> None:
    """Let another conversation hold the only permit, and so many others wait for it."""
    governor = hands.services.permits.governor
    for n in range(1 + others):
        answer = await governor.reserve(pool, f"other-{n}", "controller-2", input_tokens=1, output_tokens=1)
        assert isinstance(answer, CallGranted) == (n == 0)


async def free(hands: Hands, pool: QuotaPool, cid: str = "other-0") -> None:
    await hands.services.permits.governor.settle(pool, cid, "controller-2", CallOutcome.OK, took_seconds=2.0)


async def let_pass(hands: Hands, pool: QuotaPool, others: int) -> None:
    """Give the permit to one after another of those that wait before the conversation, and back."""
    governor = hands.services.permits.governor
    for n in range(1, 1 + others):
        await free(hands, pool, f"other-{n - 1}")
        await governor.reserve(pool, f"other-{n}", "controller-2", input_tokens=1, output_tokens=1)
    await free(hands, pool, f"other-{others}")


async def has_room(hands: Hands, pool: QuotaPool) -> bool:
    """Take a permit, and return whether there was one."""
    governor = hands.services.permits.governor
    answer = await governor.reserve(pool, "another", "controller-2", input_tokens=1, output_tokens=1)
    return isinstance(answer, CallGranted)


async def run(hands: Hands, loop: ConversationLoop | None = None) -> None:
    """Let the conversation run until it waits or leaves the worker."""
    hands.gone.clear()
    loop = loop or await hands.go()
    await until(lambda: loop.is_idle or hands.gone, what="rest")


async def spent(hands: Hands, account: str) -> float:
    return (await Ledger(hands.store).load_account(account)).spent_usd


async def lost(hands: Hands) -> tuple[float, int]:
    """Return the amount reserved for the tenant, and the number of its lost calls."""
    account = await Ledger(hands.store).load_account("tenant:acme")
    return account.reserved_usd, account.lost_calls


def reply_models(events: Sequence[Event]) -> list[str]:
    return [event.model for event in events if isinstance(event, ModelReply)]


def add_script(hands: Hands, name: str, *turns: dict[str, Any]) -> str:
    """Write a script beside that of the conversation, and return its model's name."""
    path = hands.folder / f"{name}.json"
    path.write_text(json.dumps({"turns": turns}))
    return f"scripted/{path}"


def switched(model: str) -> ModelSwitched:
    return ModelSwitched(model=model, source=EventSource.USER)


def trips(hands: Hands) -> dict[str, int]:
    return {name: count for name, count in hands.wire.counts.items() if name.startswith(("deck_quota", "deck_budget"))}


def figures_of(hands: Hands) -> dict[str, dict[str, float]]:
    return read_figures(hands.services.figures.render())


async def test_usage_of_a_conversation_is_counted(hands: Hands) -> None:
    await hands.begin(THINK, FINISH)
    await run(hands)
    found = figures_of(hands)
    assert found["steps"] == {"": 2.0}
    assert found["model_calls"] == {"answered": 2.0}
    assert sum(found["cost_usd"].values()) == 0.5
    assert found["settled"] == {"finished": 1.0}
    assert "refusals" not in found
    assert trips(hands) == {}  # there is neither a quota nor a tenant


async def test_a_budget_costs_two_trips_a_call(hands: Hands) -> None:
    await hands.begin(THINK, THINK, FINISH, tenancy=ACME)
    await run(hands)
    assert trips(hands) == {"deck_budget_reserve": 3, "deck_budget_settle": 3}
    account = await Ledger(hands.store).load_account("experiment:acme/swe")
    assert (account.spent_usd, account.reserved_usd, account.calls) == (0.75, 0.0, 3)


async def test_a_quota_costs_two_trips_a_call(hands: Hands) -> None:
    limit(hands, "concurrency = 3")
    await hands.services.permits.governor.publish()
    await hands.begin(THINK, THINK, FINISH)
    await run(hands)
    assert trips(hands) == {"deck_quota_publish": 1, "deck_quota_reserve": 3, "deck_quota_settle": 3}


async def test_a_short_wait_leaves_no_trace(hands: Hands) -> None:
    pool = limit(hands, "concurrency = 1")
    await occupy(hands, pool)
    await hands.begin(FINISH)
    loop = await hands.go()
    assert hands.gone == []
    assert (await hands.kinds())[-1] == "observation.recall"
    await free(hands, pool)
    loop.wake()
    await until(lambda: bool(hands.gone), what="the end")
    kinds = await hands.kinds()
    assert kinds[-1] == "observation.agent_state_changed"
    assert not any(kind in ("model.deferred", "model.admitted") for kind in kinds)
    assert figures_of(hands)["refusals"] == {"rate_limit": 1.0}


@pytest.mark.parametrize("others", [0, 10], ids=["a short wait", "a long wait"])
async def test_a_wake_that_overtakes_a_refusal_is_not_lost(hands: Hands, others: int) -> None:
    pool = limit(hands, "concurrency = 1")
    await occupy(hands, pool, others=others)
    await hands.begin(FINISH)
    loop = await hands.claim()

    async def grant() -> None:
        for number in range(1, 1 + others):
            await hands.services.permits.governor.withdraw(pool, f"other-{number}", "controller-2")
        await free(hands, pool)
        loop.wake()

    hands.wire.after["deck_quota_reserve"] = grant
    loop.wake(has_new_events=False)
    await until(lambda: bool(hands.gone), what="the end")
    assert "action.finish" in await hands.kinds()


async def test_a_long_wait_is_told_and_gives_the_conversation_up(hands: Hands) -> None:
    pool = limit(hands, "concurrency = 1")
    await occupy(hands, pool, others=10)
    await hands.begin(FINISH)
    await hands.go()
    assert hands.gone == [CID]
    deferred = (await hands.events())[-2]
    assert isinstance(deferred, ModelCallDeferred)
    told = ("rate_limit", "The quota of scripted/* has no room for the call.")
    assert (deferred.code, deferred.content) == told
    assert deferred.expected_at is not None
    assert (await hands.events())[-1].wire()["agent_state"] == "rate_limited"


async def test_conversation_continues_after_a_long_wait(hands: Hands) -> None:
    pool = limit(hands, "concurrency = 1")
    await occupy(hands, pool, others=6)
    await hands.begin(FINISH)
    await hands.go()
    await let_pass(hands, pool, 6)
    await run(hands)
    kinds = await hands.kinds()
    assert kinds[kinds.index("model.deferred") :] == [
        *("model.deferred", "observation.agent_state_changed", "model.admitted", "observation.agent_state_changed"),
        *("model.reply", "action.finish", "observation.agent_state_changed"),
    ]


async def test_a_routed_call_counts_against_the_model_that_is_chosen(hands: Hands, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        f'[llm]\nmodel = "{add_script(hands, "unused")}"\n[llm.auto]\n'
        'router = {kind = "rules", rules = [{use = "small", images = false}]}\n'
        f'[llm.small]\nmodel = "scripted/{hands.folder}/script.json"\n'
    )
    await hands.begin(FINISH, agent=AgentSpec(llm=LLMSpec(model="auto")))
    await occupy(hands, limit(hands, "concurrency = 1", model="scripted/*/script.json", profiles=path), others=10)
    await hands.go()
    assert (await hands.kinds()).count("model.deferred") == 1


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_fallback_is_asked_if_its_quota_has_room(hands: Hands, tmp_path: Path, is_taken: bool) -> None:
    path = tmp_path / "models.toml"
    await hands.begin({"error": {"code": "rate_limit", "times": None, "retry_after_seconds": 600}})
    spare = add_script(hands, "spare", FINISH)
    path.write_text(
        f'[llm]\nmodel = "scripted/{hands.folder}/script.json"\nfallbacks = ["broken", "spare"]\n'
        f'[llm.broken]\nmodel = "scripted/{tmp_path}/none.json"\n[llm.spare]\nmodel = "{spare}"\n'
    )
    further = '[[quota]]\nmodel = "scripted/*/spare.json"\nconcurrency = 1'
    limit(hands, "concurrency = 1", further, model="scripted/*/none.json", profiles=path)
    broken, taken = hands.services.quotas.pools
    if is_taken:
        await occupy(hands, taken)
    await run(hands)
    assert reply_models(await hands.events()) == ([] if is_taken else [spare])
    if is_taken:  # the seat goes to the next, not to the conversation that has turned away
        await free(hands, taken)
    assert await has_room(hands, broken)
    assert await has_room(hands, taken)


async def test_a_pause_leaves_the_queue(hands: Hands) -> None:
    pool = limit(hands, "concurrency = 1")
    await occupy(hands, pool)
    await hands.begin(FINISH)
    loop = await hands.go()
    await hands.ask("paused")
    loop.wake()
    await until(lambda: bool(hands.gone), what="release")
    await free(hands, pool)
    assert await has_room(hands, pool)


async def test_another_model_leaves_the_queue_of_the_first(hands: Hands) -> None:
    other = add_script(hands, "other", FINISH)
    pool = limit(hands, "concurrency = 1", model="scripted/*/script.json")
    await occupy(hands, pool)
    await hands.begin(FINISH)
    loop = await hands.go()
    await hands.log.append(CID, [switched(other)])
    loop.wake()
    await run(hands, loop)
    assert reply_models(await hands.events()) == [other]
    await free(hands, pool)
    assert await has_room(hands, pool)


@pytest.mark.parametrize("has_quota", [False, True])
async def test_permit_granted_for_another_model_is_given_back(hands: Hands, has_quota: bool) -> None:
    other = add_script(hands, "other", FINISH)
    # A call of the other model with this key would fail: it is not set.
    tables = ['concurrency = 1\nkey_env = "KEY_A"', '[[quota]]\nmodel = "scripted/*/other.json"\nconcurrency = 1']
    pool = limit(hands, *tables[: 1 + has_quota], model="scripted/*/script.json")
    await occupy(hands, pool, others=10)
    await hands.begin(FINISH)
    await hands.go()
    assert hands.gone == [CID]  # a long wait, of which the log says when it is over
    await let_pass(hands, pool, 10)
    # The permit is granted, and the log is to say so.
    hands.wire.before["deck_append"] = lambda: hands.log.append(CID, [switched(other)])
    await run(hands)
    assert reply_models(await hands.events()) == [other]
    for each in hands.services.quotas.pools:
        assert await has_room(hands, each)


async def test_a_stop_gives_the_permit_back_and_loses_the_money(hands: Hands) -> None:
    pool = limit(hands, "concurrency = 1")
    await hands.begin(THINK, latency=60.0, tenancy=ACME)
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    # A task beside the loop may still make the client.
    await until(lambda: hands.wire.counts["deck_budget_reserve"], what="the call")
    await hands.ask("stopped")
    loop.wake()
    await until(lambda: bool(hands.gone), what="release")
    await hands.services.permits.aclose()
    assert await has_room(hands, pool)
    assert await lost(hands) == (0.0, 1)


async def test_reply_during_a_stop_is_charged_as_lost(hands: Hands) -> None:
    def is_thinking() -> bool:
        return any(task.get_name() == f"model {CID}" for task in asyncio.all_tasks())

    await hands.begin(THINK, latency=0.5, tenancy=ACME)
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: hands.wire.counts["deck_budget_reserve"], what="the call")
    await hands.ask("stopped")
    hands.wire.before["deck_append"] = lambda: until(lambda: not is_thinking(), what="the reply")
    loop.wake()
    await until(lambda: bool(hands.gone), what="release")
    await hands.services.permits.aclose()
    assert (await hands.kinds())[-2:] == ["action.change_agent_state", "observation.agent_state_changed"]
    assert await lost(hands) == (0.0, 1)


async def test_exhausted_budget_waits_and_top_up_resumes(hands: Hands) -> None:
    ledger = Ledger(hands.store)
    await ledger.set_limit("experiment:acme/swe", 0.25)
    await hands.begin(THINK, FINISH, tenancy=ACME)
    await hands.go()
    assert hands.gone == [CID]
    events = await hands.events()
    assert isinstance(events[-1], ModelCallDeferred)
    assert (events[-1].code, events[-1].expected_at) == ("waiting_for_budget", None)
    assert sum(isinstance(event, ModelReply) for event in events) == 1
    hands.gone.clear()
    await hands.go()  # woken for nothing
    assert await hands.kinds() == [event.kind for event in events]
    await ledger.top_up("experiment:acme/swe", 1.0)
    await run(hands)
    after = (await hands.events())[len(events) :]
    assert isinstance(after[0], ModelCallAdmitted)
    assert [event.kind for event in after[1:]] == [
        *("model.reply", "action.finish", "observation.agent_state_changed"),
    ]
    assert await spent(hands, "tenant:acme") == 0.5


async def test_a_call_that_its_budget_refuses_leaves_its_seat(hands: Hands) -> None:
    pool = limit(hands, "concurrency = 1")
    await Ledger(hands.store).set_limit("experiment:acme/swe", 0.0)
    await hands.begin(FINISH, tenancy=ACME)
    await hands.go()
    assert (await hands.kinds())[-1] == "model.deferred"
    assert await has_room(hands, pool)


async def test_retry_after_of_the_provider_reaches_the_quota(hands: Hands) -> None:
    pool = limit(hands, "concurrency = 3")
    await hands.begin(FINISH | {"error": {"code": "rate_limit", "retry_after_seconds": 600}})
    await run(hands)
    assert (await hands.kinds()).count("model.failed") == 1
    governor = hands.services.permits.governor
    answer = await governor.reserve(pool, "another", "controller-2", input_tokens=1, output_tokens=1)
    assert isinstance(answer, CallQueued)
    assert answer.eta_seconds > 300


@pytest.mark.parametrize(("code", "lost_calls"), [("timeout", 1), ("service_unavailable", 0)])
async def test_failed_call_that_may_be_billed_is_charged_as_lost(hands: Hands, code: str, lost_calls: int) -> None:
    await hands.begin(FINISH | {"error": {"code": code, "retry_after_seconds": 600}}, tenancy=ACME)
    await run(hands)
    assert (await hands.kinds()).count("model.failed") == 1
    assert await lost(hands) == (0.0, lost_calls)


async def test_pause_before_the_budget_wait_is_written_ends_it(hands: Hands) -> None:
    ledger = Ledger(hands.store)
    await ledger.set_limit("experiment:acme/swe", 0.25)
    await hands.begin(THINK, FINISH, tenancy=ACME)

    async def pause_before_the_deferral() -> None:
        if (await ledger.load_account("experiment:acme/swe")).waiting:
            await hands.ask("paused")
        else:
            hands.wire.before["deck_append"] = pause_before_the_deferral

    hands.wire.before["deck_append"] = pause_before_the_deferral
    await run(hands)
    assert (await hands.kinds())[-2:] == ["action.change_agent_state", "observation.agent_state_changed"]
    assert (await ledger.load_account("experiment:acme/swe")).waiting == 0


async def test_the_next_owner_charges_what_the_last_one_had_not(hands: Hands) -> None:
    await hands.begin(THINK, FINISH, tenancy=ACME)
    await run(hands)
    root = hands.store.all_shards[0].root
    for key in await hands.store.connection.call("KEYS", f"{root}:budget*"):
        await hands.store.connection.call("DEL", key)
    assert await spent(hands, "tenant:acme") == 0.0
    await hands.say()
    await run(hands)
    assert await spent(hands, "tenant:acme") >= 0.5


async def test_fork_does_not_pay_again_for_its_origin(hands: Hands) -> None:
    await hands.begin(THINK, FINISH, tenancy=ACME)
    await run(hands)
    events = [await hands.log.blobs.restore_event(CID, event) for event in await hands.events()]
    at = next(event.id for event in events if isinstance(event, ModelReply)) + 1
    created = build_fork(events[:at], "fork", title="fork")
    await hands.log.create_from(created, events[1:at], key="fork")
    loop = await hands.claim("fork")
    loop.wake(has_new_events=False)
    await until(lambda: "fork" in hands.gone, what="the fork's end")
    assert await spent(hands, "conversation:fork") == 0.25
    assert await spent(hands, "tenant:acme") == 0.75
    assert compute_spending(await hands.log.read("fork")).spent_usd == 0.25


async def test_unset_key_is_an_error_of_the_conversation(hands: Hands) -> None:
    limit(hands, 'key_env = "KEY_A"')
    await hands.begin(FINISH)
    await run(hands)
    last = (await hands.events())[-1].wire()
    assert last["agent_state"] == "error"
    assert "KEY_A" in json.dumps(last)


async def test_a_call_elsewhere_uses_and_teaches_no_quota(hands: Hands) -> None:
    pool = limit(hands, "concurrency = 1", model="openai/policy")
    await occupy(hands, pool)
    permits, config = hands.services.permits, LLMConfig(model="openai/policy")
    permit, before = CallPermit(permits, Ownership(CID, "controller-1", "1")), trips(hands)

    async def prepare() -> None:
        raise AssertionError("a call without a quota and a budget waits for no client")

    request = ModelRequest((Message("user"),), (), CID, 0, "/workspace")
    assert await permit.acquire(State(), config, request, prepare, is_elsewhere=True) is None
    forged = CallUsage(prompt_tokens=1_000_000, completion_tokens=1_000_000)
    async with permit.hold(config.model) as held:
        held.completion = Completion("", (), (), "policy", "1", "stop", forged, None, 1.0, {"requests": 0})
    assert trips(hands) == before
    assert permits.estimate_output_tokens(config.model) == FIRST_GUESS_TOKENS
