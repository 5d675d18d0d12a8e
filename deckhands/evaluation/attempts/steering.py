"""The desired state of a running evaluation, kept in the store so that users can change it on any machine.

Holds: a value stays until it is changed, even while no driver runs. A requeue raises the round of attempts by one,
however often a driver reads it. Unreadable entries count as absent.
Does not: start anything; the driver polls it about once a second.
Keys: `deck:{0}:evaluation:<name>`: `state`, `at_once`, `budget_usd`, `token_budget`, `until`, `retries`, `status`,
`order:<id>` for a requeue that no driver has read, `round:<attempt>` for requeued attempts. Kept for a month.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.runtime import new_key
from broker.store import Store, decode_fields
from deckhands.evaluation.attempts.results import AttemptRow

KEPT_SECONDS = 30 * 86_400
MAX_AT_ONCE, MAX_RETRIES = 10_000, 100
STATE_FIELDS = ("state", "at_once", "budget_usd", "token_budget", "until", "retries")
ORDER, ROUND = "order:", "round:"

AttemptKey = tuple[str, str, int]


class DesiredState(BaseModel):
    """The desired state.

    Attributes:
        state: `paused`: no attempt starts, and those in flight are paused. `cancelled`: no further attempt starts.
        at_once: the maximum number of attempts in flight; None if not set.
        budget_usd, token_budget: infinite for no budget; None if not set.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: Literal["running", "paused", "cancelled"] = "running"
    at_once: int | None = Field(default=None, ge=1, le=MAX_AT_ONCE)
    budget_usd: float | None = Field(default=None, ge=0)
    token_budget: float | None = Field(default=None, ge=0)
    until: str | None = Field(default=None, max_length=100)
    retries: int | None = Field(default=None, ge=0, le=MAX_RETRIES)


class Requeue(BaseModel):
    """An order to repeat the attempts that match every non-empty field.

    Attributes:
        outcomes: outcomes of their rows; `running` means attempts in flight.
        causes: causes in their rows, such as `evaluation_budget`.
        instances, models: those of the attempts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcomes: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def pattern(self) -> str:
        """The order as options of `eval requeue`."""
        given = (
            ("--state", self.outcomes),
            ("--class", self.causes),
            ("--id", self.instances),
            ("--model", self.models),
        )
        return " ".join(f"{name} {value}" for name, values in given for value in values)

    def matches(self, row: AttemptRow) -> bool:
        """Return whether this request includes a finished attempt."""
        return (
            (not self.outcomes or row.outcome in self.outcomes)
            and (not self.causes or row.cause in self.causes or bool(set(self.causes) & set(row.failures)))
            and (not self.instances or row.instance in self.instances)
            and (not self.models or row.model in self.models)
        )

    def matches_running(self, key: AttemptKey) -> bool:
        """Return whether this request includes an attempt in flight, which needs the outcome `running`."""
        model, instance, _ = key
        return (
            "running" in self.outcomes
            and not self.causes
            and (not self.instances or instance in self.instances)
            and (not self.models or model in self.models)
        )


@dataclass(frozen=True, slots=True)
class StoredSteering:
    """The stored state for steering an evaluation.

    Attributes:
        orders: requeues that no driver has read, by their ids.
        rounds: how often attempts were requeued.
        status: its last reported progress; empty for none. `has_driver` is false after a driver's last report.
    """

    desired: DesiredState = field(default_factory=DesiredState)
    orders: Mapping[str, Requeue] = field(default_factory=dict)
    rounds: Mapping[AttemptKey, int] = field(default_factory=dict)
    status: Mapping[str, object] = field(default_factory=dict)


class EvaluationSteering:
    """The desired state of one evaluation."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._key = store.all_shards[0].evaluation(name)

    async def read(self) -> StoredSteering:
        """Read the stored state.

        Raises:
            StoreError: the store does not answer.
        """
        fields = decode_fields(await self._store.call("HGETALL", self._key))
        orders: dict[str, Requeue] = {}
        rounds: dict[AttemptKey, int] = {}
        for name, text in fields.items():
            if name.startswith(ORDER) and (requeue := _parse_requeue(text)) is not None:
                orders[name.removeprefix(ORDER)] = requeue
            elif name.startswith(ROUND) and (key := _parse_attempt(name.removeprefix(ROUND))) and text.isdigit():
                rounds[key] = int(text)
        return StoredSteering(_parse_desired(fields), orders, rounds, _parse_status(fields.get("status", "")))

    async def set_desired(self, **desired: object) -> None:
        """Record a new desired state; None leaves a value unchanged. Idempotent."""
        await self._put({name: str(value) for name, value in desired.items() if value is not None})

    async def requeue(self, order: Requeue, order_id: str | None = None) -> None:
        """Order attempts to be repeated. Idempotent with an id, until a driver has taken the order."""
        await self._put({f"{ORDER}{order_id or new_key()}": order.model_dump_json()})

    async def grant_order(self, order_id: str, rounds: Mapping[AttemptKey, int]) -> None:
        """Record the new rounds of an order, then remove the order. Idempotent."""
        await self.set_rounds(rounds)
        await self._store.call("HDEL", self._key, f"{ORDER}{order_id}")

    async def set_rounds(self, rounds: Mapping[AttemptKey, int]) -> None:
        """Record the rounds of attempts that are repeated. Idempotent."""
        await self._put({f"{ROUND}{json.dumps(key)}": str(number) for key, number in rounds.items()})

    async def publish_status(self, status: Mapping[str, object]) -> None:
        """Publish the progress."""
        await self._put({"status": json.dumps(status)})

    async def _put(self, fields: Mapping[str, str]) -> None:
        if not fields:
            return
        flat = [part for item in fields.items() for part in item]
        commands = [("HSET", self._key, *flat), ("EXPIRE", self._key, KEPT_SECONDS)]
        await self._store.call_many(commands)


def _parse_desired(fields: Mapping[str, str]) -> DesiredState:
    known = {name: fields[name] for name in STATE_FIELDS if name in fields}
    while True:
        try:
            return DesiredState.model_validate(known)
        except ValidationError as error:
            for wrong in {str(one["loc"][0]) for one in error.errors()}:
                known.pop(wrong, None)


def _parse_requeue(text: str) -> Requeue | None:
    try:
        return Requeue.model_validate_json(text)
    except ValidationError:
        return None


def _parse_attempt(text: str) -> AttemptKey | None:
    try:
        model, instance, number = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return (str(model), str(instance), number) if isinstance(number, int) else None


def _parse_status(text: str) -> Mapping[str, object]:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
