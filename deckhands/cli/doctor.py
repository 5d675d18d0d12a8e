"""`deckhands doctor`: what this machine can do, and whether the store serves."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import click

from deckhands.cli.options import json_option
from deckhands.cli.output import print_json
from deckhands.cluster.examining import DEAD_LETTERS, Finding, examine_machine, examine_store
from deckhands.reading.terminal import print_text
from deckhands.settings import FaceSettings

UNFIT = 1


@click.command()
@json_option
def doctor(*, as_json: bool) -> None:
    """Print what this machine can do for workspaces, and whether the store of DECKHANDS_URL serves.

    Ends with 1 if something is missing without which nothing is served.
    """
    settings = FaceSettings.from_env()
    findings = [*examine_machine(settings.environment), *_of_store(settings)]
    if as_json:
        for finding in findings:
            print_json(asdict(finding))
    else:
        rows = [(_verdict(finding), finding.name, finding.detail) for finding in findings]
        width = max(len(name) for _, name, _ in rows)
        for verdict, name, detail in rows:
            print_text(f"{verdict:<8}{name:<{width}}  {detail}")
    if any(finding.is_needed and not finding.is_good for finding in findings):
        click.get_current_context().exit(UNFIT)


def _verdict(finding: Finding) -> str:
    if finding.is_good:
        return "ok"
    if finding.name == DEAD_LETTERS:
        return "found"
    return "missing" if finding.is_needed else "weaker"


def _of_store(settings: FaceSettings) -> list[Finding]:
    if settings.url is None:
        return []
    return asyncio.run(examine_store(settings.url))
