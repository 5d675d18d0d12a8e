"""The driver of a rollout run: an evaluation whose attempts are trajectories, and the groups made of them.

Holds: all state of the driver is in the store and in the logs. If it dies, another one continues: attempts are found by
their idempotency keys, and delivered groups by their ids. A group is delivered once, with trajectories of one round,
none of them older than `max_staleness` allows at that time. The oldest undelivered group bounds how far ahead other
groups start and are delivered.
Does not: hold tokens in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from broker.contract import (
    TERMINAL_STATES,
    AgentDelegateAction,
    AgentSpec,
    Limits,
    ModelReply,
    RecordedTokens,
)
from broker.log import ConversationQuery, ConversationRow, Selection
from broker.runtime import (
    CorruptEntry,
    DeckhandsError,
    StoreError,
    StoreUnavailable,
    UnknownConversation,
    UsageError,
    failpoint,
    make_delegate_id,
)
from deckhands.client import MAX_TITLE, Client, for_each
from deckhands.evaluation import (
    CHECK,
    LABEL,
    MAX_SCORE,
    Attempt,
    AttemptKey,
    AttemptRow,
    Evaluation,
    EvaluationPlan,
    EvaluationSteering,
    Instance,
    ModelSilent,
    Results,
    ResultsInUse,
    derive_attempt_id,
    load_scorers,
    read_dataset,
    select_instances,
)
from deckhands.rollouts.record import (
    ABORTED,
    CONSUMERS,
    ENDED,
    OVER,
    PAUSED,
    RUNNING,
    RunRecord,
    RunState,
    list_runs,
)
from deckhands.rollouts.spec import CRITIC, RolloutSpec

TICK_SECONDS = 0.2
STANDBY_SECONDS = 1.0
RENEW_SECONDS = 2.0
SILENT_SECONDS = 2.5
"""While every call of the model fails, the run waits twice this time, then four times, and so on."""
LONGEST_SILENT_SECONDS, MAX_DOUBLINGS = 60.0, 10
UNEXPECTED_SECONDS = 600.0
"""The time until a driver of all runs tries one again that failed unexpectedly, such as for a full disk."""
ROWS, RESULTS = "prompts.jsonl", "results.jsonl"
DESIRED = {RUNNING: "running", PAUSED: "paused", ABORTED: "cancelled"}
"""The desired state of the run's evaluation."""
MAX_DELEGATES = 256
"""How many conversations of delegates are read for one trajectory."""
CUT, DELIVERED, STALE, TOO_SMALL = "cut", "delivered", "stale", "too_small"


class LeaseLost(Exception):
    """Another driver has taken over."""


@dataclass(slots=True)
class GroupInFlight:
    """A group that is not yet delivered.

    Attributes:
        index: its place in the order of the run.
        keys: its attempts.
        round: how often it was restarted.
        started: when its round started, and at which version; None if it has not started.
        is_over: it was delivered, or given up (`is_given_up`).

    An attempt whose model did not answer may be in a later round than its group.
    """

    index: int
    instance: Instance
    keys: frozenset[AttemptKey]
    round: int = 0
    started: tuple[float, int] | None = None
    is_over: bool = False
    is_given_up: bool = False

    @property
    def id(self) -> str:
        """The id of the group; a restarted group has a new id."""
        return f"{self.instance.id}-r{self.round}"


@dataclass(slots=True)
class RolloutDriver:
    """Drives one run; see `drive`."""

    client: Client
    record: RunRecord
    spec: RolloutSpec
    results: Results
    plan: EvaluationPlan
    lease: str
    groups: list[GroupInFlight]
    state: RunState = field(default_factory=RunState)
    waiting: int = 0
    is_finished: bool = False
    _evaluation: Evaluation | None = None
    _is_ready: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _finished: dict[AttemptKey, int] = field(default_factory=dict)
    _opening: dict[int, int] = field(default_factory=dict)
    _uncut: set[int] = field(default_factory=set)
    _by_instance: dict[str, GroupInFlight] = field(default_factory=dict)
    _read_events: int = 0
    _desired: str = ""
    _replies: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def run(self) -> None:
        """Run until each group is delivered and acknowledged, or given up.

        Raises:
            LeaseLost: another driver has taken over.
        """
        await self._start()
        helpers = [asyncio.create_task(self._tick_on()), asyncio.create_task(self._cancel_orphans())]
        ticker = helpers[0]
        silences = 0
        try:
            while not ticker.done():
                self._evaluation = Evaluation(
                    self.client, self.plan, self.results, on_row=self._on_row, may_start=self._may_start
                )
                evaluating = asyncio.create_task(self._evaluation.run())
                helpers.append(evaluating)
                self._changed.clear()
                await asyncio.wait([evaluating, ticker], return_when=asyncio.FIRST_COMPLETED)
                if ticker.done():
                    break
                self._evaluation = None
                try:
                    await evaluating
                except ModelSilent as error:
                    await self.record.add_event("model_silent", message=error.message)
                    silences = min(silences + 1, MAX_DOUBLINGS)
                    await asyncio.wait([ticker], timeout=min(SILENT_SECONDS * 2**silences, LONGEST_SILENT_SECONDS))
                else:
                    waiting = asyncio.create_task(self._changed.wait())
                    await asyncio.wait([waiting, ticker], return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        await ticker
        await self._cancel_orphans()

    def _on_row(self, row: AttemptRow) -> None:
        self._finished[row.key] = len(self._finished)
        self._replies.pop(row.conversation_id, None)

    def _may_start(self, attempt: Attempt) -> bool:
        """Return whether the next trajectory may start: its group is in the window, and the trainer keeps up."""
        if not self._is_ready or self.state.state != RUNNING:
            return False
        group = self._by_instance[attempt.instance.id]
        if group.is_over:
            self._uncut.add(group.index)  # otherwise it stays the next one
            return False
        if group.started is not None:
            return True
        oldest = next((one.index for one in self.groups if not one.is_over), group.index)
        open_groups = self.waiting + sum(
            not one.is_over and (one.started is not None or one.index in self._opening) for one in self.groups
        )
        if group.index >= oldest + self.spec.window or open_groups >= self.spec.waiting:
            return group.index in self._opening
        self._opening[group.index] = self.state.version
        return True

    async def _start(self) -> None:
        """Read the results of earlier drivers; attempts of ended groups do not start again."""
        await self.record.join(CONSUMERS)
        await self._refresh()
        rounds = (await EvaluationSteering(self.client.store, self.plan.name).read()).rounds
        given_up = {one.get("instance") for one in self.record.events if one["kind"] == "given_up"}
        rows = []
        for group in self.groups:
            name = group.instance.id
            self._by_instance[name] = group
            group.round = min(rounds.get(key, 0) for key in group.keys)
            last = self.record.find_last(name)
            if last is not None and (last["round"] >= group.round or self.record.find_standing(name)):
                group.round, group.is_over = last["round"], True
            group.is_given_up = name in given_up
            group.is_over |= group.is_given_up
            if group.is_over:
                rows += [
                    AttemptRow(
                        instance=instance, model=model, attempt=number, outcome="not-run", cause=DELIVERED,
                        round=rounds.get((model, instance, number), 0),
                    )
                    for model, instance, number in sorted(group.keys)
                    if (row := self.results.rows.get((model, instance, number))) is None
                    or row.round < rounds.get((model, instance, number), 0)
                ]  # fmt: skip
            elif any(self._is_current(group, key) for key in group.keys):
                group.started = await self.record.note_start(group.id, self.state.version)
        self.results.add_all(rows)
        self._is_ready = True

    async def _tick_on(self) -> None:
        renewed = 0.0
        clock = self.client.store.clock
        while True:
            if clock.monotonic() - renewed > RENEW_SECONDS:
                await self._hold()
                renewed = clock.monotonic()
            await self._tick()
            if self.is_finished:
                return
            await asyncio.sleep(TICK_SECONDS)

    async def _tick(self) -> None:
        await self._refresh()
        for index, version in list(self._opening.items()):
            self.groups[index].started = await self.record.note_start(self.groups[index].id, version)
            del self._opening[index]
        await self._take_dropped()
        await self._cut_over()
        if self.state.state == RUNNING:
            oldest = next((one.index for one in self.groups if not one.is_over), len(self.groups))
            for group in self.groups[oldest : oldest + self.spec.window]:
                if not group.is_over and group.started is not None:
                    await self._advance(group)
        if self.state.state in ENDED:
            self.is_finished = True
        elif self._is_all_over and not self.waiting:
            await self._hold()
            await self.record.refresh()  # the reader drops a group before it acknowledges it
            await self._take_dropped()
            if self._is_all_over:
                await self.record.set_state(OVER)
                self.is_finished = True

    @property
    def _is_all_over(self) -> bool:
        return all(one.is_over for one in self.groups)

    async def _hold(self) -> None:
        """Check that this is still the driver.

        Raises:
            LeaseLost: another process is the driver.
        """
        if not await self.record.renew_lease(self.lease):
            raise LeaseLost

    async def _refresh(self) -> None:
        await self.record.refresh()
        self.state = await self.record.load_state()
        if self.state.state in DESIRED and DESIRED[self.state.state] != self._desired:
            self._desired = DESIRED[self.state.state]
            await EvaluationSteering(self.client.store, self.plan.name).set_desired(state=self._desired)
        self.waiting = await self.record.count_waiting(CONSUMERS)

    async def _take_dropped(self) -> None:
        """Restart groups that the reader found too old, or could not read."""
        new = self.record.events[self._read_events :]
        self._read_events = len(self.record.events)
        reasons = {
            str(one.get("group")): str(one.get("reason"))
            for one in new
            if one["kind"] == "dropped" and one.get("by") == "reader"
        }
        for group in self.groups if reasons else ():
            if group.is_over and not group.is_given_up and group.id in reasons:
                await self._restart(group, reasons[group.id], is_told=True)

    async def _advance(self, group: GroupInFlight) -> None:
        """Deliver a group, cut its stragglers, or restart it."""
        assert group.started is not None
        at, version = group.started
        if self._is_stale(version):
            await self._restart(group, STALE)
            return
        rows = [self.results.rows[key] for key in group.keys if self._is_current(group, key)]
        usable = await self._list_usable(rows)
        now = self.client.store.clock.now().timestamp()
        limit = self.spec.group_seconds
        is_late = limit is not None and now - at > limit and now - at - self.record.measure_pauses(at, now) > limit
        is_complete = len(usable) >= self.spec.group_size
        if not is_complete and not is_late and len(rows) < len(group.keys):
            return
        if len(usable) < self.spec.smallest_group:
            await self._restart(group, TOO_SMALL)
            return
        chosen = sorted(usable, key=self._place)[: self.spec.group_size]
        trajectories = [self._describe(row) for row in sorted(chosen, key=lambda row: row.attempt)]
        oldest = min((one["min_version"] for one in trajectories if one["min_version"] is not None), default=version)
        if self._is_stale(oldest):
            await self._restart(group, STALE)
            return
        about = {
            "id": group.id, "run": self.record.name, "index": group.index, "instance": group.instance.id,
            "round": group.round, "version": self.state.version, "min_version": oldest, "trajectories": trajectories,
        }  # fmt: skip
        await self._hold()
        failpoint("rollouts.before_delivery")
        if not await self.record.deliver(about):
            raise LeaseLost
        failpoint("rollouts.after_delivery")
        group.is_over = True
        self.waiting += 1
        for row in usable:
            self._replies.pop(row.conversation_id, None)
        await self._cut(group)
        self._changed.set()

    async def _restart(self, group: GroupInFlight, reason: str, *, is_told: bool = False) -> None:
        """Repeat a group in its next round, or give it up."""
        await self._hold()
        if not is_told:
            await self.record.add_event("dropped", group=group.id, reason=reason, by="driver")
            await self.record.refresh()
        if len(self.record.list_dropped(group.instance.id)) > self.spec.retries:
            await self.record.add_event("given_up", group=group.id, instance=group.instance.id, reason=reason)
            group.is_over = group.is_given_up = True
            await self._cut(group)
            return
        steering = EvaluationSteering(self.client.store, self.plan.name)
        rounds = (await steering.read()).rounds
        next_round = max(group.round, *(rounds.get(key, 0) for key in group.keys)) + 1
        group.round, group.started, group.is_over = next_round, None, False
        if self._evaluation is not None:
            await self._evaluation.restart(group.keys, next_round)
        else:
            await steering.set_rounds(dict.fromkeys(group.keys, next_round))
        self._changed.set()

    async def _cut(self, group: GroupInFlight) -> None:
        self._uncut.add(group.index)
        await self._cut_over()

    async def _cut_over(self) -> None:
        """End the attempts of ended groups.

        Repeat the call later, because an evaluation that has not started has none yet.
        """
        for index in list(self._uncut):
            group = self.groups[index]
            if group.is_over and self._evaluation is not None:
                await self._evaluation.cut(group.keys, CUT)
            if not group.is_over or all(self._is_current(group, key) for key in group.keys):
                self._uncut.discard(index)

    async def _cancel_orphans(self) -> None:
        """Cancel conversations of attempts that no longer count, of ended groups and of earlier rounds.

        An earlier driver started them. If the run has ended, all its conversations are cancelled.
        """
        groups: dict[str, list[GroupInFlight]] = {}
        for group in self.groups:
            groups.setdefault(group.instance.id[:MAX_TITLE], []).append(group)

        def is_orphan(row: ConversationRow) -> bool:
            if row.state in TERMINAL_STATES or self.state.state in ENDED:
                return row.state not in TERMINAL_STATES
            found = groups.get(row.title, ())
            return bool(found) and all(one.is_over or row.conversation_id in self._list_earlier(one) for one in found)

        await steer_all(self.client, self.plan.name, self.client.cancel, is_orphan)

    def _list_earlier(self, group: GroupInFlight) -> set[str]:
        """Return the ids of the conversations of the earlier rounds of a group."""
        numbers = range(self.plan.retries + 1)
        return {
            derive_attempt_id(self.plan.name, key, round_, number)
            for key in group.keys
            for round_ in range(group.round)
            for number in numbers
        }

    def _is_stale(self, version: int) -> bool:
        most = self.spec.max_staleness
        return most is not None and self.state.version - version > most

    def _is_current(self, group: GroupInFlight, key: AttemptKey) -> bool:
        row = self.results.rows.get(key)
        return row is not None and row.round >= group.round

    def _place(self, row: AttemptRow) -> int:
        return self._finished.get(row.key, -1)

    async def _list_usable(self, rows: Sequence[AttemptRow]) -> list[AttemptRow]:
        """Return the rows of trajectories that count: with tokens, and not partial, unless partial ones count."""
        found = []
        for row in rows:
            is_kept = row.counts and (row.outcome != "limit" or self.spec.partial == "keep")
            if not is_kept or not row.conversation_id:
                continue
            if row.conversation_id not in self._replies:
                replies = self._replies[row.conversation_id] = await read_replies(self.client, row.conversation_id)
                if unread := replies["unread_delegates"]:
                    await self.record.add_event("delegates_cut", conversation=row.conversation_id, unread=unread)
            if self._replies[row.conversation_id]["sampled"]:
                found.append(row)
        return found

    def _describe(self, row: AttemptRow) -> dict[str, Any]:
        instance = self._by_instance[row.instance].instance
        is_checked = any(one is not None for one in (instance.check, instance.answer, instance.judge))
        has_check = is_checked and row.outcome in ("resolved", "unresolved")
        reward, parts = compute_reward(row, self.spec, has_check=has_check)
        return {
            "conversation_id": row.conversation_id,
            "attempt": row.attempt,
            "reward": reward,
            "rewards": parts,
            "step_rewards": row.step_rewards,
            "outcome": row.outcome,
            "cause": row.cause,
            "is_partial": row.outcome == "limit",
            **self._replies[row.conversation_id],
        }


async def read_replies(client: Client, conversation_id: str) -> dict[str, Any]:
    """Return the counts of a trajectory, and its delegates with tokens. They belong to the same episode."""
    own = await _read_tokens(client, conversation_id)
    tokens, delegates, left = list(own[0]), list[str](), deque(own[1])
    reads = 0
    while left and reads < MAX_DELEGATES:
        reads += 1
        delegate_id = left.popleft()
        found, further = await _read_tokens(client, delegate_id)
        left += further
        if found:
            tokens += found
            delegates.append(delegate_id)
    oldest = [one.min_version for one in tokens if one.min_version is not None]
    newest = [one.max_version for one in tokens if one.max_version is not None]
    return {
        "sampled": sum(one.sampled for one in own[0]),
        "min_version": min(oldest, default=None),
        "max_version": max(newest, default=None),
        "segments": sum(one.start == 0 for one in own[0]),
        "delegates": delegates,
        "unread_delegates": len(left),
    }


async def _read_tokens(client: Client, conversation_id: str) -> tuple[list[RecordedTokens], list[str]]:
    """Return the token counts of a conversation's replies, and the ids of its delegates."""
    try:
        events = await client.events(conversation_id, is_lenient=True)
    except (UnknownConversation, CorruptEntry):
        events = []
    tokens = [one.tokens for one in events if isinstance(one, ModelReply) and one.tokens is not None]
    delegates = [make_delegate_id(conversation_id, one.id) for one in events if isinstance(one, AgentDelegateAction)]
    return tokens, delegates


def compute_reward(row: AttemptRow, spec: RolloutSpec, *, has_check: bool) -> tuple[float, dict[str, float]]:
    """Return the reward of a trajectory, and its parts by name.

    A single part is the reward itself; several parts are added with the weights of the specification.
    """
    names = [name.rpartition("@")[2] for name in spec.scorers]
    parts = {name: row.metrics[name] for name in names if name in row.metrics}
    if spec.critic and row.score is not None:
        parts[CRITIC] = row.score / MAX_SCORE
    if has_check and (CHECK in spec.weights or not (spec.scorers or spec.critic)):
        number = row.metrics.get(CHECK) if set(names) & row.metrics.keys() else row.reward
        parts[CHECK] = float(row.outcome == "resolved") if number is None else number
    if not parts:
        return row.reward or 0.0, {}
    return sum(value * spec.weights.get(name, 1.0) for name, value in parts.items()), parts


async def steer_all(
    client: Client, name: str, act: Callable[[str], Awaitable[object]], is_meant: Callable[[ConversationRow], bool]
) -> None:
    """Call a function with the conversations of a run that are meant."""
    pages = ConversationQuery(client.store, Selection(labels={LABEL: name})).iterate_pages()

    async def find_ids() -> AsyncIterator[str]:
        async for page in pages:
            for row in page:
                if is_meant(row) and not row.is_closed:
                    yield row.conversation_id

    async def call(conversation_id: str) -> None:
        with contextlib.suppress(UsageError):  # it has ended meanwhile
            await act(conversation_id)

    await for_each(find_ids(), call)


async def drive(client: Client, name: str, directory: Path) -> bool:
    """Drive a run until it is over; return False at once if another driver does.

    Raises:
        UsageError: there is no such run, or its prompts cannot be read here.
        StoreError: the store cannot be used.
    """
    record = RunRecord(client.store, name)
    spec = await record.load_spec()
    if (await record.load_state()).state in ENDED:
        return True
    lease = await record.take_lease()
    if not lease:
        return False
    try:
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        instances = await asyncio.to_thread(read_prompts, spec, directory)
        plan = build_plan(name, spec, instances)
        groups = [
            GroupInFlight(index, one, frozenset((spec.model, one.id, number) for number in range(1, plan.attempts + 1)))
            for index, one in enumerate(instances)
        ]
        with Results(directory / RESULTS) as results:
            await RolloutDriver(client, record, spec, results, plan, lease, groups).run()
    except (LeaseLost, ResultsInUse):
        return False
    finally:
        with contextlib.suppress(DeckhandsError):
            await record.end_lease(lease)
    return True


async def drive_all(
    client: Client, find_directory: Callable[[str], Path], on_error: Callable[[str, Exception], object]
) -> None:
    """Drive each run of the cluster, including later ones, or stand by while other drivers do; never returns.

    Args:
        find_directory: returns where this machine keeps the results of a run.
        on_error: called with a run that cannot be driven here, and the reason. The run gets the event `not_driven`, and
            is retried later unless its specification is the reason.
    """

    async def drive_one(name: str) -> None:
        try:
            await drive_on(client, name, find_directory(name))
        except StoreError:
            driving.pop(name, None)  # tried again
        except Exception as error:  # noqa: BLE001  (a run of one tenant stops no run of another)
            on_error(name, error)
            with contextlib.suppress(DeckhandsError):
                record = RunRecord(client.store, name)
                await record.load_spec()  # the event would bring an expired run back
                await record.add_event("not_driven", reason=getattr(error, "code", "unexpected"))
            if not isinstance(error, UsageError):
                await asyncio.sleep(UNEXPECTED_SECONDS)
                driving.pop(name, None)

    driving: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            with contextlib.suppress(StoreUnavailable):
                for name in await list_runs(client.store):
                    if name not in driving:
                        driving[name] = tasks.create_task(drive_one(name))
            await asyncio.sleep(STANDBY_SECONDS)


async def drive_on(client: Client, name: str, directory: Path) -> None:
    """Drive a run, or stand by while another driver does, until it is over. Raises the errors of `drive`."""
    while not await drive(client, name, directory):  # noqa: ASYNC110  (the lease of another process has no event here)
        await asyncio.sleep(STANDBY_SECONDS)


def build_plan(name: str, spec: RolloutSpec, instances: Sequence[Instance]) -> EvaluationPlan:
    """Return the evaluation whose attempts are the trajectories of a run."""
    return EvaluationPlan(
        name,
        instances,
        [spec.model],
        attempts=spec.attempts,
        agent=AgentSpec(name=spec.agent, enable_delegation=spec.delegation),
        limits=Limits(max_iterations=spec.max_iterations, max_seconds=spec.trajectory_seconds),
        at_once=spec.at_once,
        retries=spec.retries,
        critic=spec.critic,
        scorers=load_scorers(spec.scorers),
        is_paced=False,
        tenant=spec.tenant,
        dataset=spec.prompts if isinstance(spec.prompts, str) else "rollouts",
        network=spec.network,
        rollout=True,
    )


def read_prompts(spec: RolloutSpec, directory: Path) -> list[Instance]:
    """Return the prompts of a run, in order: all prompts of an epoch come before those of the next one.

    Raises:
        UsageError: they cannot be read.
    """
    name: str | Path = spec.prompts if isinstance(spec.prompts, str) else directory / ROWS
    if not isinstance(spec.prompts, str):
        _write_rows(spec.prompts, directory / ROWS)
    found = read_dataset(name, is_scored=bool(spec.critic or spec.scorers))
    chosen = select_instances(found, only=spec.only, part=spec.part, shuffle=spec.shuffle, seed=spec.seed)
    if spec.epochs == 1:
        return chosen
    return [replace(one, id=f"{one.id}.e{epoch}") for epoch in range(1, spec.epochs + 1) for one in chosen]


def _write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    try:
        path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")
    except (TypeError, ValueError) as error:
        raise UsageError(f"A row of the prompts is not JSON: {error}.", remedy="Pass mappings.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", remedy="Name another directory.") from error
