"""`RolloutSpec`: the specification of a rollout run, shared by every way to start one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from broker.contract import NAME_PATTERN
from broker.runtime import UsageError
from deckhands.client import ADDRESSES, DATA
from deckhands.evaluation import (
    CHECK,
    MAX_AT_ONCE,
    OwnRow,
    load_scorers,
    resolve_model,
    to_absolute_name,
    to_absolute_scorer,
)

MAX_GROUP = 256
MAX_ROWS_BYTES = 256 << 20
MAX_ROWS = 100_000
MAX_SERVED_TRAJECTORIES = 1_000_000
"""Of a run over HTTP. Its driver keeps all of them in memory, beside the runs of others."""
SHOWN_ERRORS = 5
CRITIC = "critic"
Part = Annotated[float, Field(allow_inf_nan=False)]


class RolloutSpec(BaseModel):
    """A rollout run: prompts, groups of trajectories, rewards, and limits of age and time.

    Attributes:
        prompts: a dataset as for `deckhands eval run`, or its rows.
        model: the policy, as the cluster's models are named.
        group_size: the trajectories of a group, all of one prompt.
        extra: further trajectories of each group; the first `group_size` to end make up the group, the others are
            cancelled.
        epochs: how often each prompt is used.
        delegation: whether the agent gets a tool that delegates tasks to other agents. Their trajectories are a part of
            the episode.
        max_staleness: how many versions the policy may be ahead of the oldest token of a group when the trainer gets
            it; None for any number.
        trajectory_seconds: the working time after which a trajectory is ended; None for no limit.
        group_seconds: the time after which a group is delivered with the trajectories that have ended; None for no
            limit.
        smallest_group: with fewer trajectories, the prompt is retried, up to `retries` times.
        partial: whether a trajectory that reached a limit counts (`keep`) or not (`drop`).
        window: a group is started and delivered only if it is less than this number of groups ahead of the oldest
            undelivered one.
        waiting: no further group starts while this many have started and are not acknowledged.
        at_once: the most trajectories in flight.
        scorers: functions that give rewards, as `FILE.py@FUNCTION` or `package.module@function`.
        critic: the model that gives a reward from 0 to 1; empty for none.
        weights: the weights of the parts of the reward: `check`, the names of the functions, `critic`. The default is
            1.
        engines: addresses of the engines for `pause` and `resume`; empty for none.
        on_pause: the effect of a pause on replies in flight: `drain` lets them end, `keep` freezes them, `abort` ends
            them, to be continued under the next policy.
        retries: how often a trajectory is repeated after a failure of the infrastructure, and a group that is too old
            or too small.
        only, part, shuffle, seed: which prompts, as for `deckhands eval run`.
        network: whether the commands of agents reach the network.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: str | Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=MAX_ROWS)]
    model: str = Field(min_length=1, max_length=300)
    group_size: int = Field(default=8, ge=1, le=MAX_GROUP)
    extra: int = Field(default=0, ge=0, le=MAX_GROUP)
    epochs: int = Field(default=1, ge=1, le=10_000)
    agent: str = Field(default="CodeActAgent", min_length=1, max_length=100)
    delegation: bool = False
    max_iterations: int = Field(default=100, ge=1)
    max_staleness: int | None = Field(default=None, ge=0)
    trajectory_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    group_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    smallest_group: int = Field(default=2, ge=1, le=MAX_GROUP)
    partial: Literal["keep", "drop"] = "keep"
    window: int = Field(default=16, ge=1, le=10_000)
    waiting: int = Field(default=32, ge=1, le=10_000)
    at_once: int = Field(default=64, ge=1, le=MAX_AT_ONCE)
    retries: int = Field(default=3, ge=0, le=100)
    scorers: tuple[str, ...] = ()
    critic: str = ""
    weights: dict[str, Part] = Field(default_factory=dict)
    engines: tuple[str, ...] = ()
    on_pause: Literal["drain", "keep", "abort"] = "drain"
    only: str = ""
    part: str = ""
    shuffle: bool = False
    seed: int = 0
    network: bool = True
    tenant: str = Field(default="", pattern=NAME_PATTERN)

    @field_validator("engines")
    @classmethod
    def _are_addresses(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        for one in engines:
            address = urlsplit(one)
            if address.scheme not in ("http", "https") or not address.hostname:
                raise ValueError(f"{one[:100]!r} is not an address; write http://HOST:PORT")
        return engines

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.smallest_group > self.group_size:
            object.__setattr__(self, "smallest_group", self.group_size)
        return self

    @property
    def attempts(self) -> int:
        """The trajectories that are started for a group."""
        return self.group_size + self.extra

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Parse a specification.

        Raises:
            UsageError: it is no specification; the text names each invalid field.
        """
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False, include_context=False)[:SHOWN_ERRORS]
            shown = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the whole'}: {one['msg']}" for one in errors)
            raise UsageError(
                f"The rollout run cannot be started: {shown}.", remedy="See docs/rollouts.md for its fields."
            ) from None

    def resolve(self) -> Self:
        """Return it with names that are independent of the working directory, and check the functions.

        Raises:
            UsageError: a name cannot be used.
        """
        found: dict[str, Any] = {
            "model": resolve_model(self.model),
            "scorers": tuple(map(to_absolute_scorer, self.scorers)),
            "critic": resolve_model(self.critic) if self.critic else "",
        }
        if isinstance(self.prompts, str):
            found["prompts"] = to_absolute_name(self.prompts)
        self._check_weights(found["scorers"])
        return self.model_copy(update=found)

    def require_served(self) -> None:
        """Check that the driver's machine can run this specification of a remote client.

        It must not name files, code or addresses of engines, and its size is limited.

        Raises:
            UsageError: it names one of these, or is too large.
        """
        if isinstance(self.prompts, str):
            raise UsageError(
                "prompts: a run over HTTP takes rows.", remedy="Send the rows of the dataset in place of its name."
            )
        for name in ("scorers", "engines"):
            if getattr(self, name):
                raise UsageError(
                    f"{name}: a run over HTTP has none.", remedy="Start the run with `deckhands rollouts run`."
                )
        if len(self.prompts) * self.epochs * self.attempts > MAX_SERVED_TRAJECTORIES:
            raise UsageError(
                f"The run would have more than {MAX_SERVED_TRAJECTORIES:,} trajectories.",
                remedy="Start several runs, with fewer prompts or epochs each.",
            )
        for number, row in enumerate(self.prompts, 1):
            try:
                found = OwnRow.model_validate(row)
            except ValidationError as error:
                about = error.errors(include_url=False, include_input=False, include_context=False)[0]
                place = ".".join(map(str, about["loc"])) or "the whole"
                raise UsageError(f"prompts: row {number}: {place}: {about['msg']}.") from None
            if isinstance(found.workspace, str) or isinstance(found.hidden, str):
                raise UsageError(
                    f"prompts: row {number} names a directory.", remedy="Send its files, as texts by their paths."
                )
            if any(not one.startswith((*ADDRESSES, DATA)) for one in found.images):
                raise UsageError(f"prompts: row {number} names a file as an image.", remedy="Send a data URL.")
        self._check_weights(())

    def _check_weights(self, scorers: tuple[str, ...]) -> None:
        functions = [one.name for one in load_scorers(scorers)]
        names = {*functions, CHECK, CRITIC}
        if len(names) < len(functions) + 2:
            raise UsageError(
                f"The names of the scorers are not distinct: {', '.join(functions)}.",
                remedy=f"Rename a function; {CHECK} and {CRITIC} are the names of other parts of the reward.",
            )
        if unknown := sorted(self.weights.keys() - names):
            raise UsageError(f"There is no part {unknown[0]!r} of the reward.", remedy=f"It has {', '.join(names)}.")


def read_rows(spec: RolloutSpec) -> RolloutSpec:
    """Return a specification whose prompts are rows instead of the name of a file of our own format.

    Raises:
        UsageError: it names another dataset, or the file cannot be read.
    """
    if not isinstance(spec.prompts, str):
        return spec
    path = Path(spec.prompts)
    if path.suffix != ".jsonl":
        raise UsageError(
            f"prompts: a server takes rows, and {spec.prompts[:200]!r} is no file of them.",
            remedy="Name a .jsonl file of our own format, see docs/evaluation.md.",
        )
    try:
        if path.stat().st_size > MAX_ROWS_BYTES:
            raise UsageError(f"prompts: {path} has more than {MAX_ROWS_BYTES >> 20} MiB.", remedy="Split it.")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"prompts: {path} cannot be read: {error.strerror}.", remedy="Name another file.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"prompts: {path} is not JSON lines: {error}.", remedy="Write an object in each line."
        ) from None
    return RolloutSpec.parse({**spec.model_dump(exclude_unset=True), "prompts": rows})
