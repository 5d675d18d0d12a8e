"""The chain from a conversation's state to the cause: facts in, links out.

Holds: pure; every `WaitReason` is explained here. A link states only facts: an unknown time, place or name is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta

from broker.contract import REMEDIES, TERMINAL_STATES, Action, AgentState, find_error_remedy, render_error
from broker.log import WaitReason
from broker.runtime import format_count, make_delegate_id
from deckhands.client.reading.summary import render_state
from deckhands.client.reasons.facts import (
    ActionFact,
    BudgetFact,
    ConversationFacts,
    NodeFact,
    QueuePosition,
    WorkerFact,
)
from deckhands.client.reasons.link import Cause, Link, Why

ERROR_CHARS = 300
QUESTION_CHARS = 1_000
SHOWN_ACTIONS = 10
SENTENCE_CHARS = 200
START_CONTROLLER = "Start a controller worker: `deckhands up`, or its service."

Explanation = Callable[[ConversationFacts], list[Link]]


def explain(facts: ConversationFacts) -> Why:
    """Return the chain of reasons for a conversation's current state."""
    state, waits_for = facts.history.status.state, facts.wait_reason
    links = [_explain_state(facts), *_explain_causes(facts)]
    return Why(facts.conversation_id, state.value, waits_for, facts.now, tuple(links))


def _explain_state(facts: ConversationFacts) -> Link:
    state, changed = facts.history.status.state, facts.history.changed
    since = changed.timestamp if changed is not None else None
    if since is None and facts.history.created is not None:
        since = facts.history.created.timestamp
    return Link(Cause.STATE, f"The conversation {render_state(state)}.", since, details={"state": state.value})


def _explain_causes(facts: ConversationFacts) -> list[Link]:
    status = facts.history.status
    if facts.row is None:
        return [*_explain_settled(facts), _explain_archived(facts)]
    if facts.row.is_closed:
        text = "It was closed and accepts no more events."
        return [*_explain_settled(facts), Link(Cause.CLOSED, text, remedy=f"`deckhands fork {facts.conversation_id}`")]
    if facts.died is not None:
        return explain_dead_letter(facts)
    if status.is_settled:
        return _explain_settled(facts)
    found = _explain_unread(facts)
    explanation = EXPLANATIONS.get(facts.wait_reason)
    if explanation is not None:
        found += explanation(facts)
    is_enough = explanation is not None and facts.owner is None and facts.place is None
    return found if is_enough and found else [*found, *explain_owner(facts, is_waiting=explanation is not None)]


def _explain_archived(facts: ConversationFacts) -> Link:
    if facts.is_run:
        text = "It belongs to a run that is not in progress."
        remedy = f"`deckhands run --resume {facts.conversation_id}`"
    else:
        text = "It has left the store and rests in the archive."
        remedy = f"`deckhands restore {facts.conversation_id}`"
    return Link(Cause.ARCHIVED, text, facts.history.updated, remedy=remedy)


def _explain_settled(facts: ConversationFacts) -> list[Link]:
    status = facts.history.status
    if status.is_in_loop:
        return explain_loop(facts)
    if status.state is AgentState.AWAITING_USER_CONFIRMATION:
        return explain_confirmation(facts)
    if status.state is AgentState.AWAITING_USER_INPUT:
        return explain_question(facts)
    if status.state is AgentState.PAUSED:
        return explain_pause(facts)
    return explain_end(facts) if status.state in TERMINAL_STATES else []


def _explain_unread(facts: ConversationFacts) -> list[Link]:
    """Explain a message or request that the agent has not noticed yet."""
    unread = facts.history.unread
    if unread is None:
        return []
    what = "A message" if facts.history.status.has_unread_message else "A request"
    text = f"{what} (event {unread.id}) waits until the agent reads it."
    return [Link(Cause.MESSAGE, text, unread.timestamp, details={"event_id": unread.id})]


def _explain_schedule(facts: ConversationFacts) -> list[Link]:
    """Explain a scheduled start."""
    begins = facts.row.not_before if facts.row is not None else None
    begins = begins or (facts.history.created.not_before if facts.history.created else None)
    since = facts.history.created.timestamp if facts.history.created else None
    expires = f" It expires if it has not started by {facts.expires:%Y-%m-%d %H:%M:%S} UTC." if facts.expires else ""
    link = Link(
        Cause.SCHEDULED,
        f"It was submitted to start later.{expires}",
        since,
        begins,
        f"`deckhands resume {facts.conversation_id}` starts it at once.",
        {"expires": facts.expires.isoformat()} if facts.expires else {},
    )
    return [link]


def _explain_newer_worker(facts: ConversationFacts) -> list[Link]:
    """Explain that only a newer worker can read the log."""
    running = f"{format_count(facts.controllers, 'controller worker')} run, of which none has taken it so far."
    link = Link(
        Cause.NEWER_WORKER,
        f"A newer version of Deckhands has written to its log, and older workers cannot continue it. {running}",
        facts.history.updated,
        facts.parked_until,
        "Start a controller worker of the newer version; it takes the conversation within seconds.",
        {"controllers": facts.controllers},
    )
    return [link]


def _explain_locked(facts: ConversationFacts) -> list[Link]:
    """Explain that the log is encrypted with a key that no worker has used so far."""
    text = "Its log is encrypted, and the controller workers that run do not have its key."
    remedy = "Give them the master key (DECKHANDS_MASTER_KEYS_FILE). If the tenant's key was deleted, delete it, too."
    return [Link(Cause.LOCKED, text, facts.history.updated, facts.parked_until, remedy)]


def _explain_pinned_version(facts: ConversationFacts) -> list[Link]:
    """Explain that only workers of another version may continue the conversation."""
    version = (facts.history.created.pinned_version if facts.history.created else None) or "another version"
    link = Link(
        Cause.PINNED_VERSION,
        f"It is pinned to version {version} of Deckhands, and no controller worker of it has taken it so far.",
        facts.history.updated,
        facts.parked_until,
        f"Start a controller worker of version {version}, or fork the conversation: a fork is not pinned.",
        {"version": version, "controllers": facts.controllers},
    )
    return [link]


def explain_model_call(facts: ConversationFacts) -> list[Link]:
    """Explain a wait for a quota, or for the next attempt."""
    return explain_quota(facts) if facts.history.deferral is not None else explain_retry(facts)


def explain_quota(facts: ConversationFacts) -> list[Link]:
    """Explain a wait for a quota, with the place in its queue."""
    deferral, queue = facts.history.deferral, facts.quota
    models = deferral.waits_for if deferral else None
    if queue is not None:
        models = queue.models
    what = f"the quota of {models}" if models else "the quota of its model"
    details: dict[str, object] = {"models": models} if models else {}
    place = "."
    if queue is not None:
        details |= {"waiting": queue.waiting}
        if queue.before is None:
            place = ": its turn has come, or it asks again for a place."
        else:
            place = f": {format_count(queue.before, 'conversation')} of {queue.waiting} that wait there go first."
            details |= {"position": queue.before + 1}
    link = Link(
        Cause.QUOTA,
        f"Its next model call waits for its turn at {what}{place}",
        deferral.timestamp if deferral else None,
        deferral.expected_at if deferral else None,
        f"A larger quota in DECKHANDS_QUOTAS, another key of the model, or another model:"
        f" `deckhands set {facts.conversation_id} --model NAME`.",
        details,
    )
    return [link]


def explain_retry(facts: ConversationFacts) -> list[Link]:
    """Explain a failed call, and the time of the next attempt."""
    failure = facts.history.failure
    if failure is None:
        return []
    attempts = f" of {failure.attempts}" if failure.attempts else ""
    said = " ".join(failure.content.split())[:ERROR_CHARS]
    again = f" at {failure.retry_at:%H:%M:%S} UTC" if failure.retry_at else ""
    link = Link(
        Cause.RETRY,
        f"It is parked for attempt {failure.attempt + 1}{attempts} of its model call{again}. The latest failed"
        f" ({failure.code}): {said}",
        failure.timestamp,
        failure.retry_at,
        f"{REMEDIES.get(failure.code, '')} It is retried automatically;"
        f" `deckhands message {facts.conversation_id} TEXT` retries it at once.".lstrip(),
        {"code": failure.code, "attempt": failure.attempt + 1, "attempts": failure.attempts},
    )
    return [link]


def explain_budget(facts: ConversationFacts) -> list[Link]:
    """Explain an exhausted budget."""
    deferral, found = facts.history.deferral, facts.budget
    name = deferral.waits_for if deferral else None
    if found is not None:
        name = found.account.name
    left, details = _describe_budget(found)
    link = Link(
        Cause.BUDGET,
        f"Its next model call has no room in the budget of {name or 'its tenant or experiment'}{left}.",
        deferral.timestamp if deferral else None,
        None,
        f"`deckhands budget add {name or 'ACCOUNT'} USD`, or room that other conversations leave.",
        ({"account": name} if name else {}) | details,
    )
    return [link]


def _describe_budget(found: BudgetFact | None) -> tuple[str, dict[str, object]]:
    if found is None or found.account.limit_usd is None:
        return "", {}
    account = found.account
    text = f": ${account.spent_usd + account.lost_usd:.4f} of ${account.limit_usd:.4f} are used up"
    text += f", ${account.reserved_usd:.4f} are reserved for calls in flight" if account.reserved_usd else ""
    text += f", and {format_count(found.before, 'conversation')} that came before go first" if found.before else ""
    return text, {
        "limit_usd": account.limit_usd,
        "spent_usd": account.spent_usd,
        "reserved_usd": account.reserved_usd,
        "lost_usd": account.lost_usd,
        "waiting": account.waiting,
        **({"position": found.before + 1} if found.before is not None else {}),
    }


def explain_batch(facts: ConversationFacts) -> list[Link]:
    """Explain that the call is with the provider."""
    deferral = facts.history.deferral
    link = Link(
        Cause.BATCH,
        "Its model call is in a batch at the provider, which answers within its own time (often a day).",
        deferral.timestamp if deferral else None,
        deferral.expected_at if deferral else None,
        f"`deckhands cancel {facts.conversation_id}`, and submit it again without a batch.",
    )
    return [link]


def explain_confirmation(facts: ConversationFacts) -> list[Link]:
    """Explain a pending confirmation."""
    history, name = facts.history, facts.conversation_id
    asked_id = history.status.confirmation_id
    action = history.asked.get(asked_id) if asked_id is not None else None
    question = f": {action.sentence[:QUESTION_CHARS]}" if action is not None else "."
    link = Link(
        Cause.CONFIRMATION,
        f"It waits for a user to confirm or reject action {asked_id}{question}",
        history.changed.timestamp if history.changed else None,
        remedy=f"`deckhands confirm {name}`, or `deckhands reject {name} --reason …`.",
        details={"action_id": asked_id},
    )
    return [link]


def explain_question(facts: ConversationFacts) -> list[Link]:
    """Explain a wait for an answer to the agent's question."""
    history = facts.history
    said = f" It said last: {history.message[:QUESTION_CHARS]}" if history.message else ""
    link = Link(
        Cause.ANSWER,
        f"It waits for a message from a user.{said}",
        history.changed.timestamp if history.changed else None,
        remedy=f"`deckhands message {facts.conversation_id} TEXT`.",
    )
    return [link]


def explain_pause(facts: ConversationFacts) -> list[Link]:
    """Explain a pause, and name its author."""
    history, operator = facts.history, facts.history.operator
    who = ""
    if operator is not None and operator.action in ("pause", "interrupt"):
        who = f" by {operator.author}" + (f": {operator.reason}" if operator.reason else "")
    link = Link(
        Cause.PAUSED,
        f"It was paused{who or '.'}",
        history.changed.timestamp if history.changed else None,
        remedy=f"`deckhands resume {facts.conversation_id}`, or a message.",
        details=({"author": operator.author, "reason": operator.reason} if who and operator else {})
        | _list_stops(facts),
        lines=_show_stops(facts),
    )
    return [link]


def explain_loop(facts: ConversationFacts) -> list[Link]:
    """Explain a stop by the policy for loops."""
    changed = facts.history.changed
    reason = f": {changed.reason}" if changed is not None and changed.reason else "."
    link = Link(
        Cause.LOOP,
        f"The agent repeated itself, and the policy for loops keeps it from continuing{reason}",
        changed.timestamp if changed else None,
        remedy=f"`deckhands recover {facts.conversation_id} wait|go-on|stop`, or a message.",
        details={"code": changed.code} if changed is not None and changed.code else {},
    )
    return [link]


def explain_dead_letter(facts: ConversationFacts) -> list[Link]:
    """Explain a dead letter: the workers that died with it, with the last lines of their logs."""
    workers = [death.from_worker for death in facts.deaths[-3:]]
    who = f" ({', '.join(workers)})" if workers and facts.shows_workers else ""
    last = render_error(facts.row.fields.get("last_error", "")) if facts.row is not None else ""
    link = Link(
        Cause.DEAD_LETTER,
        f"Three workers in a row died while they worked on it{who}, and none takes it any more."
        + (f" Its last error: {last}" if last else ""),
        facts.died,
        remedy=f"Find the cause in the workers' logs; then `deckhands dead requeue {facts.conversation_id}`.",
        details={"workers": workers} if facts.shows_workers else {},
        lines=(*facts.history.lines, *(facts.worker_lines if facts.shows_workers else ())),
    )
    return [link]


def explain_end(facts: ConversationFacts) -> list[Link]:
    """Explain the end, and how to continue."""
    history, name = facts.history, facts.conversation_id
    changed, state = history.changed, history.status.state
    code = changed.code if changed is not None else ""
    key = changed.reason if changed is not None else ""
    reason = render_error(key, history.failure.content if history.failure is not None else "")
    text = {
        AgentState.FINISHED: "The agent has finished.",
        AgentState.REJECTED: "The agent refused the task, or could not do it.",
        AgentState.STOPPED: "It was stopped.",
    }.get(state, f"It ended in an error{f' ({code})' if code else ''}: {reason or 'no reason is known'}")
    remedy = "A message continues it."
    if state in (AgentState.ERROR, AgentState.STOPPED):
        remedy = f"{find_error_remedy(key, code)} `deckhands resume {name}` continues it.".strip()
    when = changed.timestamp if changed else None
    details = ({"code": code} if code else {}) | _list_stops(facts)
    return [Link(Cause.ENDED, text, when, remedy=remedy, details=details, lines=_show_stops(facts))]


def _show_stops(facts: ConversationFacts) -> tuple[str, ...]:
    """Show when each party stopped after the latest request to stop or to interrupt."""
    return tuple(map(str, facts.history.stops.parties))


def _list_stops(facts: ConversationFacts) -> dict[str, object]:
    stopped = [asdict(party) for party in facts.history.stops.parties]
    return {"stopped": stopped} if stopped else {}


def explain_actions(facts: ConversationFacts) -> list[Link]:
    """Explain a wait for actions, one by one. If no worker takes an action, explain why."""
    actions = list(facts.history.pending.items())
    links = [
        _explain_action(facts, action, facts.actions.get(action_id)) for action_id, action in actions[:SHOWN_ACTIONS]
    ]
    if len(actions) > SHOWN_ACTIONS:
        links.append(
            Link(Cause.ACTION_QUEUED, f"{format_count(len(actions) - SHOWN_ACTIONS, 'more action')} wait as well.")
        )
    if any(link.cause is not Cause.ACTION_RUNS for link in links):
        links += _explain_node(facts, facts.node)
        links += _explain_pool(facts)
    return links


def _explain_action(facts: ConversationFacts, action: Action, fact: ActionFact | None) -> Link:
    named = f"Action {action.id} ({' '.join(action.sentence.split())[:SENTENCE_CHARS]})"
    details: dict[str, object] = {"action_id": action.id, "kind": action.kind}
    if fact is not None and fact.worker is not None:
        return _explain_taken_action(facts, action, fact, fact.worker, (named, details))
    if fact is not None and fact.place is not None:
        where, more = _describe_position(fact.place)
        return Link(
            Cause.ACTION_QUEUED,
            f"{named} waits for a tool worker{where}.",
            action.timestamp,
            remedy="More tool workers, or the end of the actions before it.",
            details=details | more,
        )
    return Link(
        Cause.ACTION_UNSENT,
        f"{named} is not in a queue yet: its controller worker puts it there.",
        action.timestamp,
        remedy="Its controller worker repeats it within a minute if the entry is lost.",
        details=details,
    )


def _explain_taken_action(
    facts: ConversationFacts, action: Action, fact: ActionFact, worker: WorkerFact, named: tuple[str, dict[str, object]]
) -> Link:
    text, details = named
    name = f"worker {worker.worker_id}" if facts.shows_workers else "a tool worker"
    details |= {"worker_id": worker.worker_id} if facts.shows_workers else {}
    began = fact.started or action.timestamp
    if worker.left_seconds <= 0:
        return Link(
            Cause.WORKER_LOST,
            f"{text} ran on {name}, which has not been heard of for {-worker.left_seconds:.0f} s.",
            began,
            remedy="Another tool worker of its node takes it over; start one if there is none.",
            details=details,
        )
    seconds = max(0.0, (facts.now - began).total_seconds()) if began else 0.0
    limit = getattr(action, "timeout", None)
    until = began + timedelta(seconds=limit) if began and isinstance(limit, int | float) else None
    return Link(
        Cause.ACTION_RUNS,
        f"{text} has been running for {seconds:.0f} s on {name}.",
        began,
        until,
        f"It ends; or `deckhands interrupt {facts.conversation_id}` stops it.",
        details | {"seconds": round(seconds, 1)},
    )


def _explain_node(facts: ConversationFacts, node: NodeFact | None) -> list[Link]:
    if node is None or node.is_alive:
        return []
    name = f"the node {node.node}" if facts.shows_workers else "its node"
    moves = "The workspace is a directory of that node and waits for it." if node.is_fixed else ""
    moves = moves or "After that time, it continues elsewhere, with its latest checkpoint if there is one."
    link = Link(
        Cause.NODE_AWAY,
        f"The workspace is on {name}, where no tool worker has a heartbeat. {moves}",
        node.seen,
        None if node.is_fixed else node.given_up_at,
        "Start a tool worker on that node.",
        {"node": node.node} if facts.shows_workers else {},
    )
    return [link]


def _explain_pool(facts: ConversationFacts) -> list[Link]:
    if not facts.unserved:
        return []
    why = facts.unserved if facts.shows_workers else "No running tool worker serves its workspace."
    remedy = f"Start a tool worker of the pool {facts.pool} with the missing offers."
    return [Link(Cause.NO_WORKER, why, remedy=remedy, details={"pool": facts.pool})]


def explain_delegates(facts: ConversationFacts) -> list[Link]:
    """Explain a wait for delegates, each by its own chain."""
    links = []
    for action_id, action in list(facts.history.delegates.items())[:SHOWN_ACTIONS]:
        conversation_id = make_delegate_id(facts.conversation_id, action_id)
        why = facts.delegates.get(action_id)
        state = f", which {render_state(why.state)}" if why is not None else ""
        links.append(
            Link(
                Cause.DELEGATE,
                f"It waits for its delegate {action.agent}, the conversation {conversation_id}{state}.",
                action.timestamp,
                remedy="The delegate ends; or a message to it, or `deckhands cancel` of it.",
                details={"conversation_id": conversation_id, "action_id": action_id, "agent": action.agent},
                links=why.links if why is not None else (),
            )
        )
    more = len(facts.history.delegates) - len(links)
    if more > 0:
        links.append(Link(Cause.DELEGATE, f"It waits for {format_count(more, 'more delegate')} as well."))
    return links


def explain_owner(facts: ConversationFacts, *, is_waiting: bool) -> list[Link]:
    """Explain which controller worker owns the conversation, or its place in the queue for one.

    Args:
        is_waiting: another link explains the wait, so an owner is not the cause.
    """
    if facts.owner is not None:
        return _explain_owned(facts, facts.owner, is_waiting=is_waiting)
    if not facts.controllers:
        text = "No controller worker is running, and only they take conversations."
        return [Link(Cause.NO_WORKER, text, facts.history.updated, remedy=START_CONTROLLER)]
    if facts.place is not None:
        where, details = _describe_position(facts.place)
        link = Link(
            Cause.QUEUED,
            f"It waits for a controller worker{where}.",
            facts.history.updated,
            remedy="More controller workers, or a higher priority at its submission.",
            details=details | {"controllers": facts.controllers},
        )
        return [link]
    if facts.parked_until is not None:
        text = "It is parked, and a controller worker checks it at that time."
        return [Link(Cause.UNCLAIMED, text, facts.history.updated, facts.parked_until)]
    text = "No worker has it and it is in no queue; workers look for such conversations every few seconds."
    return [
        Link(
            Cause.UNCLAIMED,
            text,
            facts.history.updated,
            remedy=f"`deckhands resume {facts.conversation_id}` if it stays so.",
        )
    ]


def _explain_owned(facts: ConversationFacts, owner: WorkerFact, *, is_waiting: bool) -> list[Link]:
    name = f"The controller worker {owner.worker_id}" if facts.shows_workers else "A controller worker"
    details: dict[str, object] = {"worker_id": owner.worker_id} if facts.shows_workers else {}
    if owner.left_seconds <= 0:
        text = f"{name}, which has it, has not been heard of for {-owner.left_seconds:.0f} s; another takes it over."
        return [Link(Cause.WORKER_LOST, text, facts.history.updated, remedy=START_CONTROLLER, details=details)]
    if is_waiting:
        return []
    busy = f"; it holds {format_count(owner.held, 'conversation')}" if owner.held is not None else ""
    if owner.lag_seconds is not None:
        busy += f", and its loop was late by {owner.lag_seconds:.1f} s at most"
        details |= {"lag_seconds": owner.lag_seconds}
    details |= {"held": owner.held} if owner.held is not None else {}
    link = Link(
        Cause.OWNER,
        f"{name} is alive and has it: it calls the model, or will do so in its turn{busy}.",
        facts.history.updated,
        remedy="The model answers. If this lasts for minutes: the worker's log, its load, the model's server.",
        details=details,
    )
    return [link]


def _describe_position(place: QueuePosition) -> tuple[str, dict[str, object]]:
    """Return a place in a queue in words and as values."""
    details: dict[str, object] = {"queue": place.stream}
    if place.taken_by:
        return f" in the queue {place.stream}; a worker has received it and not started it", details
    if place.before is None:
        return f" in the queue {place.stream}", details
    where = f" in the queue {place.stream}, with {place.before} before it"
    return where, details | {"position": place.before + 1}


EXPLANATIONS: Mapping[str, Explanation] = {
    WaitReason.SCHEDULED: _explain_schedule,
    WaitReason.TOOL: explain_actions,
    WaitReason.DELEGATE: explain_delegates,
    WaitReason.RATE_LIMIT: explain_model_call,
    WaitReason.BUDGET: explain_budget,
    WaitReason.BATCH: explain_batch,
    WaitReason.NEWER_WORKER: _explain_newer_worker,
    WaitReason.LOCKED: _explain_locked,
    WaitReason.PINNED_VERSION: _explain_pinned_version,
    WaitReason.SERVICE_UNAVAILABLE: explain_model_call,
    WaitReason.INTERNAL: explain_model_call,
    WaitReason.TIMEOUT: explain_model_call,
    WaitReason.MALFORMED_REPLY: explain_model_call,
    WaitReason.NO_RESPONSE: explain_model_call,
}
"""The function that explains each reason of the index."""
