"""When a person is asked before an action runs, and who says how dangerous it is.

Holds: what is not known counts as dangerous unless the policy says otherwise.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


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
