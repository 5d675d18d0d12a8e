"""What a conversation's policies say: when a person is asked before an action runs, and what is done about a loop.

Holds: what is not known counts as dangerous unless the policy says otherwise. Every policy for loops ends: each loop
since the last message of a person takes the next response, and after the last one comes `fail`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

STUCK_CODE = "stuck_in_loop"
"""The code of the error in which a loop ends a conversation."""


class LoopResponse(StrEnum):
    """What is done about an agent that repeats itself."""

    NUDGE = "nudge"
    """Tell the model that it repeats itself."""
    SWITCH_MODEL = "switch_model"
    """Tell the model, and continue with the policy's fallback model."""
    RESTART = "restart"
    """Hide the loop from the model, and continue from before it."""
    PARK = "park"
    """Pause until a person chooses how to continue."""
    FAIL = "fail"
    """End in an error."""


class LoopPolicy(BaseModel):
    """Thresholds (OpenHands section 2; names and numbers of its SDK) and responses.

    Attributes:
        responses: the first for the first loop since a person's last message, and so on; after the last of them,
        `fail`.
        fallback_model: the model that `switch_model` continues with.
        action_observation: so many equal actions with equal observations are a loop.
        action_error: so many equal actions, each followed by an error.
        monologue: so many equal messages of the agent with nothing observed in between.
        alternating_pattern: so many actions and observations of which each equals the next but one.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    responses: tuple[LoopResponse, ...] = (LoopResponse.FAIL,)
    fallback_model: str | None = None
    action_observation: int = Field(default=4, ge=2, le=20)
    action_error: int = Field(default=3, ge=2, le=20)
    monologue: int = Field(default=3, ge=2, le=20)
    alternating_pattern: int = Field(default=6, ge=3, le=20)

    @model_validator(mode="after")
    def _check_fallback(self) -> LoopPolicy:
        if LoopResponse.SWITCH_MODEL in self.responses and not self.fallback_model:
            raise ValueError("Name the fallback model that switch_model continues with.")
        return self

    @property
    def window(self) -> int:
        """How many of the latest actions and observations a detector must know."""
        return max(self.action_observation, self.action_error, self.monologue, self.alternating_pattern)


class ConfirmationPolicy(BaseModel):
    """Who is asked for what.

    Attributes:
        mode: `never`; `always`; `risky`: for what is at least as dangerous as the threshold.
        threshold: for `risky`.
        confirm_unknown: for `risky`: whether an action of unknown risk is asked for too.
        analyzer: `llm`: the risk is what the model says; `shell`: what parsing the action says; `ensemble`: the
            higher of the two; `none`: unknown.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    mode: Literal["never", "always", "risky"] = "never"
    threshold: Literal["LOW", "MEDIUM", "HIGH"] = "HIGH"
    confirm_unknown: bool = True
    analyzer: Literal["none", "llm", "shell", "ensemble"] = "ensemble"
