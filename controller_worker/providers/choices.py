"""Structured settings of a model: fallbacks, routers and batches."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from controller_worker.providers.errors import MODEL_ERRORS

REPEATED_ELSEWHERE = frozenset({"context_window", "content_policy", "bad_request"})
"""Errors that another model or key is likely to repeat. A fallback applies to them only if it lists them."""
PRIMARY = "primary"
"""A router's name for its own profile's model."""


class Fallback(BaseModel):
    """An alternative to call when a call fails.

    Attributes:
        use: a profile, or a model at the address and with the key of the base settings.
        on: error codes (see `errors`) that it applies to; empty for all errors that another model might avoid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    use: str = Field(min_length=1)
    on: frozenset[str] = frozenset()

    @field_validator("on")
    @classmethod
    def _check_codes(cls, codes: frozenset[str]) -> frozenset[str]:
        for code in sorted(codes - set(MODEL_ERRORS)):
            raise ValueError(f"{code!r} is not an error code; use one of {', '.join(MODEL_ERRORS)}")
        return codes

    def is_for(self, code: str) -> bool:
        """Return whether this fallback applies to an error code."""
        return code in self.on if self.on else code not in REPEATED_ELSEWHERE


class RouteRule(BaseModel):
    """A router's rule for choosing a model. All conditions that are set must hold.

    Attributes:
        use: a profile.
        images: whether the prompt contains an image.
        min_tokens: the prompt's estimated length is at least this.
        service: the purpose of the call: `agent`, `condenser` or `critic`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    use: str = Field(min_length=1)
    images: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    service: Literal["agent", "condenser", "critic"] | None = None


class RouterSpec(BaseModel):
    """How a profile chooses another profile for each call. Its own model is the `primary`.

    Attributes:
        kind: `multimodal`, `rules`, `random` or `class`; see `router`.
        secondary: for `multimodal`: the profile for prompts that fit it and contain no images.
        rules: for `rules`: the first matching rule is used, or the primary if none matches.
        weights: for `random`: profiles, or `primary`, with their weights.
        path: for `class`: `module:Class`.
        choices: for `class`: the profiles that it may choose from.
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
            raise ValueError("weights must be positive numbers")
        return self

    @property
    def profiles(self) -> frozenset[str]:
        """The profiles that may be chosen, besides the primary."""
        named = {*(rule.use for rule in self.rules), *self.weights, *self.choices, *filter(None, [self.secondary])}
        return frozenset(named - {PRIMARY})


class BatchSpec(BaseModel):
    """How calls are collected for the provider's batch API.

    Attributes:
        gather_seconds: the longest time that the first call of a batch waits for others.
        max_calls: a batch with this many calls is sent at once.
        max_bytes: a batch of this size is sent at once.
        poll_seconds: the interval between checks whether a batch has ended.
        lost_after_seconds: if a batch's sender died and the provider does not list the batch after this time, it counts
            as never sent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gather_seconds: float = Field(default=60.0, ge=0)
    max_calls: int = Field(default=500, ge=1, le=10_000)
    max_bytes: int = Field(default=50_000_000, ge=1, le=150_000_000)
    poll_seconds: float = Field(default=30.0, gt=0)
    lost_after_seconds: float = Field(default=120.0, gt=0)
