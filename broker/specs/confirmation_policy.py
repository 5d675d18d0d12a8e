"""When a person is asked before an action runs, and who says how dangerous it is.

Holds: what is not known counts as dangerous unless the policy says otherwise.
"""

from __future__ import annotations

import json
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from broker.specs.plain_json import JsonObject

BUILT_IN_MODES = ("never", "always", "risky")
BUILT_IN_ANALYZERS = ("none", "llm", "shell", "ensemble")
POLICIES, ANALYZERS = "deckhands.confirmation_policies", "deckhands.risk_analyzers"
"""The groups of entry points that bring others."""
PLUGIN_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
MAX_SETTINGS_CHARS = 10_000


class ConfirmationPolicy(BaseModel):
    """Who is asked for what.

    Attributes:
        mode: `never`; `always`; `risky`: for what is at least as dangerous as the threshold; or the name of a plug-in.
        threshold: for `risky`.
        confirm_unknown: for `risky`: whether an action of unknown risk is asked for too.
        analyzer: `llm`: the risk is what the model says; `shell`: what parsing the action says; `ensemble`: the
            higher of the two; `none`: unknown; or the name of a plug-in.
        settings: for plug-ins; no secrets.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    mode: str = Field(default="never", pattern=PLUGIN_NAME)
    threshold: Literal["LOW", "MEDIUM", "HIGH"] = "HIGH"
    confirm_unknown: bool = True
    analyzer: str = Field(default="ensemble", pattern=PLUGIN_NAME)
    settings: JsonObject | None = None

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.settings is not None and len(json.dumps(self.settings)) > MAX_SETTINGS_CHARS:
            raise ValueError(f"the settings of a policy may have {MAX_SETTINGS_CHARS} characters")
        return self

    @property
    def plugins(self) -> tuple[tuple[str, str], ...]:
        """What is needed besides what is built in: the group of entry points, and the name in it."""
        wanted = ((POLICIES, self.mode, BUILT_IN_MODES), (ANALYZERS, self.analyzer, BUILT_IN_ANALYZERS))
        return tuple((group, name) for group, name, built_in in wanted if name not in built_in)
