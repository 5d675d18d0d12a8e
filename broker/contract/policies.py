"""A conversation's policies: when a user must confirm an action, and the responses to loops.

Holds: an unknown risk counts as dangerous unless the policy says otherwise. Every loop policy terminates: each loop
since the user's last message takes the next response, and after the last response comes `fail`.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from broker.contract.plain_json import JsonObject

STUCK_CODE = "stuck_in_loop"
"""The error code of a conversation that a loop has ended."""
BUILT_IN_MODES = ("never", "always", "risky")
BUILT_IN_ANALYZERS = ("none", "llm", "shell", "ensemble")
POLICIES, ANALYZERS = "deckhands.confirmation_policies", "deckhands.risk_analyzers"
"""The entry-point groups of plug-ins."""
PLUGIN_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
MAX_SETTINGS_CHARS = 10_000
MAX_DEADLINE_SECONDS = 366 * 86_400.0


class LoopResponse(StrEnum):
    """A response to an agent that repeats itself."""

    NUDGE = "nudge"
    """Tell the model that it repeats itself."""
    SWITCH_MODEL = "switch_model"
    """Tell the model, and continue with the policy's fallback model."""
    RESTART = "restart"
    """Hide the loop from the model, and continue from before the loop."""
    PARK = "park"
    """Pause until a user chooses how to continue."""
    FAIL = "fail"
    """End in an error."""


class LoopPolicy(BaseModel):
    """Thresholds (OpenHands section 2; names and numbers of its SDK) and responses.

    Attributes:
        responses: one for each loop since the user's last message, in order; after the last of them, `fail`.
        fallback_model: the model that `switch_model` continues with.
        action_observation: a loop is this many equal actions with equal observations.
        action_error: a loop is this many equal actions, each followed by an error.
        monologue: a loop is this many equal messages of the agent without an observation in between.
        alternating_pattern: a loop is this many actions and observations, each equal to the next but one.
        no_diff_steps: a loop is at least this many steps without a change of the workspace's files; None: off.
        no_diff_cost_usd: a loop is at least this cost without such a change; None: off.
        same_failure: a loop is a command that fails this many times in a row with the same output, whatever is done in
            between; None: off.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    responses: tuple[LoopResponse, ...] = (LoopResponse.FAIL,)
    fallback_model: str | None = None
    action_observation: int = Field(default=4, ge=2, le=20)
    action_error: int = Field(default=3, ge=2, le=20)
    monologue: int = Field(default=3, ge=2, le=20)
    alternating_pattern: int = Field(default=6, ge=3, le=20)
    no_diff_steps: int | None = Field(default=None, ge=1, le=10_000)
    no_diff_cost_usd: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    same_failure: int | None = Field(default=None, ge=2, le=1_000)

    @model_validator(mode="after")
    def _check_fallback(self) -> LoopPolicy:
        if LoopResponse.SWITCH_MODEL in self.responses and not self.fallback_model:
            raise ValueError("The response switch_model requires a fallback_model.")
        return self

    @property
    def window(self) -> int:
        """The number of the latest actions and observations that a detector needs."""
        return max(self.action_observation, self.action_error, self.monologue, self.alternating_pattern)


class ConfirmationPolicy(BaseModel):
    """The actions that need a user's confirmation.

    Attributes:
        mode: `never`, `always`, `risky` (if the risk reaches the threshold), or the name of a plug-in.
        threshold: for `risky`: the lowest risk that needs a confirmation.
        confirm_unknown: for `risky`: whether an unknown risk, or a command that is not understood, needs a
            confirmation.
        analyzer: the source of the risk: `llm` (the model's estimate), `shell` (parsing the action), `ensemble` (the
            higher of the two), `none` (unknown), or the name of a plug-in.
        settings: for plug-ins; no secrets.
        deadline_seconds: how long a question waits for its answer; None: for ever.
        default: what happens then: `reject` (the agent reads why, and continues), `confirm` or `stop`; None: `reject`.
        reminder_seconds: when to record a reminder, which webhooks can send; None: never.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    mode: str = Field(default="never", pattern=PLUGIN_NAME)
    threshold: Literal["LOW", "MEDIUM", "HIGH"] = "HIGH"
    confirm_unknown: bool = True
    analyzer: str = Field(default="ensemble", pattern=PLUGIN_NAME)
    settings: JsonObject | None = None
    deadline_seconds: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_SECONDS, allow_inf_nan=False)
    default: Literal["reject", "confirm", "stop"] | None = None
    reminder_seconds: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_SECONDS, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.deadline_seconds is None and self.default is not None:
            raise ValueError(f"the default {self.default} needs a deadline: give deadline_seconds")
        if self.reminder_seconds is not None and self.reminder_seconds >= (self.deadline_seconds or math.inf):
            raise ValueError("the reminder must be before the deadline")
        return self

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.settings is not None and len(json.dumps(self.settings)) > MAX_SETTINGS_CHARS:
            raise ValueError(f"the settings of a policy have more than {MAX_SETTINGS_CHARS} characters")
        return self

    @property
    def plugins(self) -> tuple[tuple[str, str], ...]:
        """The required plug-ins: their entry-point groups and names."""
        wanted = ((POLICIES, self.mode, BUILT_IN_MODES), (ANALYZERS, self.analyzer, BUILT_IN_ANALYZERS))
        return tuple((group, name) for group, name, built_in in wanted if name not in built_in)
