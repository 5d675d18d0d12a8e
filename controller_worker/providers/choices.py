"""What a model's settings hold besides values: who is asked instead, who chooses, and what goes into a batch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from controller_worker.providers.errors import MODEL_ERRORS

SAME_ELSEWHERE = frozenset({"context_window", "content_policy", "bad_request"})
"""Errors that another model or key is likely to give too: a fallback is for them only where it says so."""
PRIMARY = "primary"
"""What a router calls its own profile's model."""


class Fallback(BaseModel):
    """What to ask when a call fails.

    Attributes:
        use: a profile, or a model at the address and with the key of the base settings.
        on: codes of errors (see `errors`) that it is for; empty for all that another model may not have.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    use: str = Field(min_length=1)
    on: frozenset[str] = frozenset()

    @field_validator("on")
    @classmethod
    def _known(cls, codes: frozenset[str]) -> frozenset[str]:
        for code in sorted(codes - set(MODEL_ERRORS)):
            raise ValueError(f"{code!r} is not an error code; there are {', '.join(MODEL_ERRORS)}")
        return codes

    def is_for(self, code: str) -> bool:
        """Say whether it may help against an error."""
        return code in self.on if self.on else code not in SAME_ELSEWHERE


class RouteRule(BaseModel):
    """When a router takes a model: all conditions that are set must hold.

    Attributes:
        use: a profile.
        images: whether there is an image in the prompt.
        min_tokens: the prompt has at least about this many.
        service: what the reply is for: `agent`, `condenser` or `critic`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    use: str = Field(min_length=1)
    images: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    service: Literal["agent", "condenser", "critic"] | None = None


class RouterSpec(BaseModel):
    """How a profile chooses among others for each call; its own model is the `primary`.

    Attributes:
        kind: `multimodal`, `rules`, `random` or `class`; see `router`.
        secondary: of `multimodal`: the profile for prompts without images that fit it.
        rules: of `rules`: the first that holds is taken, the primary if none does.
        weights: of `random`: profiles, or `primary`, with their shares.
        path: of `class`: `module:Class`.
        choices: of `class`: the profiles that it may name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["multimodal", "rules", "random", "class"]
    secondary: str | None = None
    rules: tuple[RouteRule, ...] = ()
    weights: dict[str, float] = Field(default_factory=dict)
    path: str | None = None
    choices: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        needed = {"multimodal": "secondary", "rules": "rules", "random": "weights", "class": "path"}[self.kind]
        if not getattr(self, needed):
            raise ValueError(f"a router of the kind {self.kind!r} needs {needed!r}")
        if any(weight < 0 for weight in self.weights.values()) or (self.weights and not sum(self.weights.values())):
            raise ValueError("weights are positive numbers")
        return self

    @property
    def profiles(self) -> frozenset[str]:
        """The profiles that may be chosen, besides the primary."""
        named = {*(rule.use for rule in self.rules), *self.weights, *self.choices, *filter(None, [self.secondary])}
        return frozenset(named - {PRIMARY})


class BatchSpec(BaseModel):
    """How calls are gathered for the provider's batch API.

    Attributes:
        gather_seconds: how long the first call of a batch waits for others at most.
        max_calls: a batch with this many is sent at once.
        max_bytes: and one that has this size.
        poll_seconds: how often is looked whether a batch has ended.
        lost_after_seconds: a batch whose sender died, and that the provider does not show after so long, was not sent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gather_seconds: float = Field(default=60.0, ge=0)
    max_calls: int = Field(default=500, ge=1, le=10_000)
    max_bytes: int = Field(default=50_000_000, ge=1, le=150_000_000)
    poll_seconds: float = Field(default=30.0, gt=0)
    lost_after_seconds: float = Field(default=120.0, gt=0)
