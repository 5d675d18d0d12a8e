"""Siblings: alternative continuations of one conversation from an event on. They are compared, and the best is chosen.

Holds: a sibling's cost excludes the events shared with its origin. Among correct siblings, the
best has the highest score of the critic, then the lowest cost, then the fewest steps.
Does not: choose a best sibling if none is correct.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from broker.contract import ConversationCreated, Event, MessageAction
from broker.runtime import UsageError
from deckhands.client import Client, ForkPoint, cluster_client, summarize
from deckhands.evaluation.attempts.results import AttemptRow, read_results
from deckhands.evaluation.directory import RESULTS, EvaluationRequest, load_request
from deckhands.evaluation.store_access import run_in_store
from deckhands.settings import CliSettings

DATASET, BEST = "dataset.jsonl", "best.patch"


@dataclass(frozen=True, slots=True)
class SharedHistory:
    """The part of their origin that siblings share."""

    iterations: int
    cost_usd: float
    prompt_tokens: int
    completion_tokens: int
    events: int

    @classmethod
    def of(cls, events: Sequence[Event]) -> SharedHistory:
        """Compute the shared usage from the events that siblings start with, which may be none."""
        if not events:
            return cls(0, 0.0, 0, 0, 0)
        found = summarize(events)
        return cls(found.iterations, found.cost_usd, found.prompt_tokens, found.completion_tokens, len(events))


async def compute_shared(client: Client, point: ForkPoint) -> tuple[ConversationCreated, SharedHistory]:
    """Return the first event of the origin, and the part that its siblings share.

    Raises:
        UnknownConversation, UsageError: the conversation or the event does not exist.
    """
    events = point.events_until(await client.events(point.conversation_id, is_whole=True))
    created = events[0]
    assert isinstance(created, ConversationCreated)
    if not any(isinstance(event, MessageAction) for event in events):
        raise UsageError(
            f"The conversation {point.conversation_id} has no task up to the event {point.at}.",
            remedy="Choose a later one; `logs ID` shows them.",
        )
    return created, SharedHistory.of(events)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How siblings are scored, and their tenant.

    Attributes:
        of: the directory of the evaluation that has the origin as an attempt: they are scored like that attempt.
        check: a command in the workspace of each; `hidden` has files for it.
        critic: a model that judges them; empty for none.
        tenant: their tenant; empty for that of the evaluation, or else of the origin.
    """

    of: Path | None = None
    check: str | None = None
    hidden: Path | None = None
    critic: str = ""
    tenant: str = ""

    def require_clear(self) -> None:
        """Raise UsageError unless exactly one way to score siblings is given."""
        if self.of is not None and self.check is not None:
            raise UsageError(
                "It is not clear how siblings are scored.", remedy="Name either --of DIR or --check COMMAND."
            )
        if self.of is None and self.check is None and not self.critic:
            raise UsageError(
                "It is not clear how siblings are scored.",
                remedy="Name --of DIR, --check COMMAND, or a model with --critic.",
            )
        if self.check is not None and not self.check.strip():
            raise UsageError("The check is empty.", remedy="Name a command with --check.")
        if self.hidden is not None and self.check is None:
            raise UsageError(
                "--hidden has no effect without --check.", remedy="Name a command with --check, or leave it out."
            )


def build_request(text: str, models: Sequence[str], out: Path, scoring: Scoring) -> EvaluationRequest:
    """Return the request for siblings of a conversation.

    Args:
        text: the conversation, as ID or ID@EVENT.
        models: the models of the siblings; empty for the origin's.

    Raises:
        UsageError, UnknownConversation: the way to score siblings is missing or ambiguous, or the conversation or the
            event does not exist.
    """
    scoring.require_clear()
    of = scoring.of
    point, settings = ForkPoint.parse(text), CliSettings.from_env()
    earlier = load_request(of) if of is not None else None
    home = (earlier.home or earlier.name) if earlier is not None else ""

    async def look(client: Client) -> ConversationCreated:
        return (await compute_shared(client, point))[0]

    async def look_there() -> ConversationCreated:
        async with cluster_client(settings) as client:
            return await look(client)

    created = asyncio.run(run_in_store(settings, home, look) if home else look_there())
    _require_own_directory(created, scoring.tenant)
    instance = "" if earlier is None or of is None else _find_instance(point, created, earlier, of)
    chosen = tuple(models) or ((created.agent.llm.model,) if created.agent.llm.model else ())
    if not chosen:
        raise UsageError(f"The conversation {point.conversation_id} names no model.", remedy="Name one with --model.")
    fields = {"name": "", "models": chosen, "origin": text, "critic": scoring.critic}
    if earlier is None:
        tenant = scoring.tenant or (created.tenancy.tenant if created.tenancy is not None else "")
        dataset = ""
        if scoring.check is not None:
            dataset = str(write_dataset(out, point.conversation_id, check=scoring.check, hidden=scoring.hidden))
        return EvaluationRequest.model_validate(
            {**fields, "dataset": dataset, "agent": created.agent.name, "tenant": tenant}
        )
    which = {"only": f"^{re.escape(instance)}$", "part": "", "shuffle": False}
    return earlier.model_copy(update={**fields, "home": home, "tenant": scoring.tenant or earlier.tenant, **which})


def _require_own_directory(created: ConversationCreated, tenant: str) -> None:
    """Raise UsageError if the origin's directory is bound to another tenant than that of the siblings."""
    path = created.workspace.path
    owner = created.tenancy.tenant if created.tenancy is not None else ""
    if path and tenant and tenant != owner:
        raise UsageError(
            f"{created.conversation_id} works in {path}, which conversations of {owner or 'no tenant'} use; those of "
            f"{tenant} may not.",
            remedy="Leave --tenant out.",
        )


def _find_instance(point: ForkPoint, created: ConversationCreated, asked: EvaluationRequest, directory: Path) -> str:
    """Return the instance that a conversation attempts in an evaluation."""
    rows = {row.conversation_id: row.instance for row in read_results(directory / RESULTS)}
    instance = rows.get(point.conversation_id, created.title)
    if instance not in {one.id for one in asked.instances()}:
        raise UsageError(f"{point.conversation_id} is no attempt of the evaluation in {directory}.")
    return instance


def write_dataset(directory: Path, name: str, *, check: str, hidden: Path | None) -> Path:
    """Write a dataset of one instance that is scored by a check.

    Raises:
        UsageError: the directory cannot be written.
    """
    line: dict[str, object] = {"id": name, "task": f"Continue {name}.", "check": check}
    if hidden is not None:
        line["hidden"] = str(hidden.resolve())
    path = directory / DATASET
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def compare_siblings(directory: Path) -> dict[str, Any]:
    """Return the comparison of the siblings in a directory, and write the patch of the best one beside them."""
    every = read_results(directory / RESULTS)
    rows = [row for row in every if row.counts]
    models = sorted({row.model for row in every})
    resolved = {model: sum(row.outcome == "resolved" for row in rows if row.model == model) for model in models}
    scored = {model: sum(row.model == model for row in rows) for model in models}
    best = find_best(rows)
    if best is not None:
        (directory / BEST).write_text(best.patch, encoding="utf-8")
    return {
        "models": {model: {"resolved": resolved[model], "siblings": scored[model]} for model in models},
        "comparisons": [
            {"models": pair, "p_value": compute_fisher(*pair, resolved, scored)} for pair in combinations(models, 2)
        ],
        "has_critic": any(row.critic_id or row.critic_cost_usd for row in every),
        "critic_cost_usd": round(math.fsum(row.critic_cost_usd for row in every), 8),
        "best": None
        if best is None
        else {
            "conversation_id": best.conversation_id,
            "model": best.model,
            "cost_usd": best.cost_usd,
            "score": best.score,
            "verdict": best.verdict,
        },
    }


def find_best(rows: Sequence[AttemptRow]) -> AttemptRow | None:
    """Return the best attempt; None if none is correct."""
    right = [row for row in rows if row.outcome == "resolved"]
    return min(right, key=lambda row: (-(row.score or 0.0), row.cost_usd, row.iterations, row.key), default=None)


def compute_fisher(first: str, second: str, resolved: Mapping[str, int], scored: Mapping[str, int]) -> float | None:
    """Return the two-sided p-value of Fisher's exact test: the probability of such a difference by chance.

    None if a model has no scored sibling.
    """
    a, b, n, m = resolved[first], resolved[second], scored[first], scored[second]
    if not n or not m:
        return None
    right, every = a + b, math.comb(n + m, a + b)
    chances = [math.comb(n, k) * math.comb(m, right - k) / every for k in range(max(0, right - m), min(n, right) + 1)]
    seen = math.comb(n, a) * math.comb(m, b) / every
    return min(1.0, math.fsum(chance for chance in chances if chance <= seen * (1 + 1e-9)))
