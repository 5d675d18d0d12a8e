"""An evaluation on a cluster: each attempt is a conversation, and each check another one.

Holds: the id of an attempt's conversation follows from the evaluation's name, so a second call finds the started
attempts. Nothing is started twice, and the workers' progress between two calls counts. An attempt ends with exactly one
row. Failures of the infrastructure are retried and never scored.
Does not: keep state in memory that is not in the store or in the evaluation's directory.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from broker.contract import (
    AgentSpec,
    AgentState,
    GoalSpec,
    Limits,
    LLMSpec,
    ModelReply,
    Tenancy,
    WorkspaceSpec,
)
from broker.coordination import WorkspaceOrders
from broker.log import ConversationProgress
from broker.runtime import AdmissionRefused, DeckhandsError, UsageError, draw_jitter
from deckhands.client import MAX_TITLE, UNREADABLE, Client, End, ForkPoint, TooLarge, Until, derive_conversation_id
from deckhands.evaluation.attempts.driver import Driver, OnRow, OnStatus
from deckhands.evaluation.attempts.in_flight import AttemptInFlight
from deckhands.evaluation.attempts.model_health import FailedCalls
from deckhands.evaluation.attempts.plan import LABEL
from deckhands.evaluation.attempts.plan import Attempt as Attempt  # noqa: PLC0414  (callers get it from here)
from deckhands.evaluation.attempts.plan import EvaluationPlan as EvaluationPlan  # noqa: PLC0414  (the same)
from deckhands.evaluation.attempts.results import CHECK_FAILED, CRITIC_FAILED, AttemptRow, Outcome, Results
from deckhands.evaluation.attempts.steering import AttemptKey
from deckhands.evaluation.attempts.times import compute_times
from deckhands.evaluation.critic import LIMITS as CRITIC_LIMITS
from deckhands.evaluation.critic import MAX_SCORE, build_critic_files, critic_agent, parse_verdict, render_question
from deckhands.evaluation.datasets.file_trees import MAX_BYTES, Tree, TreeFile, make_patch, pack_tree, read_tree
from deckhands.evaluation.datasets.instances import Instance, ScorerFailed
from deckhands.evaluation.exports.dialogue import to_dialogue
from deckhands.evaluation.rewards import Rewards, find_rewards
from deckhands.evaluation.scorers import AttemptToScore, find_answer, is_same
from deckhands.evaluation.scoring import (
    AgentWork,
    FailedSetup,
    build_check_files,
    compute_work,
    find_check_answer,
    find_failed_setup,
    find_setup_answer,
    may_count,
    may_have_failed,
)
from deckhands.evaluation.siblings import SharedHistory, compute_shared
from deckhands.evaluation.transcripts import write_transcript

CHECK_SECONDS = 600.0
SETUP_POLL_SECONDS = 1.0
READ_AT_ONCE = 4
"""How many workspaces' files are read at once; each may have 64 MiB."""
STARTED_AT_ONCE = 32
"""The number of conversations submitted at once, which bounds the memory for submissions."""
BACK_OFF_SECONDS = 5.0
LONGEST_BACK_OFF_SECONDS = 120.0
MAX_EVIDENCE_CHARS = 4_000
TOO_LARGE = "workspace_too_large"
"""The cause of a row, and the code from a node, when a workspace has more files or bytes than are read."""
FILES_UNREADABLE = "files_unreadable"
"""The cause of a row whose instance has unreadable files, or too many of them."""

CHECK = "check"
"""The metric of the number that a check gave, if the reward of a scorer replaces it."""
LOST = "conversation_lost"
"""A conversation was deleted, or its log is damaged."""

LIMITS = {"max_iterations": "iterations", "max_budget": "budget", "max_tokens": "tokens", "max_time": "time"}
"""The limits, by the code of the error in which a conversation ends when it reaches one."""
AGENT_FAULT_CODES = frozenset(
    {"goal_not_reached", "output_not_valid", "stuck_in_loop", "context_window", "content_policy"}
)
"""Codes of errors that the agent caused; all others are the infrastructure's."""


class InfrastructureFailed(Exception):
    """A failure of the infrastructure, not of the agent; `calls` are the failed model calls that caused it."""

    def __init__(self, code: str, calls: FailedCalls | None = None) -> None:
        super().__init__(code)
        self.calls = calls


class UnreadableFiles(Exception):
    """Files of an instance cannot be read; the text has the reason."""


class Evaluation:
    """Runs a plan, or its remaining attempts."""

    def __init__(
        self,
        client: Client,
        plan: EvaluationPlan,
        results: Results,
        *,
        on_row: OnRow = lambda _: None,
        on_status: OnStatus = lambda _: None,
        may_start: Callable[[Attempt], bool] = lambda _: True,
    ) -> None:
        """Describe an evaluation.

        Args:
            may_start: called before each attempt of the plan; no attempt starts while it returns False.
        """
        self._client = client
        self._driver = Driver(
            client, plan, results, self._attempt, on_row=on_row, on_status=on_status, may_start=may_start
        )
        self._directory = results.path.parent
        self._shared: SharedHistory | None = None
        self._reading = asyncio.Semaphore(READ_AT_ONCE)
        self._beginning = asyncio.Semaphore(STARTED_AT_ONCE)

    @property
    def _plan(self) -> EvaluationPlan:
        return self._driver.plan

    async def cut(self, keys: Collection[AttemptKey], cause: str) -> None:
        """End attempts that have no result yet: their rows are `not-run`, with this cause. Idempotent."""
        await self._driver.cut(keys, cause)

    async def restart(self, keys: Collection[AttemptKey], round_: int) -> None:
        """Repeat attempts in a later round, whether they have ended or not. Idempotent."""
        await self._driver.restart(keys, round_)

    async def run(self) -> None:
        """Run until every attempt has its row. Idempotent.

        Raises:
            StoreError: the store cannot be used.
            UsageError: an attempt cannot be started here.
        """
        await self._driver.run()

    async def _attempt(self, one: AttemptInFlight) -> AttemptRow:
        while True:
            try:
                return await self._try_attempt(one)
            except UnreadableFiles as error:
                return one.build_row("infra-abandoned", FILES_UNREADABLE).model_copy(update={"evidence": str(error)})
            except InfrastructureFailed as failure:
                one.failures.append(str(failure))
                one.cause = failure.calls.reason if failure.calls is not None else str(failure)
                is_probe = failure.calls is not None and self._driver.record_failed_calls(one, failure.calls)
                if len(one.failures) > self._plan.retries and not is_probe:
                    return one.build_row("infra-abandoned", cause=one.failures[-1])
                one.lost_cost_usd, one.lost_tokens = round(one.spent_usd, 8), one.spent_tokens
                one.seen = ConversationProgress()
                one.judged = ConversationProgress()
                one.replies = 0
                one.phase = "waits"
                if not one.is_found:
                    await _back_off(len(one.failures))

    async def _try_attempt(self, one: AttemptInFlight) -> AttemptRow:
        """Start an attempt, or find the started one; wait for it and score it.

        Raises:
            InfrastructureFailed: the attempt has no result of the agent.
        """
        one.phase = "begins"
        one.seen = ConversationProgress()
        one.judged = ConversationProgress()
        async with self._beginning:
            begun_with = await _read(one.attempt.instance.files)
            await self._start(one, begun_with)
        one.phase = "works"
        settled = await self._wait_for_attempt(one)
        with suppress(OSError):  # only the report shows it
            await asyncio.to_thread(write_transcript, self._directory, one.conversation_id, settled.events)
        summary = settled.summary
        one.seen.cost_usd = summary.cost_usd
        one.seen.iterations = summary.iterations
        one.seen.tokens = summary.prompt_tokens + summary.completion_tokens
        failed = find_failed_setup(settled.events) if one.attempt.instance.setup is not None else None
        if failed is not None:
            return self._build_row(one, "setup_failed", settled, cause=failed.cause, evidence=failed.text)
        match summary.state:
            case AgentState.REJECTED:
                return self._build_row(one, "refused", settled, evidence=summary.message)
            case AgentState.ERROR if summary.error_code in LIMITS:
                return self._build_row(one, "limit", settled, cause=LIMITS[summary.error_code])
            case AgentState.ERROR if summary.error_code not in AGENT_FAULT_CODES:
                raise InfrastructureFailed(summary.error_code or "error", FailedCalls.find(settled.events))
            case AgentState.STOPPED:
                raise InfrastructureFailed("stopped")
        one.phase = "is scored"
        return await self._score(one, settled, begun_with)

    async def _start(self, one: AttemptInFlight, begun_with: dict[str, TreeFile]) -> None:
        plan = self._plan
        attempt = one.attempt
        instance = one.attempt.instance
        try:
            workspace, upload = await _pack(begun_with, network=plan.network, image=instance.image)
        except TooLarge as error:
            raise UnreadableFiles(error.message) from error
        if plan.pool is not None:
            workspace = workspace.model_copy(update={"pool": plan.pool})
        model = attempt.model
        if model == "scripted" and plan.scripts is not None:
            model = f"scripted/{plan.scripts / instance.id}.json"
        agent = plan.agent.model_copy(update={"llm": plan.agent.llm.model_copy(update={"model": model})})
        if instance.setup is not None:  # the script runs after the survey of the workspace
            agent = agent.model_copy(update={"enable_workspace_skills": True})
        key = _name_attempt(plan.name, attempt.key, one.round, len(one.failures))
        one.conversation_id = derive_conversation_id(key)
        one.is_found = await self._client.exists(one.conversation_id)
        if plan.origin is not None:
            await self._fork(one, plan.origin, agent.llm.model, key)
            return
        await self._submit(
            *(key, instance.task, agent, workspace, upload),
            limits=plan.limits,
            title=instance.id,
            images=instance.images,
            rollout=plan.rollout,
            secrets=plan.secrets,
        )

    async def _fork(self, one: AttemptInFlight, origin: ForkPoint, model: str | None, key: str) -> None:
        if self._shared is None:
            self._shared = (await compute_shared(self._client, origin))[1]
        tokens = self._shared.prompt_tokens + self._shared.completion_tokens
        one.shared = (self._shared.iterations, self._shared.cost_usd, tokens)
        title = f"{one.attempt.instance.id} {one.attempt.number}"
        tenancy = Tenancy(tenant=self._plan.tenant, experiment=self._plan.name, priority="batch")
        labels = {LABEL: self._plan.name}
        while True:
            try:
                await self._client.fork(
                    origin.conversation_id,
                    at=origin.at,
                    model=model,
                    title=title,
                    labels=labels,
                    tenancy=tenancy,
                    idempotency_key=key,
                )
            except AdmissionRefused as refused:
                await asyncio.sleep(refused.retry_after_seconds * (0.5 + draw_jitter()))
            else:
                return

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
        rollout: bool = False,
        secrets: Mapping[str, str] | None = None,
    ) -> str:
        # Files of an instance are not agent instructions, unless its plan or its set-up says so.
        agent = agent.model_copy(update={"enable_workspace_skills": agent.enable_workspace_skills})
        while True:
            try:
                return await self._client.submit(
                    task,
                    agent=agent,
                    workspace=workspace,
                    upload=upload,
                    limits=limits,
                    images=images,
                    title=title[:MAX_TITLE],
                    labels={LABEL: self._plan.name},
                    tenancy=Tenancy(tenant=self._plan.tenant, experiment=self._plan.name, priority="batch"),
                    rollout=rollout,
                    secrets=secrets,
                    idempotency_key=key,
                )
            except AdmissionRefused as refused:
                await asyncio.sleep(refused.retry_after_seconds * (0.5 + draw_jitter()))

    async def _wait_for_attempt(self, one: AttemptInFlight) -> End:
        """Wait for the end of an attempt; if its set-up fails, stop it, because its agent would work in vain."""
        if one.attempt.instance.setup is None:
            return await self._wait_for_end(one.conversation_id, one.seen)
        guard = asyncio.create_task(self._stop_after_failed_setup(one.conversation_id, one.seen))
        try:
            return await self._wait_for_end(one.conversation_id, one.seen)
        finally:
            guard.cancel()
            await asyncio.gather(guard, return_exceptions=True)

    async def _stop_after_failed_setup(self, conversation_id: str, seen: ConversationProgress) -> None:
        read_until = 0
        with suppress(DeckhandsError):  # the wait for its end reports the error
            while True:
                if seen.last_id > read_until:
                    read_until = seen.last_id
                    events = await self._client.events(conversation_id)
                    if find_failed_setup(events) is not None:
                        await self._client.cancel(conversation_id)
                    if find_setup_answer(events) is not None or any(isinstance(event, ModelReply) for event in events):
                        return
                await asyncio.sleep(SETUP_POLL_SECONDS)

    async def _wait_for_end(self, conversation_id: str, seen: ConversationProgress | None = None) -> End:
        """Wait for the end of a conversation; a paused one is held by a user and has not ended.

        Raises:
            InfrastructureFailed: the conversation can no longer be read.
        """
        try:
            end = await self._client.watcher.wait(conversation_id, until=Until.RESULT, progress=seen)
        except UNREADABLE as error:
            raise InfrastructureFailed(LOST) from error
        await WorkspaceOrders(self._client.store).end_sessions(conversation_id, limit_seconds=1.0)
        return end

    async def _score(self, one: AttemptInFlight, settled: End, begun_with: dict[str, TreeFile]) -> AttemptRow:
        answered = await self._score_answer(one, settled)
        if answered is not None and (not (self._plan.critic or self._plan.scorers) or not answered.counts):
            return answered
        is_answered = answered is not None
        row = answered or self._build_row(one, "unresolved", settled)
        try:
            return await self._score_files(one, row, settled, begun_with, is_answered=is_answered)
        except TooLarge as error:
            why = f"The workspace: {error.message}"
            return row.model_copy(update={"verdict": why} if is_answered else {"cause": TOO_LARGE, "evidence": why})

    async def _score_files(
        self, one: AttemptInFlight, row: AttemptRow, settled: End, begun_with: dict[str, TreeFile], *, is_answered: bool
    ) -> AttemptRow:
        instance, plan = one.attempt.instance, self._plan
        hidden = await _read(partial(read_tree, instance.hidden))
        async with self._reading:
            found = await self._read_files(one.conversation_id, begun_with)
            work = await asyncio.to_thread(compute_work, begun_with, found, hidden, instance.check or "")
            row.left_out = work.names_left_out
            row.patch = await asyncio.to_thread(make_patch, begun_with, work.tree)
        if not is_answered and instance.check is not None:
            row = await self._run_check(one, row, begun_with, work, hidden)
        is_decided = is_answered or instance.check is not None
        if row.counts:
            row = await self._run_scorers(one, row, settled, work.tree, is_decided=is_decided)
        if not plan.critic or not row.counts:
            return row
        return await self._run_critic(one, row, settled, work.tree, decides=not is_decided and not plan.scorers)

    async def _run_scorers(
        self, one: AttemptInFlight, row: AttemptRow, settled: End, tree: Tree, *, is_decided: bool
    ) -> AttemptRow:
        """Have the plan's Python scorers score an attempt; the first decides it if nothing else does."""
        if not self._plan.scorers:
            return row
        attempt = AttemptToScore(
            one.attempt.instance,
            row.model,
            row.attempt,
            settled.summary.message,
            row.outcome if is_decided else "",
            row.reward,
            row.patch,
            {name: file.content for name, file in tree.items()},
            to_dialogue(row.conversation_id, settled.events).turns,
        )
        given: float | None = None
        checked = row.reward
        for number, scorer in enumerate(self._plan.scorers):
            try:
                found = await scorer.score(attempt)
            except ScorerFailed as error:
                text = error.message[-MAX_EVIDENCE_CHARS:]
                return row.model_copy(update={"outcome": "infra-abandoned", "cause": error.code, "evidence": text})
            given = found.reward if given is None else given
            _add_rewards(row, found)
            if not is_decided and number == 0:
                row.outcome = "resolved" if found.is_resolved else "unresolved"
            row.evidence = "\n".join(text for text in (row.evidence, found.explanation) if text)[-MAX_EVIDENCE_CHARS:]
        if given is not None:
            row.metrics = row.metrics if checked is None else {**row.metrics, CHECK: checked}
            row.reward = given
        return row

    async def _score_answer(self, one: AttemptInFlight, settled: End) -> AttemptRow | None:
        """Score the agent's final message; None if the message does not decide the score."""
        instance, said = one.attempt.instance, settled.summary.message
        if instance.judge is not None:
            try:
                found = await instance.judge(said)
            except ScorerFailed as error:
                return self._build_row(one, "infra-abandoned", settled, cause=error.code, evidence=error.message)
            outcome: Outcome = "resolved" if found.is_resolved else "unresolved"
            return _add_rewards(self._build_row(one, outcome, settled, evidence=found.explanation), found)
        if instance.answer is None or instance.check is not None:
            return None
        given = find_answer(said)
        outcome = "resolved" if is_same(given, instance.answer) else "unresolved"
        return self._build_row(one, outcome, settled, evidence=given)

    async def _read_files(self, conversation_id: str, begun_with: dict[str, TreeFile]) -> dict[str, TreeFile]:
        """Return the final files of an agent's workspace.

        Raises:
            TooLarge: there are more files than any solution needs. The agent caused this, so the attempt is scored.
            InfrastructureFailed: the workspace cannot be read.
        """
        is_wanted = partial(may_count, begun_with=begun_with)
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "found")
            try:
                await self._client.files.download(
                    conversation_id, ".", target, is_wanted=is_wanted, limit_bytes=MAX_BYTES
                )
            except TooLarge:
                raise
            except DeckhandsError as error:
                if error.code == "no_workspace":
                    return {}
                if error.code == TOO_LARGE:
                    raise TooLarge(error.message) from error
                raise InfrastructureFailed(error.code) from error
            try:
                return await asyncio.to_thread(read_tree, target)
            except UsageError as error:
                raise TooLarge(error.message) from error

    async def _run_check(
        self, one: AttemptInFlight, row: AttemptRow, begun_with: Tree, work: AgentWork, hidden: Tree
    ) -> AttemptRow:
        """Run the check in a workspace with the agent's work and the hidden files. Idempotent."""
        instance = one.attempt.instance
        tree, key = build_check_files(work, hidden), f"{row.conversation_id}/check"
        checked = await self._run_in_check(instance, key, instance.whole_check, tree, row.failures)
        if checked is None:
            row.outcome, row.cause = "infra-abandoned", row.failures[-1]
            return row
        summary, answer = checked.summary, find_check_answer(checked.events)
        text = answer.content if answer is not None else ""
        row.outcome = "resolved" if summary.state == AgentState.FINISHED else "unresolved"
        row.evidence = text[-MAX_EVIDENCE_CHARS:]
        row.checked_id = checked.conversation_id
        row.scoring_seconds = summary.duration_seconds
        if row.outcome == "unresolved" and instance.setup is not None and (answer is None or may_have_failed(answer)):
            return await self._run_setup_alone(one, row, {**begun_with, **hidden})
        rewards = find_rewards(text) if instance.has_rewards else None
        return row if rewards is None else _add_rewards(row, rewards)

    async def _run_setup_alone(self, one: AttemptInFlight, row: AttemptRow, tree: Tree) -> AttemptRow:
        """Run the set-up as in a check, but without the agent's work: if it fails as well, the agent is not the cause.

        It runs once for all attempts at an instance in the same round. Idempotent.
        """
        instance = one.attempt.instance
        key = f"{self._plan.name}/{instance.id}/set-up/{one.round}"
        alone = await self._run_in_check(instance, key, instance.setup_check, tree, row.failures, what="Set-up")
        if alone is None:
            return row.model_copy(update={"outcome": "infra-abandoned", "cause": row.failures[-1]})
        answer = find_check_answer(alone.events)
        failed = FailedSetup.of(answer) if answer is not None else None
        if alone.summary.state == AgentState.FINISHED or failed is None:
            return row
        evidence = failed.text[-MAX_EVIDENCE_CHARS:]
        return row.model_copy(update={"outcome": "setup_failed", "cause": failed.cause, "evidence": evidence})

    async def _run_in_check(
        self, instance: Instance, key: str, command: str, tree: Tree, failures: list[str], *, what: str = "Check"
    ) -> End | None:
        """Run a command as a check; None if the infrastructure failed too often. `failures` gets the codes."""
        workspace, upload = await _pack(tree, network=False, image=instance.image)
        goal = GoalSpec(check=command, max_refusals=0, timeout_seconds=CHECK_SECONDS)
        agent = AgentSpec(name="CheckAgent", llm=LLMSpec(), goal=goal)
        for number in range(self._plan.retries + 1):
            title = f"{what} of {instance.id}"
            settled = await self._wait_for_end(
                await self._submit(f"{key}/{number}", command, agent, workspace, upload, title=title)
            )
            summary = settled.summary
            if summary.state == AgentState.FINISHED or summary.error_code == "goal_not_reached":
                return settled
            failures.append(f"{CHECK_FAILED}{summary.error_code or summary.state}")
            await _back_off(number + 1)
        return None

    async def _run_critic(
        self, one: AttemptInFlight, row: AttemptRow, settled: End, tree: Tree, *, decides: bool
    ) -> AttemptRow:
        """Have a critic judge the work of an attempt, which may decide the score. Idempotent."""
        try:
            workspace, upload = await _pack(build_critic_files(tree), network=False)
        except TooLarge as error:
            more = {"cause": TOO_LARGE} if decides else {}
            return row.model_copy(update={"verdict": f"The workspace: {error.message}", **more})
        task = render_question(settled.events, settled.summary.message, row.patch)
        agent = critic_agent(self._plan.critic)
        title = f"Critic of {one.attempt.instance.id}"
        for number in range(self._plan.retries + 1):
            key = f"{row.conversation_id}/critic/{number}"
            critic_id = await self._submit(key, task, agent, workspace, upload, title=title, limits=CRITIC_LIMITS)
            one.judged = ConversationProgress()
            judged = (await self._wait_for_end(critic_id, one.judged)).summary
            row.critic_cost_usd = round(row.critic_cost_usd + judged.cost_usd, 8)
            row.critic_tokens += judged.prompt_tokens + judged.completion_tokens
            row.has_unknown_cost |= judged.has_unknown_cost
            code = judged.error_code or ""
            if (
                judged.state in (AgentState.FINISHED, AgentState.REJECTED)
                or code in LIMITS
                or code in AGENT_FAULT_CODES
            ):
                break
            row.failures.append(f"{CRITIC_FAILED}{code or judged.state}")
            await _back_off(number + 1)
        else:
            row.outcome, row.cause = "infra-abandoned", row.failures[-1]
            return row
        verdict = parse_verdict(judged.outputs, code or judged.state)
        row.critic_id = critic_id
        row.score = verdict.score
        row.verdict = verdict.reason
        if decides:
            row.outcome = "resolved" if verdict.is_accepted else "unresolved"
            row.reward = verdict.score / MAX_SCORE
            row.evidence = verdict.reason
        return row

    def _build_row(
        self, one: AttemptInFlight, outcome: Outcome, settled: End, *, cause: str = "", evidence: str = ""
    ) -> AttemptRow:
        summary, shared = settled.summary, self._shared or SharedHistory.of(())
        times = compute_times(settled.events[shared.events :])
        return one.build_row(
            outcome, cause or (summary.error_code if summary.state == AgentState.ERROR else "")
        ).model_copy(
            update={
                "evidence": evidence[-MAX_EVIDENCE_CHARS:],
                "tries": len(one.failures) + 1,
                "lost_cost_usd": one.lost_cost_usd,
                "lost_tokens": one.lost_tokens,
                "iterations": summary.iterations - shared.iterations,
                "cost_usd": round(summary.cost_usd - shared.cost_usd, 8),
                "has_unknown_cost": summary.has_unknown_cost,
                "prompt_tokens": summary.prompt_tokens - shared.prompt_tokens,
                "completion_tokens": summary.completion_tokens - shared.completion_tokens,
                "seconds": round(times.working + sum(times.waiting.values()), 3),
                "working_seconds": times.working,
                "waiting_seconds": dict(times.waiting),
            }
        )


def derive_attempt_id(name: str, attempt: AttemptKey, round_: int, failures: int) -> str:
    """Return the id of the conversation of an attempt, by the evaluation's name and the failures in its round."""
    return derive_conversation_id(_name_attempt(name, attempt, round_, failures))


def _name_attempt(name: str, attempt: AttemptKey, round_: int, failures: int) -> str:
    model, instance, number = attempt
    earlier = f"r{round_}.{failures}" if round_ else f"{failures}"
    return f"{name}/{model}/{instance}/{number}/{earlier}"


def _add_rewards(row: AttemptRow, found: Rewards) -> AttemptRow:
    """Add rewards to a row; earlier ones of the same name are replaced."""
    row.reward = row.reward if found.reward is None else found.reward
    row.metrics = {**row.metrics, **found.metrics}
    row.step_rewards = list(found.steps) or row.step_rewards
    return row


async def _back_off(number: int) -> None:
    await asyncio.sleep(min(BACK_OFF_SECONDS * 2**number, LONGEST_BACK_OFF_SECONDS) * (0.5 + draw_jitter()))


async def _read(read: Callable[[], dict[str, TreeFile]]) -> dict[str, TreeFile]:
    try:
        return await asyncio.to_thread(read)
    except UsageError as error:
        raise UnreadableFiles(error.message) from error


async def _pack(tree: Tree, **options: Any) -> tuple[WorkspaceSpec, bytes | None]:
    """Return the result of `packed`.

    Raises:
        TooLarge: the files are more than can be uploaded.
    """
    try:
        return await asyncio.to_thread(partial(pack_tree, tree, **options))
    except UsageError as error:
        raise TooLarge(error.message) from error
