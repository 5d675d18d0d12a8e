"""One headless run: the task on a private cluster, and the files it leaves in the workspace.

Holds: however the run ends, its logs and its trajectory are written, if it started. Success means the state `finished`
and a result that fulfils the contract.
Does not: use a cluster that DECKHANDS_URL names, because the workspace is a directory of this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from broker.contract import AgentSpec, Event, Limits, WorkspaceSpec
from broker.log import event_line
from broker.runtime import DeckhandsError
from deckhands.cli.stop_signals import on_stop_signals
from deckhands.client import (
    Ending,
    EventPrinter,
    ExitCode,
    Renderer,
    RunFolder,
    Task,
    TaskSpec,
    Watcher,
    note,
    outliving_reader,
    run_privately,
)
from deckhands.cluster import Home
from deckhands.interop import Contract, HeadlessExit, trajectory_of

AUTO_CONTINUE = (
    "Continue the task as you think best. If you have done it, use the tool finish. "
    "Never ask a person for help: nobody reads your questions."
)
"""The answer to an agent's question (the intent of OpenHands 12; own words)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The parameters of a run.

    Attributes:
        trajectory: where it is saved, relative to the workspace; None: nowhere.
        is_continued: whether `AUTO_CONTINUE` answers an agent's questions.
        environment: for the workers.
    """

    task: str
    contract: Contract
    agent: AgentSpec
    workspace: WorkspaceSpec
    limits: Limits
    seconds: float
    trajectory: str | None
    is_continued: bool
    home: Home
    environment: Mapping[str, str] = field(repr=False)


def run_headless(order: Order) -> int:
    """Run a task and return the exit code.

    Raises:
        PathDenied: a path of the contract is a link.
        DeckhandsError: the workspace cannot be written, or the store or the workers cannot be started or kept running.
    """
    contract = order.contract
    with contract.inside.locked(f"experiments/{contract.experiment}"):
        contract.prepare(order.task, iterations=order.limits.max_iterations, seconds=order.seconds)
        note(f"Experiment {contract.experiment} in {contract.root}")
        ending = asyncio.run(_run(order))
        code = _judged(contract, ending)
        with outliving_reader():
            EventPrinter(as_json=False).summary(ending.summary)
    return code


def _judged(contract: Contract, ending: Ending) -> int:
    """Return the exit code, and print the faults of the result."""
    fault = contract.fault()
    if not fault:
        note(f"Result: {contract.final}")
        return int(ending.exit_code)
    note(f"No result: {fault}")
    may_be_why = ending.exit_code in (ExitCode.FINISHED, ExitCode.ERROR)
    is_why = ending.exit_code is ExitCode.FINISHED or ending.summary.error_code == "goal_not_reached"
    return int(HeadlessExit.MISSING_ARTIFACT if may_be_why and is_why else ending.exit_code)


async def _run(order: Order) -> Ending:
    contract, inside = order.contract, order.contract.inside
    printer, renderer = EventPrinter(as_json=False), Renderer(is_coloured=False)
    started: list[str] = []
    watcher = Watcher(on_notice=note, reply=AUTO_CONTINUE if order.is_continued else None)
    on_stop_signals(partial(_interrupt, watcher))
    watcher.on_start = started.append
    task = Task(
        TaskSpec(
            task=contract.instructions(order.task),
            agent=order.agent,
            workspace=order.workspace,
            limits=order.limits,
            title=contract.experiment,
        ),
        time_limit_seconds=order.seconds,
    )
    with inside.create(f"{contract.logs}/run.log") as log:

        def show(event: Event) -> None:
            lines = renderer.lines(event)
            log.write("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
            log.flush()
            with outliving_reader(watcher.interrupted.set):
                printer.event(event)

        watcher.on_event = show
        try:
            ending = await run_privately(order.home, task, order.environment, watcher)
        except DeckhandsError as error:
            log.write(f"{error}\n".encode())
            raise
        finally:
            if started:
                _keep(order, RunFolder(order.home.run_folder(started[0])))
    return ending


def _keep(order: Order, folder: RunFolder) -> None:
    """Copy the log of a run and its trajectory into the workspace."""
    events = folder.events() if folder.has_events else []
    if not events:
        return
    contract, inside = order.contract, order.contract.inside
    lines = "".join(event_line(event) + "\n" for event in events)
    inside.write(f"{contract.logs}/events.jsonl", lines.encode())
    summary = json.dumps(folder.summary().as_json(), indent=2) + "\n"
    inside.write(f"{contract.logs}/summary.json", summary.encode())
    if order.trajectory is not None:
        trajectory, _ = trajectory_of(events)
        name = f"{contract.experiment}.json"
        is_folder = (contract.root / order.trajectory).is_dir()
        path = f"{order.trajectory}/{name}" if is_folder else order.trajectory
        inside.write(path, json.dumps(trajectory, indent=4).encode())


def _interrupt(watcher: Watcher) -> None:
    """Stop gracefully the first time, immediately the second time."""
    if watcher.interrupted.is_set():
        watcher.at_once()
        sys.stdout.flush()
        os._exit(ExitCode.INTERRUPTED)
    watcher.interrupted.set()
