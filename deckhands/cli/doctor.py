"""`deckhands doctor`: what this machine can do, and whether the store serves."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import click

from broker.health import HEALTHY, STORE_ROLE, check
from deckhands.cli.options import json_option
from deckhands.cli.output import print_json
from deckhands.settings import FaceSettings

LIMIT_SECONDS = 60.0
UNFIT = 1


@click.command()
@json_option
def doctor(*, as_json: bool) -> None:
    """Print what this machine can do for workspaces, and whether the store of DECKHANDS_URL serves.

    Ends with 1 if something is missing without which nothing is served.
    """
    settings = FaceSettings.from_env()
    findings = [*_of_machine(settings), *_of_store(settings)]
    if as_json:
        for finding in findings:
            print_json(finding)
    else:
        rows = [(_verdict(finding), str(finding["name"]), str(finding["detail"])) for finding in findings]
        width = max(len(name) for _, name, _ in rows)
        for verdict, name, detail in rows:
            click.echo(f"{verdict:<8}{name:<{width}}  {detail}")
    if any(finding["is_needed"] and not finding["is_good"] for finding in findings):
        click.get_current_context().exit(UNFIT)


def _verdict(finding: dict[str, object]) -> str:
    if finding["is_good"]:
        return "ok"
    return "missing" if finding["is_needed"] else "weaker"


def _of_machine(settings: FaceSettings) -> list[dict[str, object]]:
    """Ask the package that would serve here, in a process of its own as always."""
    command = [sys.executable, "-P", "-m", "tool_worker.examination"]
    try:
        ended = subprocess.run(  # noqa: S603  (our own interpreter and our own program)
            command, capture_output=True, check=True, timeout=LIMIT_SECONDS, env=dict(settings.environment)
        )
        found: list[dict[str, object]] = json.loads(ended.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return [_finding("tool worker", is_good=False, detail=f"cannot be examined: {error}")]
    return found


def _of_store(settings: FaceSettings) -> list[dict[str, object]]:
    if settings.url is None:
        return []
    verdict = asyncio.run(check(STORE_ROLE, settings.url))
    return [_finding("store", is_good=verdict.exit_status == HEALTHY, detail=verdict.reason)]


def _finding(name: str, *, is_good: bool, detail: str) -> dict[str, object]:
    return {"name": name, "is_good": is_good, "is_needed": True, "detail": detail}
