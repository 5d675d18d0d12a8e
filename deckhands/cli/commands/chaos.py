"""`deckhands chaos`: cause faults in a running cluster, and check their effects."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import click

from broker.runtime import UsageError
from deckhands.chaos import FAULTS, Chaos, ChaosReport, ChaosSpec, UndoJournal
from deckhands.cli.command_group import with_options
from deckhands.cli.options import Duration, json_option
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.client import Client, ExitCode, note, open_cluster, print_json, print_text, store_url
from deckhands.cluster import Home, supervise
from deckhands.settings import CliSettings

SECTION = "Operate a cluster"
SUMMARIES = {"chaos": "Cause faults in your own cluster under a known workload, then verify every log."}

PATIENCE_SECONDS = 180.0
"""How long each call waits for a store that a fault has stopped."""
MAX_LINES = 20


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Options of `chaos`."""

    faults: str
    every: float
    duration: float
    settle: float
    conversations: int
    pairs: int
    seed: int
    report: str | None
    others: bool
    shares_pids: bool
    store_restarts: bool
    undo: bool
    is_list: bool
    as_json: bool


@click.command()
@click.option("--faults", default=",".join(FAULTS), help="Which faults, separated by commas; by default all.")
@click.option(
    "--every", metavar="TIME", type=Duration(least_seconds=0.2, most_seconds=3_600), default="5s", show_default=True,
    help="The mean time between two faults.",
)  # fmt: skip
@click.option(
    "--duration", metavar="TIME", type=Duration(least_seconds=1, most_seconds=86_400), default="60s", show_default=True,
    help="For how long faults are caused.",
)  # fmt: skip
@click.option(
    "--settle", metavar="TIME", type=Duration(least_seconds=1, most_seconds=86_400), default="5m", show_default=True,
    help="How long the conversations may take to settle afterwards.",
)  # fmt: skip
@click.option(
    "--conversations",
    type=click.IntRange(1, 1_000),
    default=8,
    show_default=True,
    help="Number of conversations in progress at the same time.",
)
@click.option(
    "--workers", "pairs", type=click.IntRange(0, 16), default=1, show_default=True,
    help="Add this many controller and tool workers, whose links to the store become slow or silent.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Determines the schedule.")
@click.option(
    "--report", metavar="DIR", type=click.Path(file_okay=False), help="Write report.json and report.md there."
)
@click.option("--others", is_flag=True, help="Also disturb a cluster with other conversations in progress.")
@click.option(
    "--shared-pids", "shares_pids", is_flag=True, help="The workers' containers share the process ids of this one."
)
@click.option(
    "--store-restarts", is_flag=True,
    help="A supervisor starts the store at DECKHANDS_URL again when it ends, so it may be ended.",
)  # fmt: skip
@click.option(
    "--undo", is_flag=True, help="Only undo the changes that an earlier run has left, such as a stopped worker."
)
@click.option("--list", "is_list", is_flag=True, help="List the faults, and exit.")
@json_option
@with_options(ChaosOptions)
def chaos(options: ChaosOptions) -> int:
    """Cause faults in the cluster at DECKHANDS_URL, or the one that runs here, and check every log they touched.

    Conversations without a model run commands whose effects are counted, while workers are killed, stopped and cut off
    and the store fails. Then every log is checked against the specification of a log. Exits with 0 if everything holds,
    1 if not, 2 if the cluster is refused, and 130 if it was interrupted but everything holds.
    """
    if options.is_list:
        width = max(map(len, FAULTS))
        print_text("\n".join(f"{name:<{width}}  {text}" for name, text in FAULTS.items()))
        return 0
    settings = CliSettings.from_env()
    home = Home(settings.home)
    directory = home.path / "chaos"
    home.prepare(directory)
    with supervise(directory, "Chaos"):
        if options.undo:
            asyncio.run(_undo(settings, directory))
            return 0
        try:
            report, was_interrupted = asyncio.run(_run(settings, home, directory, options))
        except asyncio.CancelledError:  # by a second signal
            return int(ExitCode.INTERRUPTED)
    if options.report is not None:
        report.write(Path(options.report))
    if options.as_json:
        print_json(report.as_json())
    else:
        print_text("\n".join(_render(report)))
    if not report.holds:
        return 1
    return int(ExitCode.INTERRUPTED) if was_interrupted else 0


async def _run(settings: CliSettings, home: Home, directory: Path, options: ChaosOptions) -> tuple[ChaosReport, bool]:
    url = store_url(settings)
    is_own = url == home.cluster_url
    spec = ChaosSpec(
        directory,
        url,
        faults=tuple(name.strip() for name in options.faults.split(",") if name.strip()),
        every_seconds=options.every,
        duration_seconds=options.duration,
        settle_seconds=options.settle,
        conversations=options.conversations,
        own_pairs=options.pairs,
        seed=options.seed,
        allows_others=options.others,
        shares_pids=options.shares_pids,
        store_restarts=options.store_restarts,
        store_directory=home.cluster / "valkey" if is_own else None,
        environment=settings.environment,
    )
    stop = asyncio.Event()
    this = asyncio.current_task()
    assert this is not None
    on_stop_signals(lambda: this.cancel() if stop.is_set() else stop.set())
    store = await open_cluster(settings=settings, patience_seconds=PATIENCE_SECONDS)
    async with Client(store) as client:
        return await Chaos(client, spec, on_notice=note).run(stop), stop.is_set()


async def _undo(settings: CliSettings, directory: Path) -> None:
    journal = UndoJournal(directory / "open-faults.jsonl")
    needs_store = any(fault.kind == "memory" for fault in journal.load())
    store = await open_cluster(settings=settings) if needs_store else None
    try:
        lines = await journal.undo_all(store)
    finally:
        if store is not None:
            await store.aclose()
    for line in lines:
        print_text(line)
    if left := journal.load():
        raise UsageError(
            f"{len(left)} faults belong to another store.", remedy="Name that store by DECKHANDS_URL, and repeat this."
        )


def _render(report: ChaosReport) -> list[str]:
    facts = report.list_facts()
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {text}" for name, text in facts.items()]
    lines += [f"! {text}" for text in report.findings[:MAX_LINES]]
    lines += [f"! {text}" for text in report.gaps]
    lines += [f"! {cid} has not come to rest" for cid in report.unsettled[:MAX_LINES]]
    lines += [f"not tried: {kind}: {why}" for kind, why in report.not_tried.items()]
    lines += [f"out of reach: {worker}: {why}" for worker, why in list(report.unreachable.items())[:MAX_LINES]]
    lines.append("Everything holds." if report.holds else "Some checks failed, see above.")
    return lines
