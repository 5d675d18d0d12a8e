"""Mutations of correct logs: each makes a log that no correct cluster writes, and names the rule that it breaks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

Log = list[dict[str, Any]]
Mutation = Callable[[Log], Iterator[Log]]

MUTATIONS: dict[str, tuple[str, Mutation]] = {}
"""The name of a mutation, the rule that it breaks, and the function that yields mutated copies of a log."""
REFERENCES = ("cause_id", "seen_id", "replaces", "action_id", "delegate_id", "finish_id", "message_id", "start_id")
AT_MOST = 4
"""Mutated copies of one log by one mutation."""


def breaks(rule: str) -> Callable[[Mutation], Mutation]:
    def register(mutation: Mutation) -> Mutation:
        MUTATIONS[mutation.__name__] = (rule, mutation)
        return mutation

    return register


def mutate(log: Log, mutation: Mutation) -> Iterator[Log]:
    """Yield mutated copies, at most `AT_MOST`, spread over the log."""
    found = list(mutation(log))
    step = max(1, len(found) // AT_MOST)
    yield from found[::step][:AT_MOST]


def renumbered(log: Sequence[dict[str, Any]]) -> Log:
    """Number the events from 1 on and let every reference follow, as a forger who hides a change would."""
    places = {event["id"]: number for number, event in reversed(list(enumerate(log, 1)))}
    found = [copy.deepcopy(event) for event in log]  # an event may be there twice
    for number, event in enumerate(found, 1):
        event["id"], seen = number, event.get("seen_id", 0)
        for name in REFERENCES:
            if event.get(name) is not None:
                event[name] = places.get(event[name], event[name])
        if event.get("seen_id"):
            event["seen_id"] = max(new for old, new in places.items() if old <= seen or new == 1)
        if event.get("tool_call_metadata"):
            reply = event["tool_call_metadata"]["reply_id"]
            event["tool_call_metadata"]["reply_id"] = places.get(reply, reply)
    return found


def changed(log: Log, at: int, **fields: Any) -> Log:
    """Return a copy with other fields of the event at an index."""
    found = copy.deepcopy(log)
    found[at] |= fields
    return found


def without(log: Log, at: int) -> Log:
    return renumbered([*log[:at], *log[at + 1 :]])


def where(log: Log, is_meant: Callable[[dict[str, Any]], bool]) -> list[int]:
    return [at for at, event in enumerate(log) if is_meant(event)]


def of_kind(log: Log, *kinds: str) -> list[int]:
    return where(log, lambda event: event["kind"] in kinds)


def answers(log: Log) -> list[int]:
    """Return the places of the observations of actions."""
    return where(log, lambda event: event["kind"].startswith("observation.") and event["cause_id"] is not None)


def called(log: Log) -> list[int]:
    """Return the places of the actions that replies asked for, without confirmed copies."""
    return where(
        log,
        lambda event: (
            event["kind"].startswith("action.") and bool(event.get("tool_call_metadata")) and not event.get("replaces")
        ),
    )


@breaks("append")
def dropped(log: Log) -> Iterator[Log]:
    yield from (log[:at] + log[at + 1 :] for at in range(1, len(log) - 1))


@breaks("append")
def doubled(log: Log) -> Iterator[Log]:
    yield from ([*log[: at + 1], *log[at:]] for at in range(len(log)))


@breaks("append")
def swapped(log: Log) -> Iterator[Log]:
    yield from ([*log[:at], log[at + 1], log[at], *log[at + 2 :]] for at in range(len(log) - 1))


@breaks("append")
def given_another_id(log: Log) -> Iterator[Log]:
    yield from (changed(log, at, id=new) for at in range(1, len(log)) for new in (0, at, at + 3, -at, str(at), None))


@breaks("append")
def begun_by_another_event(log: Log) -> Iterator[Log]:
    yield renumbered(log[1:])


@breaks("append")
def created_twice(log: Log) -> Iterator[Log]:
    yield from (renumbered([*log[:at], log[0], *log[at:]]) for at in range(1, len(log)))


@breaks("kind")
def given_an_unknown_kind(log: Log) -> Iterator[Log]:
    yield from (changed(log, at, kind="action.launch_rocket") for at in range(len(log)))


@breaks("kind")
def given_an_unknown_source(log: Log) -> Iterator[Log]:
    yield from (changed(log, at, source="nobody") for at in range(len(log)))


@breaks("time")
def written_far_in_the_past(log: Log) -> Iterator[Log]:
    yield from (changed(log, at, timestamp="2001-01-01T00:00:00Z") for at in range(2, len(log)))


@breaks("observation")
def answered_twice(log: Log) -> Iterator[Log]:
    yield from (renumbered([*log[: at + 1], log[at], *log[at + 1 :]]) for at in answers(log))


@breaks("observation")
def answered_before_the_action(log: Log) -> Iterator[Log]:
    for at in answers(log):
        action = next(n for n, event in enumerate(log) if event["id"] == log[at]["cause_id"])
        yield renumbered([*log[:action], log[at], *log[action:at], *log[at + 1 :]])


@breaks("observation")
def answering_no_action(log: Log) -> Iterator[Log]:
    yield from (changed(log, at, cause_id=cause) for at in answers(log) for cause in (1, 9_999, "4", -1))


@breaks("observation")
def observed_without_a_cause(log: Log) -> Iterator[Log]:
    free = ("observation.error", "observation.delegate", "observation.feature_list")
    yield from (changed(log, at, cause_id=None) for at in answers(log) if log[at]["kind"] not in free)


@breaks("answer")
def answered_by_another_kind(log: Log) -> Iterator[Log]:
    yield from (
        changed(log, at, kind="observation.mcp")
        for at in answers(log)
        if log[at]["kind"] not in ("observation.mcp", "observation.user_rejected")
    )


@breaks("answer")
def answered_with_the_token_of_another_call(log: Log) -> Iterator[Log]:
    for at in answers(log):
        if log[at].get("tool_call_metadata"):
            yield changed(log, at, tool_call_metadata=log[at]["tool_call_metadata"] | {"tool_call_id": "call_x"})


@breaks("turn")
def requested_with_a_wrong_token(log: Log) -> Iterator[Log]:
    yield from (
        changed(log, at, tool_call_metadata=log[at]["tool_call_metadata"] | {"tool_call_id": "call_x"})
        for at in called(log)
    )


@breaks("turn")
def requested_by_a_call_that_never_replied(log: Log) -> Iterator[Log]:
    yield from (
        changed(log, at, tool_call_metadata=log[at]["tool_call_metadata"] | {"reply_id": reply})
        for at in called(log)
        for reply in (2, 9_999)
    )


@breaks("turn")
def requested_by_an_older_reply(log: Log) -> Iterator[Log]:
    for at in called(log):
        reply = log[at]["tool_call_metadata"]["reply_id"]
        earlier = [n for n in of_kind(log, "model.reply") if log[n]["id"] < reply and log[n]["service"] == "agent"]
        for place in earlier[:1]:
            yield changed(log, at, tool_call_metadata=log[at]["tool_call_metadata"] | {"reply_id": log[place]["id"]})


@breaks("turn")
def requested_twice(log: Log) -> Iterator[Log]:
    yield from (renumbered([*log[: at + 1], copy.deepcopy(log[at]), *log[at + 1 :]]) for at in called(log))


@breaks("turn")
def attributed_to_another_source(log: Log) -> Iterator[Log]:
    """A user's message becomes the agent's or the environment's."""
    for at in of_kind(log, "action.message"):
        if log[at]["source"] == "user":
            yield changed(log, at, source="agent")
            yield changed(log, at, source="environment")


@breaks("turn")
def greeted_twice(log: Log) -> Iterator[Log]:
    for at in of_kind(log, "action.system")[:1]:
        yield renumbered([*log[: at + 1], log[at], *log[at + 1 :]])


@breaks("turn")
def stepped_before_the_results(log: Log) -> Iterator[Log]:
    """The observation that a step waited for is gone."""
    last = of_kind(log, "model.reply")[-1]
    yield from (without(log, at) for at in answers(log) if at < last and log[at]["kind"] not in BESIDE)


BESIDE = (
    "observation.note",
    "observation.recall",
    "observation.null",
    "observation.think",
    "observation.task_tracking",
)


@breaks("claim")
def replied_twice(log: Log) -> Iterator[Log]:
    """A former owner's reply is in the log beside that of its successor."""
    yield from (renumbered([*log[: at + 1], log[at], *log[at + 1 :]]) for at in steps_of(log))


@breaks("claim")
def numbered_with_a_gap(log: Log) -> Iterator[Log]:
    yield from (changed(log, at, iteration=log[at]["iteration"] + by) for at in steps_of(log) for by in (1, -1))


@breaks("claim")
def based_on_an_older_log(log: Log) -> Iterator[Log]:
    """The prompt of a reply lacks the reply before it: its owner had lost the conversation."""
    places = steps_of(log)
    yield from (changed(log, at, seen_id=log[before]["id"] - 1) for before, at in pairwise(places))


@breaks("claim")
def based_on_the_future(log: Log) -> Iterator[Log]:
    yield from (changed(log, at, seen_id=log[at]["id"] + by) for at in steps_of(log) for by in (0, 5))


def steps_of(log: Log) -> list[int]:
    return where(log, lambda event: event["kind"] == "model.reply" and event["service"] == "agent")


@breaks("budget")
def charged_a_wrong_cost(log: Log) -> Iterator[Log]:
    yield from (
        changed(log, at, cost_usd=cost)
        for at in of_kind(log, "model.reply")
        for cost in (-0.01, float("nan"), float("inf"), "0.01", True)
    )


@breaks("budget")
def charged_more_than_its_models(log: Log) -> Iterator[Log]:
    yield from (
        changed(log, at, cost_usd=log[at]["cost_usd"] + by)
        for at in of_kind(log, "conversation.delegate_ended")
        for by in (0.01, 1.0)
        if log[at]["models"]
    )


@breaks("budget")
def stepped_beyond_a_limit(log: Log) -> Iterator[Log]:
    """The conversation was given less than it used."""
    places = steps_of(log)
    limits = log[0]["limits"]
    yield from (changed(log, 0, limits=limits | {"max_iterations": count}) for count in range(1, len(places)))
    paid = [at for at in places if log[at].get("cost_usd")]
    yield from (changed(log, 0, limits=limits | {"max_budget_usd": 0.01 * count}) for count in range(1, len(paid)))
    if sum(log[at]["usage"]["prompt_tokens"] for at in places[:-1]):
        yield changed(log, 0, limits=limits | {"max_tokens": 1})


@breaks("state")
def put_into_a_state_that_does_not_follow(log: Log) -> Iterator[Log]:
    for at in of_kind(log, "observation.agent_state_changed"):
        for state in ("loading", "stopped", "paused", "user_confirmed", "rejected", "dreaming"):
            if log[at]["agent_state"] != state:
                yield changed(log, at, agent_state=state)


@breaks("state")
def put_into_a_state_twice(log: Log) -> Iterator[Log]:
    for at in of_kind(log, "observation.agent_state_changed"):
        if log[at]["agent_state"] != "error":
            yield renumbered([*log[: at + 1], log[at], *log[at + 1 :]])


@breaks("state")
def started_without_being_asked(log: Log) -> Iterator[Log]:
    """The step that follows was made while the agent did not work."""
    yield from (
        without(log, at)
        for at in of_kind(log, "observation.agent_state_changed")
        if log[at]["agent_state"] == "running" and log[at - 1]["kind"] == "action.recall"
    )


@breaks("confirmation")
def confirmed_for_no_waiting_action(log: Log) -> Iterator[Log]:
    """The copy replaces an action that waits for nothing."""
    yield from (
        changed(log, at, replaces=other)
        for at in where(log, lambda event: event.get("replaces") is not None)
        for other in (2, log[at]["replaces"] - 1, 9_999)
    )
    for at in of_kind(log, "action.run", "action.read", "action.edit"):
        if log[at].get("replaces") is None:
            yield renumbered([*log[: at + 1], log[at] | {"replaces": log[at]["id"]}, *log[at + 1 :]])


@breaks("confirmation")
def confirmed_by_no_user(log: Log) -> Iterator[Log]:
    yield from (
        without(log, at)
        for at in of_kind(log, "action.change_agent_state")
        if log[at]["agent_state"] in ("user_confirmed", "user_rejected")
    )


@breaks("confirmation")
def confirmed_and_changed(log: Log) -> Iterator[Log]:
    """The action that runs is not the one that the user was shown."""
    for at in where(log, lambda event: event.get("replaces") is not None):
        name = "command" if "command" in log[at] else "plan"
        if not any(event.get("edited") for event in log[:at]):
            yield changed(log, at, **{name: f"{log[at][name]}; rm -r /"})


@breaks("confirmation")
def run_although_it_was_rejected(log: Log) -> Iterator[Log]:
    yield from (
        changed(log, at, confirmation_state="confirmed")
        for at in where(log, lambda event: event.get("confirmation_state") == "rejected")
    )


@breaks("delegation")
def ended_twice(log: Log) -> Iterator[Log]:
    yield from (
        renumbered([*log[: at + 1], log[at], *log[at + 1 :]]) for at in of_kind(log, "conversation.delegate_ended")
    )


@breaks("delegation")
def ended_under_another_name(log: Log) -> Iterator[Log]:
    yield from (changed(log, at, conversation_id="d0") for at in of_kind(log, "conversation.delegate_ended"))


@breaks("delegation")
def ended_without_having_been_asked_for(log: Log) -> Iterator[Log]:
    yield from (
        changed(log, at, delegate_id=other)
        for at in of_kind(log, "conversation.delegate_ended")
        for other in (2, 9_999)
    )


@breaks("delegation")
def reported_before_its_end(log: Log) -> Iterator[Log]:
    yield from (without(log, at) for at in of_kind(log, "conversation.delegate_ended"))


@breaks("end")
def continued_after_its_end(log: Log) -> Iterator[Log]:
    if log[-1].get("agent_state") in ("finished", "rejected", "error", "stopped"):
        for at in [*steps_of(log), *of_kind(log, "action.run", "action.finish", "action.think")]:
            yield renumbered([*log, log[at]])


@breaks("stop")
def stopped_although_it_has_ended(log: Log) -> Iterator[Log]:
    """A tool worker says that it has stopped an action that has its result."""
    for at in answers(log):
        if log[at]["kind"] != "observation.error" and any(event["id"] == log[at]["cause_id"] for event in log):
            yield renumbered([*log, stopped(log, "tool", log[at]["cause_id"])])


@breaks("stop")
def stopped_twice(log: Log) -> Iterator[Log]:
    for at in answers(log):
        if log[at]["kind"] == "observation.error":
            yield renumbered([*log, *[stopped(log, "tool", log[at]["cause_id"])] * 2])


@breaks("stop")
def stopped_a_call_unasked(log: Log) -> Iterator[Log]:
    if not of_kind(log, "observation.interrupted", "observation.rolled_back"):
        yield from (
            renumbered([*log[: at + 1], stopped(log, "model", None), *log[at + 1 :]])
            for at in of_kind(log, "model.reply")
        )


def stopped(log: Log, party: str, action_id: int | None) -> dict[str, Any]:
    """Return the event that says that a party has stopped."""
    about = {name: log[-1].get(name) for name in ("timestamp", "source")}
    kind = "conversation.party_stopped"
    return {**about, "id": 0, "kind": kind, "party": party, "action_id": action_id, "seconds": 0.1}


@breaks("settled")
def ended_before_the_results(log: Log) -> Iterator[Log]:
    """The last observation is gone, and the conversation ends."""
    ended = "observation.agent_state_changed"
    if log[-1]["kind"] == ended:
        for at in called(log):
            if log[at]["kind"] not in ("action.finish", "action.reject", "action.note"):
                yield renumbered([*log[: at + 1], log[-1] | {"agent_state": "error", "reason": "x", "code": "x"}])
