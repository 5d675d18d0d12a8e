"""An evaluation on a cluster: each attempt is a conversation, and each check another one.

Holds: the id of an attempt's conversation follows from the evaluation's name, so a second call finds what was begun.
Nothing is begun twice, and what the workers have done meanwhile counts. An attempt ends with exactly one row.
Failures of the infrastructure are tried again and never scored.
Does not: hold anything in memory that is not in the store or in the evaluation's directory.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.contract.events import AgentSpec, Limits, LLMSpec, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation
from broker.coordination.workspace_orders import WorkspaceOrders
from broker.runtime.errors import AdmissionRefused, DeckhandsError
from broker.runtime.ids import jitter
from broker.specs.agent_state import AgentState
from broker.specs.specs import GoalSpec, Tenancy
from deckhands.client.client import Client
from deckhands.client.many import for_each
from deckhands.datasets.file_trees import File, packed, patch_between, tree_of
from deckhands.datasets.instances import Instance
from deckhands.evaluation.answers import answer_in, is_same
from deckhands.evaluation.results import Outcome, Results, Row
from deckhands.evaluation.scoring import to_check, work_of
from deckhands.reading.summary import Summary

LABEL = "evaluation"
CHECK_SECONDS = 600.0
CHECKS_AT_ONCE = 4
BACK_OFF_SECONDS = 5.0
LONGEST_BACK_OFF_SECONDS = 120.0
MAX_EVIDENCE_CHARS = 4_000
SETUP_SCRIPT = ".openhands/setup.sh"

LIMITS = {"max_iterations": "iterations", "max_budget": "budget", "max_tokens": "tokens", "max_time": "time"}
"""The limits by the codes of the errors in which conversations end that have used them up."""
AGENTS_FAULT = frozenset({"goal_not_reached", "output_not_valid", "stuck_in_loop", "context_window", "content_policy"})
"""Codes of errors that say something about the agent; all others are the infrastructure's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an evaluation does.

    Attributes:
        name: unique; conversations of it have the label `evaluation=NAME`.
        models: by the names in the results: how the agent finds each.
        attempts: of each instance, with each model.
        at_once: how many attempts may be under way.
        retries: how often an attempt that the infrastructure has failed is begun again.
        budget_usd: no attempt begins once all of them together have spent so much.
    """

    name: str
    instances: Sequence[Instance]
    models: Sequence[str]
    attempts: int = 1
    agent: AgentSpec = field(default_factory=AgentSpec)
    limits: Limits = field(default_factory=Limits)
    at_once: int = 4
    retries: int = 3
    budget_usd: float | None = None
    scripts: Path | None = None

    @property
    def size(self) -> int:
        """How many attempts there are."""
        return len(self.instances) * len(self.models) * self.attempts


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one instance with one model."""

    instance: Instance
    model: str
    number: int

    @property
    def key(self) -> tuple[str, str, int]:
        """As in its row."""
        return self.model, self.instance.id, self.number


class Infrastructure(Exception):
    """What has failed was not the agent; the code says what."""


OnRow = Callable[[Row], None]


class Evaluation:
    """Carries out a plan, or what is left of it."""

    def __init__(self, client: Client, plan: Plan, results: Results, *, on_row: OnRow = lambda _: None) -> None:
        self._client = client
        self._plan = plan
        self._results = results
        self._on_row = on_row
        self._checks = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def run(self) -> None:
        """Return when every attempt has its row.  Idempotent.

        Raises:
            StoreError: the store cannot be used.
            UsageError: an attempt cannot be begun here.
        """
        await for_each(self._missing(), self._attempt, at_once=self._plan.at_once)

    async def _missing(self) -> AsyncIterator[Attempt]:
        plan = self._plan
        for number in range(1, plan.attempts + 1):
            for instance in plan.instances:
                for model in plan.models:
                    attempt = Attempt(instance, model, number)
                    if attempt.key not in self._results.rows:
                        yield attempt

    async def _attempt(self, attempt: Attempt) -> None:
        failures: list[str] = []
        if self._is_spent():
            self._add(self._row(attempt, failures, "limit", cause="evaluation_budget"))
            return
        while True:
            try:
                row = await self._tried(attempt, failures)
            except Infrastructure as failure:
                failures.append(str(failure))
                if len(failures) <= self._plan.retries:
                    await _back_off(len(failures))
                    continue
                row = self._row(attempt, failures, "infra-abandoned", cause=failures[-1])
            self._add(row)
            return

    def _is_spent(self) -> bool:
        budget = self._plan.budget_usd
        return budget is not None and sum(row.cost_usd for row in self._results.rows.values()) >= budget

    def _add(self, row: Row) -> None:
        self._results.add(row)
        self._on_row(row)

    async def _tried(self, attempt: Attempt, failures: list[str]) -> Row:
        """Begin an attempt, or find the one that was begun; wait for it and score it.

        Raises:
            Infrastructure: nothing can be said about the agent.
        """
        begun_with = await asyncio.to_thread(_begun_with, attempt.instance)
        summary = await self._settled(await self._begin(attempt, begun_with, len(failures)))
        match summary.state:
            case AgentState.REJECTED:
                return self._row(attempt, failures, "refused", summary, evidence=summary.message)
            case AgentState.ERROR if summary.error_code in LIMITS:
                return self._row(attempt, failures, "limit", summary, cause=LIMITS[summary.error_code])
            case AgentState.ERROR if summary.error_code not in AGENTS_FAULT:
                raise Infrastructure(summary.error_code or "error")
            case AgentState.STOPPED:
                raise Infrastructure("stopped")
        return await self._scored(attempt, failures, summary, begun_with)

    async def _begin(self, attempt: Attempt, begun_with: dict[str, File], earlier: int) -> str:
        plan, instance = self._plan, attempt.instance
        workspace, upload = packed(begun_with)
        model = attempt.model
        if model == "scripted" and plan.scripts is not None:
            model = f"scripted/{plan.scripts / instance.id}.json"
        agent = plan.agent.model_copy(update={"llm": plan.agent.llm.model_copy(update={"model": model})})
        key = f"{plan.name}/{attempt.model}/{instance.id}/{attempt.number}/{earlier}"
        return await self._submit(
            key, instance.task, agent, workspace, upload, limits=plan.limits, title=instance.id, images=instance.images
        )

    async def _submit(
        self,
        key: str,
        task: str,
        agent: AgentSpec,
        workspace: WorkspaceSpec,
        upload: bytes | None,
        *,
        title: str,
        limits: Limits | None = None,
        images: Sequence[str] = (),
    ) -> str:
        while True:
            try:
                return await self._client.submit(
                    task,
                    agent=agent,
                    workspace=workspace,
                    upload=upload,
                    limits=limits,
                    images=images,
                    title=title,
                    labels={LABEL: self._plan.name},
                    tenancy=Tenancy(experiment=self._plan.name, priority="batch"),
                    idempotency_key=key,
                )
            except AdmissionRefused as refused:
                await asyncio.sleep(refused.retry_after_seconds * (0.5 + jitter()))

    async def _settled(self, conversation_id: str) -> Summary:
        summary = await self._client.wait_until_settled(conversation_id)
        await WorkspaceOrders(self._client.store).end_sessions(conversation_id, limit_seconds=1.0)
        return summary

    async def _scored(
        self, attempt: Attempt, failures: list[str], summary: Summary, begun_with: dict[str, File]
    ) -> Row:
        instance = attempt.instance
        if instance.judge is not None:
            is_right, why = await instance.judge(summary.message)
            return self._row(attempt, failures, "resolved" if is_right else "unresolved", summary, evidence=why)
        if instance.check is None:
            assert instance.answer is not None
            given = answer_in(summary.message)
            outcome: Outcome = "resolved" if is_same(given, instance.answer) else "unresolved"
            return self._row(attempt, failures, outcome, summary, evidence=given)
        hidden = await asyncio.to_thread(tree_of, instance.hidden)
        async with self._checks:
            found = await self._files_of(summary.conversation_id)
            work = work_of(begun_with, found, hidden)
            row = self._row(attempt, failures, "unresolved", summary)
            row.left_out, row.patch = list(work.left_out), patch_between(begun_with, work.tree)
            return await self._checked(attempt, row, to_check(work, hidden))

    async def _files_of(self, conversation_id: str) -> dict[str, File]:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "found")
            try:
                await self._client.files.download(conversation_id, ".", target)
            except DeckhandsError as error:
                if error.code == "no_workspace":
                    return {}
                raise Infrastructure(error.code) from error
            return await asyncio.to_thread(tree_of, target)

    async def _checked(self, attempt: Attempt, row: Row, tree: dict[str, File]) -> Row:
        """Run the check in a workspace of these files. Idempotent."""
        instance = attempt.instance
        assert instance.check is not None
        workspace, upload = packed(tree, network=False)
        check = instance.check if instance.setup is None else f"{instance.setup} && {instance.check}"
        agent = AgentSpec(
            name="CheckAgent", llm=LLMSpec(), goal=GoalSpec(check=check, max_refusals=0, timeout_seconds=CHECK_SECONDS)
        )
        for number in range(self._plan.retries + 1):
            key = f"{row.conversation_id}/check/{number}"
            checked_id = await self._submit(key, check, agent, workspace, upload, title=f"Check of {instance.id}")
            summary = await self._settled(checked_id)
            if summary.state == AgentState.FINISHED or summary.error_code == "goal_not_reached":
                break
            row.failures.append(f"check_{summary.error_code or summary.state}")
            await _back_off(number + 1)
        else:
            row.outcome, row.cause = "infra-abandoned", row.failures[-1]
            return row
        events = await self._client.events(checked_id, is_whole=True)
        written = [event.content for event in events if isinstance(event, CmdOutputObservation)]
        row.outcome = "resolved" if summary.state == AgentState.FINISHED else "unresolved"
        row.evidence = written[-1][-MAX_EVIDENCE_CHARS:] if written else ""
        row.checked_id, row.scoring_seconds = checked_id, summary.duration_seconds
        return row

    def _row(
        self,
        attempt: Attempt,
        failures: list[str],
        outcome: Outcome,
        summary: Summary | None = None,
        *,
        cause: str = "",
        evidence: str = "",
    ) -> Row:
        row = Row(
            instance=attempt.instance.id,
            model=attempt.model,
            attempt=attempt.number,
            outcome=outcome,
            cause=cause,
            evidence=evidence[-MAX_EVIDENCE_CHARS:],
            tries=len(failures) + 1,
            failures=list(failures),
            tags=list(attempt.instance.tags),
        )
        if summary is None:
            return row
        return row.model_copy(
            update={
                "conversation_id": summary.conversation_id,
                "cause": cause or (summary.error_code if summary.state == AgentState.ERROR else ""),
                "iterations": summary.iterations,
                "cost_usd": summary.cost_usd,
                "has_unknown_cost": summary.has_unknown_cost,
                "prompt_tokens": summary.prompt_tokens,
                "completion_tokens": summary.completion_tokens,
                "seconds": summary.duration_seconds,
            }
        )


async def _back_off(number: int) -> None:
    await asyncio.sleep(min(BACK_OFF_SECONDS * 2**number, LONGEST_BACK_OFF_SECONDS) * (0.5 + jitter()))


def _begun_with(instance: Instance) -> dict[str, File]:
    tree = tree_of(instance.workspace)
    if instance.setup is not None:
        tree[SETUP_SCRIPT] = File(f"{instance.setup}\n".encode(), is_executable=True)
    return tree
