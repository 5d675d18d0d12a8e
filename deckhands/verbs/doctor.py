"""`deckhands doctor`: what this machine can do, and whether the store is reachable."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

import click

from deckhands.cli.options import json_option
from deckhands.cli.output import print_json
from deckhands.cli.verbs import options_as
from deckhands.cluster.diagnostics import (
    DEAD_LETTERS,
    FAILING,
    RETENTION,
    Finding,
    examine_machine,
    examine_retention,
    examine_store,
)
from deckhands.home import Home
from deckhands.reading.terminal import print_text
from deckhands.settings import FaceSettings

SECTION = "Operate a cluster"
VERBS = {"doctor": "Check what this machine can do, and whether the store is reachable."}

UNFIT = 1


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of `doctor`."""

    as_json: bool


@click.command()
@json_option
@options_as(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check what this machine can do for workspaces, and whether the store is reachable.

    The store is the one at DECKHANDS_URL, or that of the cluster running here. What its tool workers report that they
    cannot do, such as tools that they cannot load, is listed too; so are the archive and the retention rules that this
    environment names.

    Exits with 1 if something is missing that every action needs.
    """
    settings = FaceSettings.from_env()
    findings = [
        *examine_machine(settings.environment),
        *_of_store(settings),
        *examine_retention(settings.environment),
    ]
    if options.as_json:
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
    if finding.name in (DEAD_LETTERS, FAILING, RETENTION) and not finding.is_needed:
        return "found"
    return "missing" if finding.is_needed else "weaker"


def _of_store(settings: FaceSettings) -> list[Finding]:
    url = settings.url or Home(settings.home).cluster_url
    return [] if url is None else asyncio.run(examine_store(url))
