"""Explain why work makes no progress: actions, nodes, delegates, its worker, the queue. Facts in, links out."""

from __future__ import annotations

from datetime import timedelta

from broker.contract import Action
from broker.log import delegate_conversation
from broker.runtime import counted
from deckhands.client.reasons.facts import ActionFact, Facts, NodeFact, PlaceInLine, WorkerFact
from deckhands.client.reasons.link import Cause, Link

SHOWN_ACTIONS = 10
SENTENCE_CHARS = 200
START_CONTROLLER = "Start a controller worker: `deckhands up`, or its service."


def tools(facts: Facts) -> list[Link]:
    """Explain a wait for actions, one by one, and why no worker takes them, if none does."""
    actions = list(facts.history.pending.items())
    links = [_action(facts, action, facts.actions.get(action_id)) for action_id, action in actions[:SHOWN_ACTIONS]]
    if len(actions) > SHOWN_ACTIONS:
        links.append(Link(Cause.ACTION_QUEUED, f"{counted(len(actions) - SHOWN_ACTIONS, 'more action')} wait as well."))
    if any(link.cause is not Cause.ACTION_RUNS for link in links):
        links += _node(facts, facts.node)
        links += _pool(facts)
    return links


def _action(facts: Facts, action: Action, fact: ActionFact | None) -> Link:
    named = f"Action {action.id} ({' '.join(action.sentence.split())[:SENTENCE_CHARS]})"
    details: dict[str, object] = {"action_id": action.id, "kind": action.kind}
    if fact is not None and fact.worker is not None:
        return _taken(facts, action, fact, fact.worker, (named, details))
    if fact is not None and fact.place is not None:
        where, more = _standing(fact.place)
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


def _taken(
    facts: Facts, action: Action, fact: ActionFact, worker: WorkerFact, named: tuple[str, dict[str, object]]
) -> Link:
    text, details = named
    name = f"worker {worker.worker_id}" if facts.shows_workers else "a tool worker"
    details |= {"worker_id": worker.worker_id} if facts.shows_workers else {}
    began = fact.began or action.timestamp
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


def _node(facts: Facts, node: NodeFact | None) -> list[Link]:
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


def _pool(facts: Facts) -> list[Link]:
    if not facts.unserved:
        return []
    why = facts.unserved if facts.shows_workers else "No running tool worker serves its workspace."
    remedy = f"Start a tool worker of the pool {facts.pool} with the missing offers."
    return [Link(Cause.NO_WORKER, why, remedy=remedy, details={"pool": facts.pool})]


def delegates(facts: Facts) -> list[Link]:
    """Explain a wait for delegates, each by its own chain."""
    links = []
    for action_id, action in list(facts.history.delegates.items())[:SHOWN_ACTIONS]:
        conversation_id, why = delegate_conversation(facts.conversation_id, action_id), facts.delegates.get(action_id)
        state = f", which is {why.state.replace('_', ' ')}" if why is not None else ""
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
        links.append(Link(Cause.DELEGATE, f"It waits for {counted(more, 'more delegate')} as well."))
    return links


def held(facts: Facts, *, is_waiting: bool) -> list[Link]:
    """Explain which controller worker owns it, or its place in the queue for one.

    Args:
        is_waiting: another link explains its wait, so an owner is no cause.
    """
    if facts.owner is not None:
        return _owned(facts, facts.owner, is_waiting=is_waiting)
    if not facts.controllers:
        text = "No controller worker is running, and only they take conversations."
        return [Link(Cause.NO_WORKER, text, facts.history.updated, remedy=START_CONTROLLER)]
    if facts.place is not None:
        where, details = _standing(facts.place)
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


def _owned(facts: Facts, owner: WorkerFact, *, is_waiting: bool) -> list[Link]:
    name = f"The controller worker {owner.worker_id}" if facts.shows_workers else "A controller worker"
    details: dict[str, object] = {"worker_id": owner.worker_id} if facts.shows_workers else {}
    if owner.left_seconds <= 0:
        text = f"{name}, which has it, has not been heard of for {-owner.left_seconds:.0f} s; another takes it over."
        return [Link(Cause.WORKER_LOST, text, facts.history.updated, remedy=START_CONTROLLER, details=details)]
    if is_waiting:
        return []
    busy = f"; it holds {counted(owner.held, 'conversation')}" if owner.held is not None else ""
    if owner.lag_seconds is not None:
        busy += f", and its loop was late by {owner.lag_seconds:.1f} s at most"
        details |= {"lag_seconds": owner.lag_seconds}
    details |= {"held": owner.held} if owner.held is not None else {}
    link = Link(
        Cause.OWNER,
        f"{name} is alive and has it: it asks the model, or gets to it in its turn{busy}.",
        facts.history.updated,
        remedy="The model answers. If this lasts for minutes: the worker's log, its load, the model's server.",
        details=details,
    )
    return [link]


def _standing(place: PlaceInLine) -> tuple[str, dict[str, object]]:
    """Return a place in a queue in words and as values."""
    details: dict[str, object] = {"queue": place.stream}
    if place.taken_by:
        return f" in the queue {place.stream}; a worker has received it and not started it", details
    if place.before is None:
        return f" in the queue {place.stream}", details
    where = f" in the queue {place.stream}, with {place.before} before it"
    return where, details | {"position": place.before + 1}
