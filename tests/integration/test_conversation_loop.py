"""The shell around the core on a real store: the races between news, answers, stops, errors, releases and deaths."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.agent_state import AgentState
from broker.contract.condenser_specs import NoOpCondenserSpec, OtherCondenserSpec
from broker.contract.events import AgentSpec, ConversationCreated, LLMSpec, ModelReply
from broker.contract.file_events import FileReadObservation
from broker.contract.observations import AgentStateChangedObservation, ErrorObservation
from broker.contract.specs import MemorySpec
from broker.coordination.crash_attribution import Mark
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, ClaimFailure
from broker.limits.governor import CallGranted
from broker.limits.quotas import QuotaTable
from broker.log.conversations import Conversations
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from broker.store import keys
from broker.store.function_library import ANNOUNCED_FIELD, FunctionsVersion, deploy, own_version
from controller_worker.agents.registry import AGENTS
from controller_worker.core.state import parse_snapshot
from controller_worker.loop.conversation_loop import FORGET_HISTORY_AFTER_SECONDS, ConversationLoop
from controller_worker.loop.owned_log import EVERY_EVENTS, SHORT_EVENTS
from controller_worker.loop.replay import replay
from controller_worker.memory.condensers.model_free import NoOpCondenser
from controller_worker.memory.conversation_memory import PromptOptions
from controller_worker.model.prompt_history import PromptHistory
from controller_worker.providers.messages.messages import Message, TextPart
from tests.broker_parts import lapse, mail_of, notified
from tests.controller_parts import said
from tests.conversation_hands import BASH, CID, THINK, WORKER, Hands, is_asking
from tests.polling import until

FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}
SHOW_ALL = (NoOpCondenser(NoOpCondenserSpec()), PromptOptions(max_message_chars=1_000))


# NewEvents


async def test_only_a_long_log_leaves_a_snapshot_at_its_release(hands: Hands) -> None:
    thoughts = [{"tool_calls": [{"name": "think", "arguments": {"thought": f"hm {n}"}}]} for n in range(6)]
    await hands.begin(FINISH, *thoughts, FINISH)
    await hands.go()
    assert len(await hands.events()) <= SHORT_EVENTS
    assert await hands.owners.load_snapshot(CID) is None
    await hands.say("again")
    await hands.go()
    events = await hands.events()
    assert len(events) > SHORT_EVENTS
    snapshot = parse_snapshot(await hands.owners.load_snapshot(CID))
    assert snapshot is not None
    assert (snapshot.version, snapshot.lifecycle.agent_state) == (len(events), AgentState.FINISHED)
    assert replay(events).divergence is None


async def test_removed_conversation_leaves_nothing_for_the_garbage_collector(hands: Hands) -> None:
    """A full collection visits all conversations of a worker, so it is rare: what waits for one would pile up."""
    await hands.begin(THINK)
    gc.disable()
    try:
        loop = weakref.ref(await hands.go())
        hands.loops.clear()
        assert hands.gone == [CID]
        assert loop() is None
    finally:
        gc.enable()


async def test_a_ring_between_claim_and_reading_silences_no_later_one(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.claim()
    await hands.say("quickly")  # wakes the new owner, which has not read yet
    assert await mail_of(hands.store, WORKER) == [CID]
    loop.wake(has_new_events=False)
    await hands.at_rest(loop)
    assert loop.state.version == len(await hands.events())
    await hands.observe(loop.state.tools.pending[0].id)
    assert await mail_of(hands.store, WORKER) == [CID, CID]


async def test_events_during_an_append_are_read_and_decided_on(hands: Hands) -> None:
    await hands.begin()
    hands.wire.before["deck_append"] = hands.say
    await hands.go()
    # Created, task and message stand before anything the agent wrote.
    assert (await hands.kinds())[:4] == ["conversation.created", "action.message", "action.message", "action.system"]
    assert fold_status(await hands.events()).state is AgentState.FINISHED


async def test_an_answer_survives_the_news_that_came_before_its_append(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.claim()
    append = hands.wire.before

    async def say_before_the_reply() -> None:
        append["deck_append"] = hands.say

    append["deck_append"] = say_before_the_reply  # the first append is the greeting
    loop.wake(has_new_events=False)
    await hands.at_rest(loop)
    replies = [event for event in await hands.events() if isinstance(event, ModelReply)]
    assert [reply.seen_id for reply in replies] == [6]
    assert loop.state.inbox.is_reply_outdated
    assert len(loop.state.tools.pending) == 1


async def test_a_flood_of_messages_delays_but_fails_nothing(hands: Hands) -> None:
    await hands.begin()
    left = 100

    async def say_before_the_next_append_too() -> None:
        nonlocal left
        await hands.say(str(left))
        left -= 1
        if left:
            hands.wire.before["deck_append"] = say_before_the_next_append_too

    hands.wire.before["deck_append"] = say_before_the_next_append_too
    await hands.go()
    events = await hands.events()
    assert fold_status(events).state is AgentState.FINISHED
    expected = ["conversation.created", *["action.message"] * 101, "action.system"]
    assert [event.kind for event in events[:103]] == expected
    assert sum(event.kind == "action.recall" for event in events) == 1


async def test_conversation_returned_under_an_earlier_token_is_restarted(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    await hands.store.connection.call("HINCRBY", hands.store.known_keys(CID).meta, "token", -1)
    await hands.break_connections()
    await hands.say()
    loop.wake()
    await hands.at_rest(loop)
    assert (hands.gone, await hands.owner()) == ([CID], WORKER)
    assert loop.should_reclaim


async def test_a_release_with_news_is_none(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    hands.wire.before["deck_release"] = hands.say
    await loop.release_idle()
    assert hands.gone == []
    assert await hands.owner() == WORKER
    assert (await hands.kinds())[-1] == "observation.null"


async def test_idle_conversation_is_released_and_returns_where_it_was(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    before = loop.state
    await loop.release_idle()
    assert (hands.gone, await hands.owner()) == ([CID], "")
    await hands.observe(before.tools.pending[0].id)
    assert await notified(hands.store) == [CID, CID]
    second = await hands.go()
    assert second.state.lifecycle.agent_state is AgentState.FINISHED
    assert find_violations(await hands.events(), conversation_id=CID, is_strict=True) == []


async def test_looking_after_a_long_action_does_not_count_as_news(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    since, dispatches = loop.waiting_since, hands.wire.counts["deck_dispatch"]
    loop.check_dispatch()
    await hands.at_rest(loop)
    assert hands.wire.counts["deck_dispatch"] == dispatches + 1
    assert loop.waiting_since == since
    await hands.say()
    loop.wake()
    await hands.at_rest(loop)
    assert loop.waiting_since > since


async def test_step_reads_only_new_events_despite_long_history(hands: Hands) -> None:
    thoughts = [{"tool_calls": [{"name": "think", "arguments": {"thought": f"hm {n}"}}]} for n in range(120)]
    await hands.begin(*thoughts)
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: loop.state.usage.iteration >= 10, what="ten steps")
    reads, since = hands.wire.counts["XRANGE"], loop.state.usage.iteration
    await hands.at_rest(loop)
    assert loop.state.usage.iteration == 121
    # One append a step; nothing of the log is read again.
    assert hands.wire.counts["XRANGE"] == reads
    assert hands.wire.counts["deck_append"] >= 121 - since


async def test_a_long_conversation_leaves_snapshots_on_its_way(hands: Hands) -> None:
    thoughts = [{"tool_calls": [{"name": "think", "arguments": {"thought": f"hm {n}"}}]} for n in range(20)]
    await hands.begin(*thoughts, BASH)
    loop = await hands.go()
    snapshot = parse_snapshot(await hands.owners.load_snapshot(CID))
    assert snapshot is not None
    assert EVERY_EVENTS <= snapshot.version < loop.state.version
    assert hands.gone == []


async def test_a_listing_follows_what_a_conversation_waits_for(hands: Hands) -> None:
    busy = BASH | {"error": {"code": "rate_limit", "retry_after_seconds": 60.0}}

    async def shown() -> tuple[str, str]:
        row = await Conversations(hands.store).load_row(CID)
        return row.state, row.wait_reason

    await hands.begin(BASH, busy, BASH)
    loop = await hands.go()
    assert await shown() == ("running", "tool")
    await hands.observe(loop.state.tools.pending[0].id)
    loop.wake()
    await until(lambda: hands.gone == [CID], what="release")
    assert await shown() == ("rate_limited", "rate_limit")
    await hands.say()
    loop = await hands.go()
    assert await shown() == ("running", "tool")
    await hands.ask("stopped")
    loop.wake()
    await until(lambda: hands.gone == [CID, CID], what="release")
    assert await shown() == ("stopped", "")


# Model calls


async def thinking(hands: Hands) -> ConversationLoop:
    """Claim the conversation, and wait until its model thinks."""
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: loop.state.version == 6 and not loop.is_idle, what="thinking")
    return loop


async def test_a_stop_while_the_model_thinks_drops_its_answer(hands: Hands) -> None:
    await hands.begin(THINK, latency=30.0)
    loop = await thinking(hands)
    await hands.ask("stopped")
    loop.wake()
    await until(lambda: hands.gone == [CID], what="release")
    kinds = [
        kind for kind in await hands.kinds(after=6) if kind != "conversation.party_stopped"
    ]  # it follows in the background
    assert kinds == ["action.change_agent_state", "observation.agent_state_changed"]
    assert await hands.owner() == ""


async def test_a_pause_while_the_model_thinks_keeps_its_answer(hands: Hands) -> None:
    await hands.begin(BASH, latency=2.0)
    created = (await hands.events())[0]
    assert isinstance(created, ConversationCreated)
    # Else a task of the same name would make the client first.
    await hands.services.models.get_client(created.agent.llm)
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: f"model {CID}" in [task.get_name() for task in asyncio.all_tasks()], what="thinking")
    await hands.ask("paused")
    loop.wake()
    await until(lambda: hands.gone == [CID], what="release")
    assert (await hands.kinds(after=6))[-2:] == ["model.reply", "action.run"]
    events = await hands.events()
    assert fold_status(events).state is AgentState.PAUSED
    await hands.ask("running")
    second = await hands.go()
    assert [pending.id for pending in second.state.tools.pending] == [events[-1].id]


async def test_a_message_while_the_model_thinks_asks_nothing_twice(hands: Hands) -> None:
    await hands.begin(BASH, latency=0.3)
    loop = await thinking(hands)
    await hands.say()
    loop.wake()
    await hands.at_rest(loop)
    assert [event.kind for event in await hands.events()].count("model.reply") == 1


async def test_prompt_contains_the_whole_text_of_a_blob(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    early, late = (PromptHistory(hands.log, CID) for _ in range(2))
    await early.build_prompt(8, *SHOW_ALL)
    text = "".join(f"line {number}\n" for number in range(10_000))
    action = (await hands.events())[7]
    read = FileReadObservation(content=text, path="/a").model_copy(
        update={"cause": 8, "tool_call_metadata": action.tool_call_metadata}
    )
    await hands.log.append_observation(CID, read, worker_id="tool-1")
    stored = (await hands.events())[8]
    assert list(stored.blobs or ()) == ["content"]
    await early.take_in([stored])
    expected = Message("tool", (TextPart(text),), tool_call_id="call_0001_0", name="execute_bash")
    for recollection in (early, late):
        prompt = await recollection.build_prompt(9, *SHOW_ALL)
        assert isinstance(prompt, tuple)
        assert prompt[-1] == expected
    loop.drop()


async def test_a_recollection_that_has_missed_an_event_says_so(hands: Hands) -> None:
    await hands.begin()
    recollection = PromptHistory(hands.log, CID)
    await recollection.build_prompt(1, *SHOW_ALL)
    with pytest.raises(AssertionError, match="has events up to 1, not 2"):
        await recollection.build_prompt(2, *SHOW_ALL)


async def test_forgotten_history_gives_the_same_prompt(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    whole = PromptHistory(hands.log, CID)
    before = await whole.build_prompt(8, *SHOW_ALL)
    reads = hands.wire.counts["XRANGE"]
    assert await whole.build_prompt(8, *SHOW_ALL) == before
    assert hands.wire.counts["XRANGE"] == reads
    whole.forget()
    await hands.observe(8)
    await whole.take_in((await hands.events())[8:])
    reads = hands.wire.counts["XRANGE"]
    assert await whole.build_prompt(9, *SHOW_ALL) == await PromptHistory(hands.log, CID).build_prompt(9, *SHOW_ALL)
    assert hands.wire.counts["XRANGE"] == reads + 2
    loop.drop()


async def test_history_is_forgotten_only_while_the_model_thinks_for_long(hands: Hands) -> None:
    await hands.begin({"text": "Hello.", "latency_seconds": 60.0})
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: is_asking(loop) and loop._task is None, what="thinking")
    reads = hands.wire.counts["XRANGE"]
    loop.forget_history(loop.waiting_since + FORGET_HISTORY_AFTER_SECONDS)
    await loop._log.recollection.build_view(loop.state.version)
    assert hands.wire.counts["XRANGE"] == reads
    loop.forget_history(loop.waiting_since + FORGET_HISTORY_AFTER_SECONDS + 1)
    await loop._log.recollection.build_view(loop.state.version)
    assert hands.wire.counts["XRANGE"] == reads + 1
    loop.drop()


# Errors


KNOWN = ", ".join(sorted({*AGENTS, "acp:COMMAND"} - {"AcpAgent"}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"agent": AgentSpec(name="NoSuchAgent")}, f"There is no agent named 'NoSuchAgent'. Known agents: {KNOWN}."),
        (
            {"condenser": OtherCondenserSpec(type="nosuch")},
            "There is no condenser of the type 'nosuch'. Known types: amortized,",
        ),
    ],
    ids=["agent", "condenser"],
)
async def test_an_unknown_name_is_an_error_of_its_conversation(hands: Hands, fields, reason) -> None:
    await hands.begin(**fields)
    await hands.go()
    events = await hands.events()
    change = events[-1]
    assert isinstance(change, AgentStateChangedObservation)
    assert change.agent_state is AgentState.ERROR
    assert change.reason.startswith(f"UsageError: {reason}")
    assert fold_status(events).is_settled
    row = await Conversations(hands.store).load_row(CID)
    assert (row.state, row.fields["last_error"], row.owner) == ("error", change.reason, "")


async def test_message_during_an_error_append_is_answered(hands: Hands) -> None:
    await hands.begin(agent=AgentSpec(name="NoSuchAgent"))
    hands.wire.before["deck_append"] = hands.say  # between looking for the last event and appending
    hands.wire.before["deck_release"] = hands.say  # between appending and giving up
    await hands.go()
    assert (await hands.kinds())[2:] == ["action.message", "observation.agent_state_changed"] * 2
    assert (hands.gone, await hands.owner()) == ([CID], "")
    assert fold_status(await hands.events()).is_settled


async def fail() -> None:
    raise ZeroDivisionError


async def test_an_error_settles_what_was_pending(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    action = loop.state.tools.pending[0].id
    hands.wire.before["deck_dispatch"] = fail
    loop.check_dispatch()
    await hands.at_rest(loop)
    error, change = (await hands.events())[-2:]
    assert isinstance(error, ErrorObservation)
    assert (error.cause, error.error_id) == (action, "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_ERROR")
    assert isinstance(change, AgentStateChangedObservation)
    assert "ZeroDivisionError" in change.reason
    assert find_violations(await hands.events(), conversation_id=CID, is_strict=True) == []


async def test_an_error_that_cannot_be_recorded_ends_nothing_else(
    hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    await hands.begin()
    hands.wire.before = {"GET": fail, "HGET": fail}  # the snapshot, then the last event's id
    await hands.go()
    assert hands.gone == [CID]
    assert "its error could not be recorded" in caplog.text


async def test_thousands_of_messages_at_once_are_answered_together(hands: Hands) -> None:
    """More than one reading of the log returns."""
    await hands.begin(FINISH)
    for n in range(5):
        await hands.log.append(CID, [said(f"message {n}")] * 500)
    loop = await hands.go()
    await until(lambda: loop.state.lifecycle.agent_state is AgentState.FINISHED, what="the end")
    events = await hands.events()
    assert sum(event.kind == "action.recall" for event in events) == 1
    assert find_violations(events, conversation_id=CID, is_strict=True) == []


async def test_many_notes_of_one_reply_are_all_taken(hands: Hands) -> None:
    notes = [{"name": "note", "arguments": {"command": "write", "text": f"fact {n}"}} for n in range(60)]
    agent = AgentSpec(llm=LLMSpec(model=f"scripted/{hands.folder / 'script.json'}"), memory=MemorySpec(project="facts"))
    await hands.begin({"tool_calls": notes}, FINISH, agent=agent)
    loop = await hands.go()
    await until(lambda: loop.state.lifecycle.agent_state is AgentState.FINISHED, what="the end")
    answered = [event.cause for event in await hands.events() if event.kind == "observation.note"]
    assert (len(answered), len(set(answered))) == (60, 60)


async def test_an_error_among_ever_more_news_loses_no_conversation(hands: Hands) -> None:
    """As when hundreds of delegates report at once: the log grows before each append of the error."""
    await hands.begin(FINISH)
    said = 0

    async def speak() -> None:
        nonlocal said
        if said < 20:
            said += 1
            await hands.say(f"news {said}")
            hands.wire.before["deck_append"] = speak

    hands.wire.before = {"GET": fail, "deck_append": speak}
    loop = await hands.go()
    assert (hands.gone, loop.should_reclaim, await hands.owner()) == ([CID], True, WORKER)
    claimed = await hands.owners.resume_claim(CID, WORKER)
    assert claimed is not None
    again = ConversationLoop(claimed, hands.services, on_gone=lambda gone: hands.gone.append(gone.conversation_id))
    hands.loops.append(again)
    again.wake(has_new_events=False)
    await hands.at_rest(again)
    row = await Conversations(hands.store).load_row(CID)
    assert (row.state, row.owner, said) == ("finished", "", 20)
    assert find_violations(await hands.events(), conversation_id=CID, is_strict=True) == []


async def test_a_conversation_survives_functions_that_are_replaced_and_come_back(hands: Hands) -> None:
    """The worker's beat sees nothing of it, so the worker stays, and only it may take the conversation up again."""
    await hands.begin(FINISH)
    newer = FunctionsVersion(own_version().order + 1, "abcdef0123456789", own_version().order + 1)

    async def replace() -> None:
        await hands.store.call("FUNCTION", "DELETE", "deckhands")
        await hands.store.call("HSET", keys.STORE, ANNOUNCED_FIELD, newer.stamp)

    hands.wire.before["deck_append"] = replace
    loop = await hands.go()
    await deploy(hands.store.connection, is_setup=True)
    assert (hands.gone, loop.should_reclaim, await hands.owner()) == ([CID], True, WORKER)
    assert await hands.kinds() == ["conversation.created", "action.message"]


async def test_a_damaged_entry_is_an_error_that_names_it(hands: Hands) -> None:
    await hands.begin()
    stream = hands.store.known_keys(CID).events
    await hands.store.connection.call("XADD", stream, "3-0", "e", b"\x01\x00garbage")
    await hands.store.connection.call("HSET", hands.store.known_keys(CID).meta, "last_id", 3)
    await hands.go()
    row = await Conversations(hands.store).load_row(CID)
    assert (row.state, row.owner, row.last_event_id) == ("error", "", 4)
    assert row.fields["last_error"].startswith("CorruptEntry: Event 3 cannot be read: ")


# Others


async def test_conversation_is_parked_exactly_until_its_next_attempt(hands: Hands) -> None:
    await hands.begin({"error": {"code": "service_unavailable", "times": 1, "text": "busy"}}, THINK)
    loop = await hands.go()
    assert hands.gone == [CID]
    wait = loop.state.calls.wait
    assert wait is not None
    parked_ms = await hands.store.connection.call("ZSCORE", hands.store.all_shards[0].parked, CID)
    assert wait.until.timestamp() - 1 < float(parked_ms) / 1_000 < wait.until.timestamp() + 5


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_a_closed_conversation_is_given_up_at_once(hands: Hands, is_claimed: bool) -> None:
    await hands.begin()
    close = partial(Conversations(hands.store).close, CID)
    if is_claimed:
        hands.wire.before["deck_append"] = close
    else:
        await close()
    await hands.go()
    assert (hands.gone, await hands.owner(), await hands.kinds(after=2)) == ([CID], "", [])


async def test_taken_over_conversation_is_dropped_silently(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    count = len(await hands.events())
    await lapse(hands.store, WORKER)
    await Membership(hands.store, "controller-2", "controller", ttl_seconds=3600.0).beat(1)
    assert not isinstance(await hands.owners.claim(CID, "controller-2"), ClaimFailure)
    loop.check_dispatch()
    await hands.at_rest(loop)
    assert hands.gone == [CID]
    assert (len(await hands.events()), await hands.owner()) == (count, "controller-2")


async def test_deleted_conversation_is_not_woken_and_asks_no_model(hands: Hands) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    await loop.release_idle()
    await hands.observe(loop.state.tools.pending[0].id)
    sent = sum(hands.wire.counts.values())
    loop.wake()
    loop.check_dispatch()
    await loop.release_idle()
    assert loop.is_idle
    assert sum(hands.wire.counts.values()) == sent


async def test_loop_dropped_during_a_model_call_leaves_no_task(hands: Hands) -> None:
    await hands.begin(THINK, latency=30.0)
    loop = await thinking(hands)
    loop.drop()

    def left() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if CID in task.get_name()]

    await until(lambda: not left(), what="end of its tasks")


async def test_an_action_reaches_its_stream_once(hands: Hands) -> None:
    await hands.begin({"tool_calls": [dict(BASH["tool_calls"][0], id=str(n)) for n in range(3)]})
    loop = await hands.go()
    stream = hands.store.all_shards[0].actions("pool:bash")
    for _ in range(3):
        (action,) = loop.state.tools.pending[:1]
        loop.check_dispatch()
        await hands.at_rest(loop)
        await hands.observe(action.id)
        loop.wake()
        await hands.at_rest(loop)
    actions = [event.id for event in await hands.events() if isinstance(event, CmdRunAction)]
    entries = await hands.store.connection.call("XRANGE", stream, "-", "+")
    sent = [int(dict(zip(fields[::2], fields[1::2], strict=True))[b"a"]) for _, fields in entries]
    assert sent == actions


async def crash(hands: Hands, times: int) -> None:
    """Let workers die, one after another, while they step the conversation."""
    for number in range(times):
        worker = f"victim-{number}"
        await Membership(hands.store, worker, "controller", ttl_seconds=3600.0).register()
        claimed = await hands.owners.claim(CID, worker)
        assert isinstance(claimed, ClaimedConversation)
        await hands.owners.mark(claimed.ownership, Mark.ACTING)
        await lapse(hands.store, worker)
        await Membership(hands.store, WORKER, "controller", ttl_seconds=3600.0).beat(1)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (3, ["observation.error", "observation.agent_state_changed"]),  # a wait for a tool is settled
        (4, ["observation.agent_state_changed"]),  # the read itself kills: nothing is read any more
    ],
)
async def test_a_conversation_that_crashes_its_workers_rests_in_error(
    hands: Hands, times: int, expected: list[str]
) -> None:
    await hands.begin(BASH)
    loop = await hands.go()
    await loop.release_idle()
    last_id = len(await hands.events())
    await crash(hands, times)
    assert await Conversations(hands.store).list_dead_letters() == [CID]
    await hands.go()
    row = await Conversations(hands.store).load_row(CID)
    assert (row.state, row.owner) == ("error", "")
    assert row.fields["last_error"] == f"DeckhandsError: The conversation crashed its worker {times} times in a row."
    assert await hands.kinds(after=last_id) == expected


async def mark_of(hands: Hands) -> Any:
    """Return the mark that would count a death of the worker against the conversation; None without one."""
    return await hands.store.connection.call("HGET", hands.store.known_keys(CID).meta, "mark")


async def begin_and_crash(hands: Hands) -> None:
    """Let a worker die with the conversation while its model thinks."""
    await hands.begin(THINK, latency=30.0)
    loop = await thinking(hands)
    loop.drop()
    hands.gone.clear()
    await lapse(hands.store, WORKER)
    await Membership(hands.store, "controller-2", "controller", ttl_seconds=3600.0).beat(1)


async def test_irrelevant_events_during_a_model_call_leave_no_mark(hands: Hands) -> None:
    await begin_and_crash(hands)
    loop = await hands.claim(worker="controller-2")
    loop.wake(has_new_events=False)
    await until(lambda: is_asking(loop), what="thinking")
    await hands.ask("running")
    loop.wake()
    await until(lambda: loop.state.version == 7, what="the news")
    await until(lambda: hands.wire.counts["deck_mark"] >= 4, what="another mark")

    async def has_no_mark() -> bool:
        return await mark_of(hands) is None

    await until(has_no_mark, what="a mark that is taken away")


async def test_a_wait_for_a_seat_leaves_no_mark(hands: Hands) -> None:
    await begin_and_crash(hands)
    quotas = QuotaTable.parse('[[quota]]\nmodel = "scripted/*"\nconcurrency = 1')
    hands.services = replace(hands.services, quotas=quotas)
    governor = hands.services.permits.governor
    other = await governor.reserve(quotas.pools[0], "other", "controller-2", input_tokens=1, output_tokens=1)
    assert isinstance(other, CallGranted)
    marks: list[Any] = []

    async def look() -> None:
        marks.append(await mark_of(hands))

    hands.wire.before["deck_quota_reserve"] = look
    loop = await hands.claim(worker="controller-2")
    loop.wake(has_new_events=False)
    await hands.at_rest(loop)
    assert (hands.gone, marks, await mark_of(hands)) == ([], [None], None)
