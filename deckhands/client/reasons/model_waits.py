"""Explain waits before a model call: quota, budget, batch, the next attempt. Facts in, links out."""

from __future__ import annotations

from broker.runtime import counted
from deckhands.client.reading.summary import REMEDIES
from deckhands.client.reasons.facts import BudgetFact, Facts
from deckhands.client.reasons.link import Cause, Link

ERROR_CHARS = 300


def model_call(facts: Facts) -> list[Link]:
    """Explain a wait for a quota, or for the next attempt."""
    return quota(facts) if facts.history.deferral is not None else retry(facts)


def quota(facts: Facts) -> list[Link]:
    """Explain a wait for a quota, with the place in its queue."""
    deferral, queue = facts.history.deferral, facts.quota
    models = queue.models if queue is not None else (deferral.waits_for if deferral else None)
    what = f"the quota of {models}" if models else "the quota of its model"
    details: dict[str, object] = {"models": models} if models else {}
    place = "."
    if queue is not None:
        details |= {"waiting": queue.waiting}
        if queue.before is None:
            place = ": its turn has come, or it asks again for a place."
        else:
            place = f": {counted(queue.before, 'conversation')} of {queue.waiting} that wait there go first."
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


def retry(facts: Facts) -> list[Link]:
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
        REMEDIES.get(failure.code)
        or f"It is retried automatically; `deckhands message {facts.conversation_id} TEXT` retries it at once.",
        {"code": failure.code, "attempt": failure.attempt + 1, "attempts": failure.attempts},
    )
    return [link]


def budget(facts: Facts) -> list[Link]:
    """Explain an exhausted budget."""
    deferral, found = facts.history.deferral, facts.budget
    name = found.account.name if found is not None else (deferral.waits_for if deferral else None)
    left, details = _left(found)
    link = Link(
        Cause.BUDGET,
        f"Its next model call has no room in the budget of {name or 'its tenant or experiment'}{left}.",
        deferral.timestamp if deferral else None,
        None,
        f"`deckhands budget add {name or 'ACCOUNT'} USD`, or room that other conversations leave.",
        ({"account": name} if name else {}) | details,
    )
    return [link]


def _left(found: BudgetFact | None) -> tuple[str, dict[str, object]]:
    if found is None or found.account.limit_usd is None:
        return "", {}
    account = found.account
    text = f": ${account.spent_usd + account.lost_usd:.4f} of ${account.limit_usd:.4f} are used up"
    text += f", ${account.reserved_usd:.4f} are reserved for calls in flight" if account.reserved_usd else ""
    text += f", and {counted(found.before, 'conversation')} that came before go first" if found.before else ""
    return text, {
        "limit_usd": account.limit_usd,
        "spent_usd": account.spent_usd,
        "reserved_usd": account.reserved_usd,
        "lost_usd": account.lost_usd,
        "waiting": account.waiting,
        **({"position": found.before + 1} if found.before is not None else {}),
    }


def batch(facts: Facts) -> list[Link]:
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
