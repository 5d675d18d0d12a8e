"""What this machine can do for workspaces, asked of the package that would serve them, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from broker.settings import BrokerSettings

LIMIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: its name, whether it is as it should be, whether it has to be, and one line."""

    name: str
    is_good: bool
    is_needed: bool
    detail: str


def examine_machine(environment: Mapping[str, str]) -> list[Finding]:
    """Look at this machine as a tool worker with this environment would; takes about a second.  Blocks."""
    command = [sys.executable, "-P", "-m", "tool_worker.examination"]
    try:
        ended = subprocess.run(  # noqa: S603  (our own interpreter and our own program)
            command, capture_output=True, check=True, timeout=LIMIT_SECONDS, env=dict(environment)
        )
        return [Finding(**found) for found in json.loads(ended.stdout)]
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return [Finding("tool worker", is_good=False, is_needed=True, detail=f"cannot be examined: {error}")]


def reason_unconfined(environment: Mapping[str, str]) -> str | None:
    """Return why no sandbox that is asked for works here; None: one does, or `none` is asked for.  Blocks."""
    demanded = BrokerSettings.from_env(environment).sandbox
    if demanded == "none":
        return None
    names = ("sandbox bwrap", "sandbox docker") if demanded == "auto" else (f"sandbox {demanded}",)
    tried = [finding for finding in examine_machine(environment) if finding.name in (*names, "tool worker")]
    if any(finding.is_good for finding in tried):
        return None
    return "; ".join(finding.detail for finding in tried)
