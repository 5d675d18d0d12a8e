"""`RolloutRun`: start a rollout run, read its groups, and report new weights to it.

Holds: a program that dies continues where it acknowledged. While a program reads groups, it is a standby driver, so the
run continues even if the process that started it has ended.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from broker.contract import TERMINAL_STATES, AgentState
from broker.log import ConversationRow
from broker.runtime import CorruptEntry, UnknownConversation, UsageError, new_conversation_id
from deckhands.client import Client, Trajectory, require_models
from deckhands.cluster import Home
from deckhands.evaluation import start_in_background
from deckhands.rollouts.driver import drive_on, read_prompts, steer_all
from deckhands.rollouts.engines import pause_engines, resume_engines
from deckhands.rollouts.record import (
    ABORTED,
    CONSUMERS,
    ENDED,
    PAUSED,
    RUNNING,
    SERVED_PREFIX,
    RunRecord,
    RunState,
)
from deckhands.rollouts.spec import RolloutSpec
from deckhands.settings import CliSettings

POLL_SECONDS = 0.2
SUBMISSION_SECONDS = 0.5
"""A driver learns of a pause within this time, and submits a conversation."""
GROUP_FIELDS = ("id", "index", "instance", "round", "version", "min_version")
ROLLOUT_FIELDS = (
    *("reward", "rewards", "step_rewards", "outcome", "cause"),
    *("is_partial", "min_version", "max_version"),
)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trajectory of a group, with its reward.

    Attributes:
        rewards: the parts of the reward by name.
        step_rewards: one for each reply, if the scorer gave them.
        is_partial: it reached a limit.
        min_version, max_version: the oldest and the newest policy that sampled a token, also of its delegates.
        delegates: the trajectories of its delegates, and of theirs: together they are one episode with one reward.
    """

    trajectory: Trajectory
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    step_rewards: Sequence[float] = ()
    outcome: str = ""
    cause: str = ""
    is_partial: bool = False
    min_version: int | None = None
    max_version: int | None = None
    delegates: Sequence[Trajectory] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """A finished group: trajectories of one prompt.

    Attributes:
        id: the id, which is never delivered twice. If a prompt is retried, its group has a new id.
        index: the place of its prompt in the order of the run.
        instance: the id of its prompt.
        number: the number of its delivery; later groups have higher ones.
        version: the policy version at the delivery; `min_version` is that of its oldest token.
    """

    id: str
    index: int
    instance: str
    round: int
    version: int
    min_version: int
    rollouts: Sequence[Rollout]
    number: int
    _acknowledge: Callable[[int], Awaitable[None]] = field(repr=False, compare=False)

    async def ack(self) -> None:
        """Acknowledge the group, so that it is not delivered again. Idempotent."""
        await self._acknowledge(self.number)

    def as_json(self) -> dict[str, Any]:
        """Return the group as plain JSON, with its tokens."""
        return {
            **{name: getattr(self, name) for name in GROUP_FIELDS},
            "number": self.number,
            "rollouts": [
                {
                    **one.trajectory.as_json(),
                    **{name: getattr(one, name) for name in ROLLOUT_FIELDS},
                    "delegates": [delegate.as_json() for delegate in one.delegates],
                }
                for one in self.rollouts
            ],
        }

    @classmethod
    def from_json(cls, about: Mapping[str, Any], acknowledge: Callable[[int], Awaitable[None]]) -> Self:
        """Read a group from plain JSON."""
        rollouts = [
            Rollout(
                Trajectory.from_json(one),
                **{name: one[name] for name in ROLLOUT_FIELDS},
                delegates=[Trajectory.from_json(delegate) for delegate in one.get("delegates", ())],
            )
            for one in about["rollouts"]
        ]
        fields = {name: about[name] for name in GROUP_FIELDS}
        return cls(**fields, rollouts=rollouts, number=about["number"], _acknowledge=acknowledge)


class RolloutRun:
    """A rollout run of a cluster.

    Attributes:
        name: its name; its conversations have the label `evaluation=NAME`.
    """

    def __init__(self, client: Client, name: str, *, directory: Path | None = None) -> None:
        self.name = name
        self._client = client
        self._record = RunRecord(client.store, name)
        self._directory = directory or find_directory(name)

    @classmethod
    async def start(
        cls, client: Client, spec: RolloutSpec, *, name: str | None = None, directory: Path | None = None
    ) -> Self:
        """Record a run; the first program that reads or drives it starts its trajectories. Idempotent with a name.

        Args:
            directory: where its driver on this machine keeps results; None for a directory below DECKHANDS_HOME.

        Raises:
            UsageError: the specification or its prompts cannot be used, or the name has another specification.
        """
        if name is not None and name.startswith(SERVED_PREFIX):
            raise UsageError(f"{name!r} would be a run of a server.", remedy=f"Use a name without {SERVED_PREFIX!r}.")
        run = cls(client, name or new_conversation_id(), directory=directory)
        spec = await asyncio.to_thread(spec.resolve)
        await asyncio.to_thread(run._check_prompts, spec)
        await run._record.create(spec)
        return run

    @classmethod
    async def start_served(cls, client: Client, spec: RolloutSpec, name: str) -> Self:
        """Record a run whose specification does not come from the operator, under a name reserved for servers.

        Idempotent.

        Raises:
            UsageError: the specification or its prompts cannot be used, or name something of the driver's machine.
            ModelNotOffered: controller workers are running, but none offers its model or its critic to its tenant.
        """
        run = cls(client, SERVED_PREFIX + name)
        await asyncio.to_thread(spec.require_served)
        await require_models(client.store, filter(None, (spec.model, spec.critic)), spec.tenant)
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(read_prompts, spec.model_copy(update={"epochs": 1}), Path(folder))
        await run._record.create(spec)
        return run

    @classmethod
    async def open(cls, client: Client, name: str, *, directory: Path | None = None) -> Self:
        """Return a run that was started before.

        Raises:
            UsageError: there is no run with this name.
        """
        run = cls(client, name, directory=directory)
        await run._record.load_spec()
        return run

    async def load_spec(self) -> RolloutSpec:
        """Return its specification."""
        return await self._record.load_spec()

    async def describe(self) -> dict[str, Any]:
        """Return its name, tenant, model and state, and the counts of its groups, for lists."""
        return await self._record.describe()

    async def load_state(self) -> RunState:
        """Return its state and the version of its policy."""
        return await self._record.load_state()

    async def list_events(self, *, limit: int | None = None) -> list[dict[str, Any]]:
        """Return its events, in order: `weights_changed`, `paused`, `dropped` and others.

        Args:
            limit: return the last ones only.
        """
        if limit is not None:
            return await self._record.list_last_events(limit)
        await self._record.refresh()
        return list(self._record.events)

    async def list_groups(self) -> list[dict[str, Any]]:
        """Return the entries of the groups that were delivered, in order."""
        await self._record.refresh()
        return list(self._record.delivered)

    async def count_waiting(self) -> int:
        """Return how many groups are delivered and not acknowledged."""
        await self._record.refresh()
        return await self._record.count_waiting(CONSUMERS)

    async def drive(self) -> None:
        """Drive the run, or stand by while another driver does, until it is over.

        Raises:
            UsageError: its prompts or its functions cannot be read here.
        """
        await drive_on(self._client, self.name, self._directory)

    def detach(self) -> int:
        """Start a process that drives the run and outlives this one; return its pid.

        Raises:
            UsageError: the process ended at once; the text has the reason.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        arguments = ("rollouts", "attach", self.name, "--directory", str(self._directory))
        return start_in_background(self._directory, "rollout run", *arguments)

    async def groups(
        self, *, consumer: str = "trainer", drives: bool = True, is_following: bool = True
    ) -> AsyncGenerator[Group]:
        """Yield the finished groups with their tokens, first those that this consumer has not acknowledged.

        A group is dropped, and its prompt retried, if it became too old while it waited or if its tokens can no longer
        be read. The iteration ends when the run is over and each group is acknowledged.

        Args:
            consumer: the name of this reader. A program that dies continues under the same name.
            drives: drive the run meanwhile, if no other driver does.
            is_following: False to end after the groups that exist now.
        """
        driving = asyncio.create_task(self.drive()) if drives else None
        after = 0
        try:
            while True:
                if driving is not None and driving.done():
                    driving.result()
                is_ended = (await self._record.load_state()).state in ENDED
                group = await self.take_next(consumer, after=after)
                if group is not None:
                    after = group.number
                    yield group
                elif is_ended or not is_following:
                    return
                else:
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            if driving is not None:
                driving.cancel()
                await asyncio.gather(driving, return_exceptions=True)

    async def take_next(self, consumer: str, *, after: int = 0) -> Group | None:
        """Return the next group for a consumer, as `groups` yields them; None if there is none now.

        Args:
            after: the number of the last group that it has read; 0 to start with the first unacknowledged one.
        """
        spec = await self._record.load_spec()
        await self._record.join(CONSUMERS)
        while True:
            entries = await self._record.read_groups(CONSUMERS, consumer, limit=1)
            found = next((one for one in entries if one[0] > after), None)
            if found is None:
                return None
            after, about = found
            if await self._is_stale(spec, about):
                await self._drop(after, about, "stale")
                continue
            try:
                return await self._load(after, about)
            except (CorruptEntry, UnknownConversation):  # damaged, or deleted meanwhile
                await self._drop(after, about, "unreadable")

    async def acknowledge(self, number: int) -> None:
        """Acknowledge the group of a delivery, so that it is not delivered again. Idempotent."""
        await self._record.acknowledge(CONSUMERS, number)

    async def weights_changed(self, version: int) -> None:
        """Record that the engines have the weights of a version from now on. Idempotent.

        Raises:
            UsageError: the version is older than an earlier recorded one.
        """
        await self._record.set_version(version)

    async def pause(self, **note: str) -> None:
        """Pause the whole run: no trajectory starts or takes a further step, and engines are paused as configured.

        With engines and `on_pause: drain`, no reply is in flight when this returns.

        Args:
            note: further fields of its event.

        Raises:
            EngineFailed: an engine cannot be paused; the run is paused nevertheless.
        """
        spec = await self._record.load_spec()
        await self._require_open()
        await self._record.set_state(PAUSED, **note)
        await self._steer_all(self._client.pause, _is_working)
        await pause_engines(spec.engines, spec.on_pause)

    async def resume(self, **note: str) -> None:
        """Continue a paused run. Raises EngineFailed; the run then stays paused."""
        spec = await self._record.load_spec()
        await self._require_open()
        await resume_engines(spec.engines)
        await self._record.set_state(RUNNING, **note)
        await steer_all(self._client, self.name, self._client.resume, _is_open)  # some may have yet to announce a pause

    async def abort(self, **note: str) -> None:
        """End the run: no further group is delivered, and its conversations are cancelled. Idempotent."""
        if (await self._record.load_state()).state not in ENDED:
            await self._record.set_state(ABORTED, **note)
        await self._steer_all(self._client.cancel, _is_open)

    async def _require_open(self) -> None:
        state = (await self._record.load_state()).state
        if state in ENDED:
            raise UsageError(f"The rollout run {self.name} is {state}.", remedy="Start another one.")

    async def _steer_all(
        self, act: Callable[[str], Awaitable[object]], is_meant: Callable[[ConversationRow], bool]
    ) -> None:
        """Call a function with all affected conversations, including those that are being submitted."""
        await steer_all(self._client, self.name, act, is_meant)
        if (await self._record.load_state()).is_driven:
            await asyncio.sleep(SUBMISSION_SECONDS)
            await steer_all(self._client, self.name, act, is_meant)

    async def _is_stale(self, spec: RolloutSpec, about: Mapping[str, Any]) -> bool:
        version = (await self._record.load_state()).version
        return spec.max_staleness is not None and version - about["min_version"] > spec.max_staleness

    async def _drop(self, number: int, about: Mapping[str, Any], reason: str) -> None:
        """Have the driver try the prompt of a group again."""
        await self._record.add_event("dropped", group=about["id"], reason=reason, by="reader")
        await self._record.acknowledge(CONSUMERS, number)

    async def load_rollouts(self, about: Mapping[str, Any]) -> list[Rollout]:
        """Return the trajectories of an entry of `list_groups`, with their tokens.

        Raises:
            CorruptEntry, UnknownConversation: they can no longer be read.
        """
        return [
            Rollout(
                await self._client.trajectory(one["conversation_id"]),
                **{name: one[name] for name in ROLLOUT_FIELDS},
                delegates=[await self._client.trajectory(delegate) for delegate in one.get("delegates", ())],
            )
            for one in about["trajectories"]
        ]

    async def _load(self, number: int, about: Mapping[str, Any]) -> Group:
        rollouts = await self.load_rollouts(about)
        fields = {name: about[name] for name in GROUP_FIELDS}
        return Group(**fields, rollouts=rollouts, number=number, _acknowledge=self.acknowledge)

    def _check_prompts(self, spec: RolloutSpec) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        read_prompts(spec, self._directory)


def _is_open(row: ConversationRow) -> bool:
    return row.state not in TERMINAL_STATES


def _is_working(row: ConversationRow) -> bool:
    return _is_open(row) and row.state != AgentState.PAUSED


def find_directory(name: str) -> Path:
    """Return the directory in which drivers on this machine keep the results of a run."""
    return Home(CliSettings.from_env().home).path / "rollouts" / name
