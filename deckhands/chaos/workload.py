"""The workload of chaos: conversations of ChaosAgent, kept in progress while faults happen, and the check of each.

Holds: an effect is counted by the file that the commands themselves wrote, and compared with the log's claims.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from broker.contract import (
    EFFECTS_FILE,
    AgentState,
    CmdOutputObservation,
    CmdRunAction,
    CountedEffects,
    Event,
    Observation,
    WorkspaceSpec,
    parse_counted_command,
)
from broker.coordination import WorkspaceOrders
from broker.log import Conversations
from broker.runtime import DeckhandsError, OutcomeUnknown, StoreError, StoreUnavailable
from deckhands.chaos.report import EffectCounts
from deckhands.client import Client

LABEL = "deckhands.chaos"
AGENT = "ChaosAgent"
RETRY_SECONDS = 0.5
MAX_REDRIVES = 20
CRASHED = "crashed its worker"
"""Part of the error of a conversation that three dying workers had."""
END_SECONDS = 5.0
CHECKS_AT_ONCE = 4
READ_SECONDS = 30.0
READ_TRIES = 3


class Workload:
    """The conversations of one run.

    Args:
        run: name of the run, part of the idempotency keys and the label of all conversations.
        lanes: how many conversations are in progress at once.

    Attributes:
        ids: all conversations, in the order of their start.
        current: those in progress.
        pools: the pools of tool workers that run the commands, in turn.
    """

    def __init__(self, client: Client, run: str, *, lanes: int) -> None:
        self._client = client
        self._run = run
        self._lanes = lanes
        self._orders = WorkspaceOrders(client.store)
        self.ids: list[str] = []
        self.current: set[str] = set()
        self.redriven = 0
        self.pools: tuple[str, ...] = (WorkspaceSpec().pool,)

    async def run(self, over: asyncio.Event) -> None:
        """Keep conversations in progress until `over` is set, and return when the last ones have settled."""
        await asyncio.gather(*(self._keep_lane(lane, over) for lane in range(self._lanes)))

    async def _keep_lane(self, lane: int, over: asyncio.Event) -> None:
        number = 0
        while not over.is_set():
            number += 1
            pool = self.pools[(lane + number) % len(self.pools)]
            cid = await self._submit(f"{self._run}:{lane}:{number}", pool)
            self.ids.append(cid)
            self.current.add(cid)
            await self._settle(cid)
            self.current.discard(cid)
            with contextlib.suppress(StoreError):
                await self._orders.end_sessions(cid, limit_seconds=END_SECONDS)

    async def _submit(self, key: str, pool: str) -> str:
        while True:
            try:
                labels, workspace = {LABEL: self._run}, WorkspaceSpec(pool=pool)
                return await self._client.submit(
                    "Run the commands.",
                    agent=AGENT,
                    title="chaos",
                    labels=labels,
                    workspace=workspace,
                    idempotency_key=key,
                )
            except (StoreUnavailable, OutcomeUnknown, TimeoutError):
                await asyncio.sleep(RETRY_SECONDS)  # a fault of the store; the key makes the call repeatable

    async def _settle(self, conversation_id: str) -> None:
        """Wait until a conversation settles; continue a dead letter, as an operator would."""
        conversations = Conversations(self._client.store)
        redrives = 0
        while True:
            try:
                await self._client.wait_until_settled(conversation_id)
                row = await self._client.row(conversation_id)
                is_dead = row.state == AgentState.ERROR and CRASHED in row.fields.get("last_error", "")
                if not is_dead or redrives == MAX_REDRIVES:
                    return
                await conversations.requeue(conversation_id)
                await self._client.resume(conversation_id)
                redrives += 1
                self.redriven += 1
            except (StoreError, TimeoutError):
                await asyncio.sleep(RETRY_SECONDS)

    async def check(self, conversation_ids: Sequence[str]) -> tuple[EffectCounts, list[str]]:
        """Count the effects of conversations; returns the counts, and a sentence for each effect lost or doubled."""
        slots = asyncio.Semaphore(CHECKS_AT_ONCE)

        async def check_one(cid: str) -> tuple[EffectCounts, list[str]]:
            async with slots:
                events = await self._client.events(cid)
                counts, findings = count_effects(cid, events, await self._read_effects(cid, events))
                with contextlib.suppress(StoreError):
                    await self._orders.end_sessions(cid, limit_seconds=END_SECONDS)
                return counts, findings

        found = await asyncio.gather(*map(check_one, conversation_ids))
        return sum((counts for counts, _ in found), EffectCounts()), [text for _, texts in found for text in texts]

    async def _read_effects(self, conversation_id: str, events: Sequence[Event]) -> str | None:
        """Return the file of a workspace; None if it cannot be read."""
        if not any(isinstance(event, CmdRunAction) for event in events):
            return ""
        for turn in range(READ_TRIES):
            try:
                result = await self._client.execute(
                    conversation_id,
                    f"cat {EFFECTS_FILE} 2>/dev/null || true",
                    timeout_seconds=READ_SECONDS,
                    by=AGENT,
                    reason="effects are counted",
                    idempotency_key=f"{self._run}:read:{turn}",
                )
            except DeckhandsError:
                continue
            if result.exit_code == 0:
                return result.output
        return None


def count_effects(conversation_id: str, events: Sequence[Event], effects: str | None) -> tuple[EffectCounts, list[str]]:
    """Compare the counted commands of a log with the effects in their file.

    Args:
        effects: the text of the file; None if it could not be read.

    Returns:
        The counts, and a sentence for each effect that was lost or doubled.
    """
    answers: dict[int | None, Observation] = {
        event.cause: event for event in events if isinstance(event, Observation) and event.cause is not None
    }
    file = CountedEffects.parse(effects or "")
    kinds: list[str] = []
    findings: list[str] = []
    for action in events:
        number = parse_counted_command(action.command) if isinstance(action, CmdRunAction) else None
        answer = answers.get(action.id)
        if number is None or answer is None:
            continue
        has_run = isinstance(answer, CmdOutputObservation) and answer.metadata.exit_code == 0
        starts, ends = file.starts[number], file.ends[number]
        kind = _judge(starts, ends, has_run=has_run) if effects is not None else "unread"
        kinds.append(kind)
        if kind in ("lost", "doubled"):
            findings.append(
                f"{conversation_id}: the effect of action {action.id} was {kind}: its command started {starts} and "
                f"ended {ends} times, and its observation {answer.id} is {answer.kind}"
            )
    counts: dict[str, Any] = {kind: kinds.count(kind) for kind in ("done", "unknown", "lost", "doubled", "unread")}
    return EffectCounts(commands=len(kinds), **counts), findings


def _judge(starts: int, ends: int, *, has_run: bool) -> str:
    if starts > 1 or ends > 1:
        return "doubled"
    if not has_run:
        return "unknown"
    return "done" if starts == ends == 1 else "lost"
