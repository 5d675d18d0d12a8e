"""`deckhands doctor`: check this machine, its access to the store, and the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

import click

from deckhands.cli.command_group import with_options
from deckhands.cli.options import json_option
from deckhands.client import print_json, print_text
from deckhands.cluster import Home
from deckhands.operations import (
    DEAD_LETTERS,
    FAILING,
    RETENTION,
    Finding,
    examine_cluster,
    examine_machine,
    examine_packages,
    examine_retention,
    examine_store,
)
from deckhands.settings import CliSettings

SECTION = "Operate a cluster"
SUMMARIES = {"doctor": "Check this machine, the store, and the cluster that runs on it."}

UNFIT = 1
SAMPLE = 100


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of `doctor`."""

    as_json: bool
    logs: int
    all_logs: bool
    strict: bool


@click.command()
@json_option
@click.option(
    "--logs",
    type=click.IntRange(0),
    default=SAMPLE,
    show_default=True,
    help="How many logs of the cluster to check, spread over all conversations.",
)
@click.option("--all-logs", is_flag=True, help="Check every log.")
@click.option("--strict", is_flag=True, help="Exit with 1 for any finding, not only for failures.")
@with_options(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check this machine's support for workspaces, its access to the store, and the cluster that runs on it.

    The store is the one at DECKHANDS_URL, or that of the cluster running here. The report includes problems that tool
    workers have found, such as tools that cannot be loaded, and the archive and the retention rules of this
    environment.

    For a cluster, it checks the store's settings, rights and functions, the versions, clocks and lag of workers, the
    queues, the invariants of the logs, and leftovers. It only reads, with the rights of the store user, and names the
    parts that this user may not read.

    Exits with 1 if something is missing that every action needs, or if an invariant is broken.
    """
    settings = CliSettings.from_env()
    url = settings.url or Home(settings.home).cluster_url
    findings = [
        *examine_packages(),
        *examine_machine(settings.environment),
        *(asyncio.run(_examine(url, None if options.all_logs else options.logs)) if url is not None else ()),
        *examine_retention(settings.environment),
    ]
    if options.as_json:
        for finding in findings:
            print_json(asdict(finding))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            remedy = f". {finding.remedy}" if finding.remedy and not finding.is_good else ""
            print_text(f"{_verdict(finding):<8}{finding.name:<{width}}  {finding.detail}{remedy}")
    if any((finding.is_needed or options.strict) and not finding.is_good for finding in findings):
        click.get_current_context().exit(UNFIT)


def _verdict(finding: Finding) -> str:
    if finding.is_good:
        return "ok"
    if finding.remedy:  # the figures of a cluster
        return "broken" if finding.is_needed else "found"
    if finding.name in (DEAD_LETTERS, FAILING, RETENTION) and not finding.is_needed:
        return "found"
    return "missing" if finding.is_needed else "weaker"


async def _examine(url: str, sample: int | None) -> list[Finding]:
    of_store = await examine_store(url)
    of_cluster = await examine_cluster(url, sample=sample) if of_store[0].is_good else []
    return [of_store[0], *of_cluster, *of_store[1:]]
