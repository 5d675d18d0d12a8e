"""Siblings: several endings of one conversation from an event in its middle, compared, and the best of them.

Holds: a sibling costs what it has done itself: what it shares with its origin counts for none of them. Among those that
the check accepts, the best is the one that cost least, then the one with fewer steps.
Does not: judge siblings that the check rejects: then there is no best one.
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

from broker.contract.actions import MessageAction
from broker.contract.events import ConversationCreated, Event
from broker.runtime.errors import UsageError
from deckhands.attempts.results import Row, read_results
from deckhands.cli.connecting import cluster_client
from deckhands.client.client import Client
from deckhands.client.forking import Point
from deckhands.evaluation.directory import RESULTS, Asked, asked_in
from deckhands.evaluation.reaching import evaluation_client
from deckhands.reading.summary import summarize
from deckhands.settings import FaceSettings

DATASET, BEST = "dataset.jsonl", "best.patch"


@dataclass(frozen=True, slots=True)
class Shared:
    """What siblings have of their origin."""

    iterations: int
    cost_usd: float
    prompt_tokens: int
    completion_tokens: int
    events: int

    @classmethod
    def of(cls, events: Sequence[Event]) -> Shared:
        """Take it from the events that they begin with; none: they share nothing."""
        if not events:
            return cls(0, 0.0, 0, 0, 0)
        found = summarize(events)
        return cls(found.iterations, found.cost_usd, found.prompt_tokens, found.completion_tokens, len(events))


async def shared_by(client: Client, point: Point) -> tuple[ConversationCreated, Shared]:
    """Return how the origin began, and what its siblings have of it.

    Raises:
        UnknownConversation, UsageError: there is no such event.
    """
    events = point.cut(await client.events(point.conversation_id, is_whole=True))
    created = events[0]
    assert isinstance(created, ConversationCreated)
    if not any(isinstance(event, MessageAction) for event in events):
        raise UsageError(
            f"The conversation {point.conversation_id} has no task up to the event {point.at}.",
            remedy="Choose a later one; `logs ID` shows them.",
        )
    return created, Shared.of(events)


def asked_of(
    text: str, models: Sequence[str], out: Path, *, of: Path | None, check: str | None, hidden: Path | None
) -> Asked:
    """Return what is asked for by siblings of a conversation.

    Args:
        text: the conversation, as ID or ID@EVENT.
        models: of the siblings; empty: the origin's.
        of: the directory of the evaluation that it is an attempt of.

    Raises:
        UsageError, UnknownConversation: it is not clear how siblings are scored, or there is no such event.
    """
    if (of is None) == (check is None):
        raise UsageError("It is not clear how siblings are scored.", remedy="Name either --of DIR or --check COMMAND.")
    if check is not None and not check.strip():
        raise UsageError("The check is empty.", remedy="Name a command with --check.")
    if of is not None and hidden is not None:
        raise UsageError("--hidden belongs to --check.", remedy="Siblings of an attempt are scored like the attempt.")
    point, settings = Point.parse(text), FaceSettings.from_env()
    earlier = asked_in(of) if of is not None else None
    home = (earlier.home or earlier.name) if earlier is not None else ""

    async def look() -> ConversationCreated:
        connected = evaluation_client(settings, home) if home else cluster_client(settings)
        async with connected as client:
            return (await shared_by(client, point))[0]

    created = asyncio.run(look())
    instance = "" if earlier is None or of is None else _instance_of(point, created, earlier, of)
    chosen = tuple(models) or ((created.agent.llm.model,) if created.agent.llm.model else ())
    if not chosen:
        raise UsageError(f"The conversation {point.conversation_id} names no model.", remedy="Name one with --model.")
    if earlier is None:
        assert check is not None
        dataset, only = str(write_dataset(out, point.conversation_id, check=check, hidden=hidden)), ""
        return Asked(name="", dataset=dataset, models=chosen, agent=created.agent.name, only=only, origin=text)
    which = {"only": f"^{re.escape(instance)}$", "part": "", "shuffle": False}
    return earlier.model_copy(update={"name": "", "models": chosen, "origin": text, "home": home, **which})


def _instance_of(point: Point, created: ConversationCreated, asked: Asked, directory: Path) -> str:
    """Return of which instance of an evaluation a conversation is an attempt."""
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


def compared(directory: Path) -> dict[str, Any]:
    """Return how the siblings in a directory compare, and write the patch of the best one beside them."""
    rows = [row for row in read_results(directory / RESULTS) if row.counts]
    models = sorted({row.model for row in rows})
    resolved = {model: sum(row.outcome == "resolved" for row in rows if row.model == model) for model in models}
    scored = {model: sum(row.model == model for row in rows) for model in models}
    best = best_of(rows)
    if best is not None:
        (directory / BEST).write_text(best.patch, encoding="utf-8")
    return {
        "models": {model: {"resolved": resolved[model], "siblings": scored[model]} for model in models},
        "comparisons": [
            {"models": pair, "p_value": fisher(*pair, resolved, scored)} for pair in combinations(models, 2)
        ],
        "best": None
        if best is None
        else {"conversation_id": best.conversation_id, "model": best.model, "cost_usd": best.cost_usd},
    }


def best_of(rows: Sequence[Row]) -> Row | None:
    """Return the best of some attempts; None: the check accepts none."""
    right = [row for row in rows if row.outcome == "resolved"]
    return min(right, key=lambda row: (row.cost_usd, row.iterations, row.key), default=None)


def fisher(first: str, second: str, resolved: Mapping[str, int], scored: Mapping[str, int]) -> float:
    """Return the two-sided p-value of Fisher's exact test: how likely such a difference is by chance."""
    a, b, n, m = resolved[first], resolved[second], scored[first], scored[second]
    right, every = a + b, math.comb(n + m, a + b)
    chances = [math.comb(n, k) * math.comb(m, right - k) / every for k in range(max(0, right - m), min(n, right) + 1)]
    seen = math.comb(n, a) * math.comb(m, b) / every
    return min(1.0, math.fsum(chance for chance in chances if chance <= seen * (1 + 1e-9)))
