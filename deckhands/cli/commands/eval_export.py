"""`deckhands eval export`: attempts in the formats of other tools.

Holds: each file of an export is written atomically; the same results and logs give the same files.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from broker.contract import Event
from broker.runtime import UnknownConversation, UsageError, format_count
from deckhands.cli.command_group import with_options
from deckhands.client import Client, note, print_text
from deckhands.evaluation import (
    OUTCOMES,
    RESULTS,
    SIBLINGS,
    AttemptRow,
    Dialogue,
    EvaluationRequest,
    load_request,
    read_results,
    run_in_store,
    split_left_out,
    to_atif,
    to_dialogue,
    to_inspect_log,
    to_prediction,
    to_sft,
)
from deckhands.interop import to_trajectory
from deckhands.settings import CliSettings

PREDICTIONS = "predictions"
FORMATS = ("openhands", "inspect", "atif", "sft", PREDICTIONS)
EXPORTS = "exports"


@dataclass(frozen=True, slots=True)
class EvalExportOptions:
    """Options of `eval export`."""

    directory: Path
    form: str
    out: Path | None
    outcomes: tuple[str, ...]


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), required=True, help="The format to write.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Where to write; by default DIR/exports/FORMAT."
)
@click.option(
    "--outcome",
    "outcomes",
    type=click.Choice(OUTCOMES),
    multiple=True,
    help="Only attempts with this outcome. May be repeated.",
)
@with_options(EvalExportOptions)
def export(options: EvalExportOptions) -> None:
    """Write the attempts of DIR for another tool, or for training."""
    asked = load_request(options.directory)
    rows = select_rows(options.directory, options.form, options.outcomes)
    out = options.out or options.directory / EXPORTS / options.form
    if options.form == PREDICTIONS:
        written, left_out = write_predictions(rows, out)
        for line in left_out:
            note(f"Not in the patch: {line}")
    else:
        written = asyncio.run(_export(asked, rows, options.form, out))
    print_text(f"{format_count(len(rows), 'attempt')} in {format_count(len(written), 'file')} below {out}")


async def _export(asked: EvaluationRequest, rows: list[AttemptRow], form: str, out: Path) -> list[Path]:
    async def written(client: Client) -> list[Path]:
        return await write_export(client, asked, rows, form, out)

    return await run_in_store(CliSettings.from_env(), asked.home or asked.name, written)


def select_rows(directory: Path, form: str, outcomes: Sequence[str]) -> list[AttemptRow]:
    """Return the rows to export, sorted.

    Args:
        outcomes: only these; empty: all, but for training only resolved ones.

    Raises:
        UsageError: there are no results, or none matches.
    """
    wanted = set(outcomes) or ({"resolved"} if form == "sft" else set())
    rows = [row for row in read_results(directory / RESULTS) if not wanted or row.outcome in wanted]
    if not rows:
        raise UsageError(
            f"{directory} has no attempt to export: none is {' or '.join(sorted(wanted)) or 'there'}.",
            remedy="Name others with --outcome.",
        )
    return sorted(rows, key=lambda row: row.key)


def write_predictions(rows: Sequence[AttemptRow], out: Path) -> tuple[list[Path], list[str]]:
    """Write a file per model and attempt number; return the files, and the attempts whose patch was incomplete."""
    lines: dict[str, list[str]] = defaultdict(list)
    left_out: list[str] = []
    names = _model_names(rows)
    is_one = len({(row.model, row.attempt) for row in rows}) == 1
    for row in rows:
        patch, without = split_left_out(row.patch)
        left_out += [f"{row.instance}: {line}" for line in without]
        name = PREDICTIONS if is_one else f"{PREDICTIONS}-{names[row.model]}-{row.attempt}"
        lines[name].append(json.dumps(to_prediction(row.model_dump(), patch)) + "\n")
    return [_write_file(out / f"{name}.jsonl", "".join(found)) for name, found in lines.items()], left_out


async def write_export(
    client: Client, asked: EvaluationRequest, rows: Sequence[AttemptRow], form: str, out: Path
) -> list[Path]:
    """Write an export that needs the logs, and return its files.

    Raises:
        StoreError: the store is unavailable.
        UsageError: the log of an attempt is missing, or a file cannot be written.
    """
    if form == "inspect":
        return await _inspect_logs(client, asked, rows, out)
    written: list[Path] = []
    lines: list[str] = []
    names = _model_names(rows)
    async for row, events in _logs(client, rows):
        if events is None:
            continue
        about = row.model_dump()
        dialogue = to_dialogue(row.conversation_id, events)
        name = f"{row.instance}--{names[row.model]}--{row.attempt}.json"
        match form:
            case "openhands":
                written.append(_write_file(out / name, _json(to_trajectory(events)[0])))
            case "atif":
                written.append(_write_file(out / name, _json(to_atif(dialogue, about))))
            case _:
                lines.append(json.dumps(to_sft(dialogue, about), ensure_ascii=False) + "\n")
    return [_write_file(out / "sft.jsonl", "".join(lines))] if lines else written


async def _inspect_logs(client: Client, asked: EvaluationRequest, rows: Sequence[AttemptRow], out: Path) -> list[Path]:
    attempts: dict[str, list[tuple[Mapping[str, Any], Dialogue | None]]] = defaultdict(list)
    async for row, events in _logs(client, rows):
        dialogue = None if events is None else to_dialogue(row.conversation_id, events)
        attempts[row.model].append((row.model_dump(), dialogue))
    written = []
    names = _model_names(rows)
    for model, found in attempts.items():
        log = to_inspect_log(asked.name, Path(asked.dataset).stem or SIBLINGS, model, found)
        moment = re.sub(r"[:.]", "-", log["eval"]["created"])
        # inspect takes the task and its id from the first part and the last
        parts = (text.replace("_", "-") for text in (_file_name(log["eval"]["task"]), names[model]))
        written.append(_write_file(out / f"{'_'.join((moment, *parts, asked.name))}.json", _json(log)))
    return written


async def _logs(client: Client, rows: Sequence[AttemptRow]) -> AsyncIterator[tuple[AttemptRow, list[Event] | None]]:
    """Yield rows with their logs; None for an attempt that never started."""
    for row in rows:
        if not row.conversation_id:
            yield row, None
            continue
        try:
            yield row, await client.events(row.conversation_id, is_whole=True)
        except UnknownConversation as error:
            raise UsageError(
                f"The log of {row.conversation_id} is not on this cluster.",
                remedy="Name the cluster that the evaluation ran on with DECKHANDS_URL.",
            ) from error


def _model_names(rows: Sequence[AttemptRow]) -> Mapping[str, str]:
    """Return the models as parts of file names, distinct also where `_` becomes `-`."""
    models = {row.model for row in rows}
    taken = Counter(_file_name(model).replace("_", "-") for model in models)
    return {
        model: _file_name(model)
        if taken[_file_name(model).replace("_", "-")] == 1
        else f"{_file_name(model)}-{sha256(model.encode()).hexdigest()[:8]}"
        for model in models
    }


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[-80:]


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _write_file(path: Path, content: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.new")
        draft.write_text(content, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", remedy="Name another path with -o.") from error
    return path
