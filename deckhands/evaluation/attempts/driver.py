"""The driver of an evaluation: starts attempts up to a limit that depends on the load, and obeys users' steering.

Holds: every attempt ends with one row of its round. The driver keeps no state that is not in the store or in the rows:
if it dies, another one continues. It reads the desired state about once a second.
Does not: run attempts; `Evaluation` does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from broker.runtime import SYSTEM_CLOCK, DeckhandsError, UsageError, failpoint
from deckhands.client import Client, for_each
from deckhands.evaluation.attempts.catalog import Catalog, EvaluationInfo
from deckhands.evaluation.attempts.in_flight import AttemptInFlight, build_unscored_row
from deckhands.evaluation.attempts.model_health import FailedCalls, ModelHealth
from deckhands.evaluation.attempts.pace import ClusterLoad, HostPace, ModelPace
from deckhands.evaluation.attempts.plan import Attempt, EvaluationPlan
from deckhands.evaluation.attempts.results import AttemptRow, Outcome, Results
from deckhands.evaluation.attempts.status import STOPPED, EvaluationStatus, SpendingMeter, compute_status
from deckhands.evaluation.attempts.steering import AttemptKey, DesiredState, EvaluationSteering, Requeue, StoredSteering
from deckhands.evaluation.attempts.stopping import ENOUGH, StoppingCriterion

POLL_SECONDS = 1.0
MANY_ROWS = 500
"""With more attempts, the stopping criterion is checked only once in `LOOK_SECONDS`."""
NOTIFY_SECONDS = 0.2
SHOWN_EVERY = 2
"""Progress is written to the store once in this many polls."""

Act = Callable[[AttemptInFlight], Awaitable[AttemptRow]]
OnRow = Callable[[AttemptRow], None]
OnStatus = Callable[[EvaluationStatus], None]


class ModelSilent(DeckhandsError):
    """Every call of a model fails. Its attempts get no results, and the next driver starts them again."""

    code = "model_silent"


class Driver:
    """Runs a plan, or its remaining attempts, by calling a function for each attempt."""

    def __init__(
        self,
        client: Client,
        plan: EvaluationPlan,
        results: Results,
        act: Act,
        *,
        on_row: OnRow = lambda _: None,
        on_status: OnStatus = lambda _: None,
        may_start: Callable[[Attempt], bool] = lambda _: True,
    ) -> None:
        self.plan = plan
        self._may_start = may_start
        self._is_started = False
        self._client = client
        self._results = results
        self._act = act
        self._on_row = on_row
        self._on_status = on_status
        self._steering = EvaluationSteering(client.store, plan.name)
        self._load = ClusterLoad(client.store)
        self._all = plan.list_attempts()
        self._places = {attempt.key: place for place, attempt in enumerate(self._all)}
        self._rounds: dict[AttemptKey, int] = {}
        self._pending: dict[str, deque[Attempt]] = {model: deque() for model in plan.models}
        self._in_flight: dict[AttemptKey, AttemptInFlight] = {}
        self._hosts = HostPace(plan.at_once)
        self._models = {model: ModelPace(plan.at_once) for model in plan.models}
        self._health = {model: ModelHealth() for model in plan.models}
        self._unanswered: list[AttemptInFlight] = []
        if not plan.is_paced:
            for pace in (self._hosts.pace, *(model.pace for model in self._models.values())):
                pace.limit = plan.at_once
        self._state = "running"
        self._stopped = ""
        self._judged_at = self._told_at = 0.0
        self._meter = SpendingMeter(
            results.rows.values(), cost_usd=results.replaced_cost_usd, tokens=results.replaced_tokens
        )
        self._catalog = Catalog(client.store)
        self._uncatalogued: list[AttemptRow] = list(results.rows.values())
        self._changed = asyncio.Event()
        self._taking_in = asyncio.Lock()

    async def run(self) -> None:
        """Run until every attempt has its row. Idempotent.

        Raises:
            StoreError: the store cannot be used.
            UsageError: an attempt cannot be started here, or a requested setting cannot be applied.
            ModelSilent: every call of a model fails; all other attempts have ended.
        """
        if self.plan.until:
            StoppingCriterion.parse(self.plan.until, len(self.plan.models))
        self._rounds = dict((await self._steering.read()).rounds)
        self._is_started = True
        for attempt in self._all:
            row = self._results.rows.get(attempt.key)
            if row is None or row.round < self._rounds.get(attempt.key, 0):
                self._pending[attempt.model].append(attempt)
                self._meter.forget([row] if row is not None else [])
        about = EvaluationInfo(
            tenant=self.plan.tenant,
            dataset=self.plan.dataset,
            models=tuple(self.plan.models),
            instances=len(self.plan.instances),
            attempts=self.plan.attempts,
        )
        await self._catalog.begin(self.plan.name, about)
        await self._apply_desired_state()
        while not await self._run_until_announced():
            pass
        self._raise_problem()

    async def _run_until_announced(self) -> bool:
        """Run until nothing is left to do, and announce the end.

        Returns:
            Whether the evaluation is over. False if an order was given before the announcement.
        """
        helper = asyncio.create_task(self._rescan())
        helper.add_done_callback(lambda _: self._changed.set())
        try:
            await self._until_done(helper)
        finally:
            async with self._taking_in:  # otherwise it could drop a requeue halfway
                helper.cancel()
            tasks = [helper, *(one.runner for one in self._in_flight.values() if one.runner)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if problem := self._find_problem():
            self._state = STOPPED
            self._stopped = problem
        await self._show(has_driver=False)
        failpoint("evaluation.announced")
        await self._apply_desired_state()
        return not self._has_startable

    async def _until_done(self, helper: asyncio.Task[None]) -> None:
        while True:
            self._changed.clear()
            if helper.done():
                helper.result()  # re-raises its error
            self._end_ended()
            await self._put_back_unanswered()
            self._stop_early()
            self._start_attempts()
            self._notify()
            if not self._in_flight and not self._has_startable:
                await self._apply_desired_state()
                if not self._in_flight and not self._has_startable:
                    return
                continue
            await self._changed.wait()

    @property
    def _has_pending(self) -> bool:
        return any(self._pending.values())

    @property
    def _has_startable(self) -> bool:
        return any(attempts and not self._health[model].is_silent for model, attempts in self._pending.items())

    def _find_problem(self) -> str:
        """Return why attempts have no result; empty if all have one."""
        return "; ".join(f"{model}: {self._health[model].problem}" for model, left in self._pending.items() if left)

    def _raise_problem(self) -> None:
        if problem := self._find_problem():
            ids = " ".join(self._health[model].conversation_id for model, left in self._pending.items() if left)
            raise ModelSilent(
                f"The evaluation has stopped. {problem}",
                remedy=f"`deckhands eval logs DIR {ids}` shows the calls. Repair the model's settings; then "
                "`deckhands eval attach DIR` continues.",
            )

    def _start_attempts(self) -> None:
        """Start attempts up to the limit, in the plan's order as far as the limits of models allow."""
        if self._state == "cancelled":
            self._skip_pending("not-run", "cancelled")
        if self._state != "running":
            return
        if spent := self._find_spent_budget():
            self._skip_pending("limit", spent)
        while len(self._in_flight) < self._hosts.pace.limit:
            models = [model for model, attempts in self._pending.items() if attempts]
            models.sort(key=lambda model: self._places[self._pending[model][0].key])
            if not any(self._start_attempt(model) for model in models):  # stops at the first that starts one
                return

    def _start_attempt(self, model: str) -> bool:
        in_flight = sum(key[0] == model for key in self._in_flight)
        if in_flight >= self._models[model].pace.limit or len(self._in_flight) >= self._hosts.pace.limit:
            return False
        now, health = SYSTEM_CLOCK.monotonic(), self._health[model]
        if health.is_silent or (self.plan.is_paced and health.must_wait(now, in_flight)):
            return False
        if not self._may_start(self._pending[model][0]):
            return False
        health.record_start(now)
        attempt = self._pending[model].popleft()
        one = AttemptInFlight(attempt, self._rounds.get(attempt.key, 0), now)
        self._in_flight[attempt.key] = one
        task = asyncio.ensure_future(self._act(one))
        one.runner = task
        task.add_done_callback(lambda _: self._changed.set())
        return True

    def _find_spent_budget(self) -> str:
        """Return the cause for attempts that cannot start because a budget is spent; empty if none is spent."""
        plan, in_flight = self.plan, list(self._in_flight.values())
        usd = self._meter.cost_usd + sum(one.spent_usd for one in in_flight)
        if plan.budget_usd is not None and usd >= plan.budget_usd:
            return "evaluation_budget"
        tokens = self._meter.tokens + sum(one.spent_tokens for one in in_flight)
        return "evaluation_token_budget" if plan.token_budget is not None and tokens >= plan.token_budget else ""

    def _end_ended(self) -> None:
        for key, one in list(self._in_flight.items()):
            if one.runner is not None and one.runner.done():
                del self._in_flight[key]
                try:
                    row = one.runner.result()
                except ModelSilent:
                    self._unanswered.append(one)
                    continue
                if row.counts:
                    self._health[one.attempt.model].record_reply()
                self._add([row])

    def record_failed_calls(self, one: AttemptInFlight, calls: FailedCalls) -> bool:
        """Record that a conversation of an attempt ended in failed calls.

        Returns:
            Whether the model has never replied. The attempt is then part of its probe and must not be abandoned.

        Raises:
            ModelSilent: every call of the model fails, so the attempt must not be repeated now.
        """
        if one.is_found:  # an earlier driver's failure, which may be repaired
            return False
        health = self._health[one.attempt.model]
        self._note_replies(one)
        health.record_failure(calls, one.conversation_id)
        if health.is_silent:
            raise ModelSilent(health.problem)
        return not health.has_replied

    def _note_replies(self, one: AttemptInFlight) -> None:
        replies = one.seen.iterations - one.shared[0]
        if replies > one.replies:
            one.replies = replies
            self._health[one.attempt.model].record_reply()

    async def _put_back_unanswered(self) -> None:
        """Put back the attempts of models that do not answer. Unpaid attempts later restart in a new conversation.

        Attempts in flight that have had replies continue: if the model answers one of them, further attempts start.
        """
        in_vain = [
            one
            for one in self._in_flight.values()
            if self._health[one.attempt.model].is_silent and not one.replies and not one.spent_usd
        ]
        ended, self._unanswered = self._unanswered, []
        if not in_vain and not ended:
            return
        rounds = {one.attempt.key: one.round + 1 for one in (*ended, *in_vain) if not one.spent_usd}
        await self._steering.set_rounds(rounds)
        self._rounds |= rounds
        for one in ended:
            self._pending[one.attempt.model].appendleft(one.attempt)
        await self._cancel(in_vain, requeues=True)

    def _add(self, rows: list[AttemptRow]) -> None:
        if not rows:
            return
        known = [self._results.rows.get(row.key) for row in rows]
        self._results.add_all(rows)
        for row, earlier in zip(rows, known, strict=True):
            self._meter.add(row, is_paid=earlier is not None and earlier.is_same_run(row))
            self._on_row(row)
        self._uncatalogued += rows

    def _skip_pending(self, outcome: Outcome, cause: str, *, keeps_requeued: bool = False) -> None:
        """End the attempts that have not started; a requeued attempt keeps its earlier result."""
        rows = []
        for model, attempts in self._pending.items():
            kept = [one for one in attempts if keeps_requeued and self._rounds.get(one.key, 0)]
            rows += [self._build_skipped_row(one, outcome, cause) for one in attempts if one not in kept]
            self._pending[model] = deque(kept)
        self._add(rows)

    def _build_skipped_row(self, attempt: Attempt, outcome: Outcome, cause: str) -> AttemptRow:
        round_ = self._rounds.get(attempt.key, 0)
        earlier = self._results.rows.get(attempt.key)
        if earlier is not None and earlier.conversation_id:
            return earlier.model_copy(update={"round": round_})
        return build_unscored_row(attempt, round_, outcome, cause)

    def _stop_early(self) -> None:
        """End the attempts that have not started, once the stopping criterion is met."""
        now = SYSTEM_CLOCK.monotonic()
        if not self.plan.until or not self._has_pending or not self._meter.has_news:
            return
        if len(self._results.rows) > MANY_ROWS and now - self._judged_at < POLL_SECONDS:
            return
        self._judged_at = now
        self._meter.has_news = False
        known = StoppingCriterion.parse(self.plan.until, len(self.plan.models)).find_reason(
            self._all, self._results.rows
        )
        if known:
            self._stopped = known
            self._skip_pending("not-run", f"{ENOUGH}{known}", keeps_requeued=True)

    async def _rescan(self) -> None:
        """Read the desired state, and update the limits."""
        looks = 0
        while True:
            looks += 1
            await self._apply_desired_state()
            await self._set_pace()
            self._notify(is_due=True)
            if looks % SHOWN_EVERY == 1:
                await self._show()
            self._changed.set()
            await asyncio.sleep(POLL_SECONDS)

    async def _show(self, *, has_driver: bool = True) -> None:
        now = self._client.store.clock.now().timestamp()
        status = self.compute_status()
        self._on_status(status)
        await self._steering.publish_status({**status.as_json(), "at": round(now, 3), "has_driver": has_driver})
        rows = list(self._uncatalogued)
        await self._catalog.put(self.plan.name, rows)
        del self._uncatalogued[: len(rows)]

    def _notify(self, *, is_due: bool = False) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if is_due or now - self._told_at >= NOTIFY_SECONDS:
            self._told_at = now
            self._on_status(self.compute_status())

    async def _set_pace(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        in_flight = list(self._in_flight.values())
        for one in in_flight:
            self._note_replies(one)
        for model, health in self._health.items():
            health.observe([one.seen for one in in_flight if one.attempt.model == model])
        hosts, calls = await self._load.read(now, starting=sum(one.is_starting for one in in_flight))
        self._meter.refused += calls.refused
        if not self.plan.is_paced:
            return
        self._hosts.tick(now, len(in_flight), hosts)
        for model, pace in self._models.items():
            own = [one for one in in_flight if one.attempt.model == model]
            held = sum(one.seen.state == "rate_limited" for one in own)
            is_refused = held > 0 or len(self._models) == 1
            pace.tick(now, len(own), calls, is_refused=is_refused, in_queue=held)

    async def _apply_desired_state(self) -> None:
        """Apply the desired state. Idempotent."""
        async with self._taking_in:
            await self._obey(await self._steering.read())

    async def _obey(self, wanted: StoredSteering) -> None:
        self._rounds = dict(wanted.rounds)
        desired = wanted.desired
        for order_id, order in wanted.orders.items():
            await self._requeue(order_id, order)
        self._retune(desired)
        if desired.state != self._state:
            before, self._state = self._state, desired.state
            if self._state == "cancelled":
                await self._cancel(list(self._in_flight.values()), requeues=False)
            elif self._state == "paused":
                await self._each(self._client.pause)
            elif before == "paused":
                await self._each(self._client.resume)

    def _retune(self, desired: DesiredState) -> None:
        plan = self.plan
        budget = plan.budget_usd if desired.budget_usd is None else desired.budget_usd
        token_budget = plan.token_budget if desired.token_budget is None else desired.token_budget
        until = plan.until if desired.until is None else desired.until
        retries = plan.retries if desired.retries is None else desired.retries
        at_once = desired.at_once or plan.at_once
        if at_once != plan.at_once:
            self._hosts.pace.set_ceiling(at_once)
            for model in self._models.values():
                model.pace.set_ceiling(at_once)
        if until != plan.until:
            try:
                if until:
                    StoppingCriterion.parse(until, len(plan.models))
            except UsageError:
                until = plan.until  # checked by the command that wrote it, but another writer may not have checked it
            self._meter.has_news = True
        self.plan = replace(
            plan, at_once=at_once, budget_usd=budget, token_budget=token_budget, until=until, retries=retries
        )

    async def _requeue(self, order_id: str, order: Requeue) -> None:
        rows = self._results.rows
        meant = {
            key
            for key, row in rows.items()
            if key not in self._in_flight and not self._waits(key) and order.matches(row)
        }
        running = [one for key, one in self._in_flight.items() if order.matches_running(key)]
        rounds = {key: rows[key].round + 1 for key in meant} | {one.attempt.key: one.round + 1 for one in running}
        await self._steering.grant_order(order_id, rounds)
        self._rounds |= rounds
        self._end_ended()  # attempts that ended while the order was recorded: they are repeated like the others
        meant |= {one.attempt.key for one in running if one.attempt.key not in self._in_flight}
        self._meter.forget(rows[key] for key in meant)
        for attempt in self._all:
            if attempt.key in meant:
                self._pending[attempt.model].append(attempt)
        await self._cancel([one for one in running if one.attempt.key in self._in_flight], requeues=True)

    async def cut(self, keys: Collection[AttemptKey], cause: str) -> None:
        """End attempts that have no result yet: their rows are `not-run`, with this cause. Idempotent."""
        async with self._taking_in:
            self._end_ended()
            skipped = []
            for model, attempts in self._pending.items():
                skipped += [one for one in attempts if one.key in keys]
                self._pending[model] = deque(one for one in attempts if one.key not in keys)
            self._add([build_unscored_row(one, self._rounds.get(one.key, 0), "not-run", cause) for one in skipped])
            await self._cancel(
                [one for key, one in self._in_flight.items() if key in keys], requeues=False, cause=cause
            )
        self._changed.set()

    async def restart(self, keys: Collection[AttemptKey], round_: int) -> None:
        """Repeat attempts in a later round, whether they have ended or not. Idempotent."""
        async with self._taking_in:
            rounds = dict.fromkeys(keys, round_)
            await self._steering.set_rounds(rounds)
            if not self._is_started:  # it has yet to read the rounds
                return
            self._rounds |= rounds
            self._end_ended()
            running = [one for key, one in self._in_flight.items() if key in keys]
            waiting = {one.key for attempts in self._pending.values() for one in attempts}
            waiting |= {one.attempt.key for one in running}
            self._meter.forget(self._results.rows[key] for key in keys if key in self._results.rows)
            for attempt in reversed(self._all):
                if attempt.key in keys and attempt.key not in waiting:
                    self._pending[attempt.model].appendleft(attempt)
            await self._cancel(running, requeues=True)
        self._changed.set()

    def _waits(self, key: AttemptKey) -> bool:
        return self._rounds.get(key, 0) > (self._results.rows[key].round if key in self._results.rows else -1)

    async def _cancel(self, those: list[AttemptInFlight], *, requeues: bool, cause: str = "cancelled") -> None:
        """End attempts in flight; they are repeated in their next round, or get their rows."""
        those = [one for one in those if one.runner is not None and not one.runner.done()]
        for one in those:
            self._in_flight.pop(one.attempt.key, None)
            if requeues:
                self._pending[one.attempt.model].appendleft(one.attempt)
                self._meter.cost_usd += one.spent_usd
                self._meter.tokens += one.spent_tokens
            assert one.runner is not None
            one.runner.cancel()
        await asyncio.gather(*(one.runner for one in those if one.runner), return_exceptions=True)
        for one in those:
            if one.conversation_id:
                with contextlib.suppress(UsageError):
                    await self._client.cancel(one.conversation_id)
        if not requeues:
            self._add([one.build_row("not-run", cause) for one in those])

    async def _each(self, ask: Callable[[str], Awaitable[None]]) -> None:
        async def one(conversation_id: str) -> None:
            with contextlib.suppress(UsageError):  # it is over, or was not started yet
                await ask(conversation_id)

        working = [one.conversation_id for one in self._in_flight.values() if one.phase == "works"]
        await for_each(working, one)

    def compute_status(self) -> EvaluationStatus:
        """Return the current progress."""
        return compute_status(
            self.plan,
            self._in_flight.values(),
            state=self._state,
            pending=sum(map(len, self._pending.values())),
            hosts=self._hosts,
            models=self._models,
            health=self._health,
            stopped=self._stopped,
            meter=self._meter,
            now=SYSTEM_CLOCK.monotonic(),
        )
