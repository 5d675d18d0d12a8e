"""Export the delivered groups of a run: a row for each segment of each trajectory, as JSONL or Parquet.

Holds: rows are in the order of delivery, and have the columns of `COLUMNS`. The file is complete or absent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

from broker.runtime import CorruptEntry, UnknownConversation, UsageError, new_key
from deckhands.client import Client
from deckhands.rollouts.run import RolloutRun

Format = Literal["jsonl", "parquet"]
COLUMNS: Mapping[str, str] = {
    "run": "string",
    "group": "string",
    "index": "int64",
    "instance": "string",
    "round": "int32",
    "version": "int32",
    "attempt": "int32",
    "conversation_id": "string",
    "delegate_of": "string",
    "reward": "float64",
    "rewards": "string",
    "step_rewards": "list<float64>",
    "outcome": "string",
    "cause": "string",
    "is_partial": "bool",
    "segment": "int32",
    "reason": "string",
    "tokens": "list<int32>",
    "mask": "list<int8>",
    "logprobs": "list<float32>",
    "versions": "list<int32>",
}
"""The columns and their types, as Arrow names them; `rewards` is JSON."""
ROWS_AT_ONCE = 256


async def export_rollouts(
    client: Client, run: RolloutRun, path: Path, form: Format, *, on_unreadable: Callable[[str], None] = lambda _: None
) -> int:
    """Write the groups of a run into a file, and return the number of rows.

    Args:
        on_unreadable: called with the id of each conversation that can no longer be read, which has no rows.

    Raises:
        UsageError: the file cannot be written, or pyarrow is not installed.
    """
    draft = path.with_name(f".{path.name}.{new_key()}")
    count = 0
    try:
        with draft.open("wb") as file:
            writer = _JsonlWriter(file) if form == "jsonl" else _ParquetWriter(file)
            async for row in iterate_rows(client, run, on_unreadable):
                writer.write(row)
                count += 1
            writer.close()
        draft.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", remedy="Name another file.") from error
    finally:
        draft.unlink(missing_ok=True)
    return count


async def iterate_rows(
    client: Client, run: RolloutRun, on_unreadable: Callable[[str], None]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the rows of the delivered groups, except groups that the reader dropped."""
    dropped = {one.get("group") for one in await run.list_events() if one["kind"] == "dropped"}
    for group in await run.list_groups():
        if group["id"] in dropped:
            continue
        for about in group["trajectories"]:
            own = about["conversation_id"]
            for conversation_id in (own, *about.get("delegates", ())):
                try:
                    trajectory = await client.trajectory(conversation_id)
                except (CorruptEntry, UnknownConversation):
                    on_unreadable(conversation_id)
                    continue
                for number, segment in enumerate(trajectory.segments):
                    yield {
                        "run": run.name,
                        "group": group["id"],
                        **{name: group[name] for name in ("index", "instance", "round", "version")},
                        "attempt": about["attempt"],
                        "conversation_id": conversation_id,
                        "delegate_of": "" if conversation_id == own else own,
                        "reward": about["reward"],
                        "rewards": json.dumps(about["rewards"], sort_keys=True),
                        "step_rewards": about["step_rewards"] if conversation_id == own else [],
                        **{name: about[name] for name in ("outcome", "cause", "is_partial")},
                        "segment": number,
                        "reason": segment.reason,
                        **{name: getattr(segment, name) for name in ("tokens", "mask", "logprobs", "versions")},
                    }


class _JsonlWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, row: Mapping[str, Any]) -> None:
        plain = {name: _to_list(value) if COLUMNS[name].startswith("list") else value for name, value in row.items()}
        self._file.write(json.dumps(plain).encode() + b"\n")

    def close(self) -> None:
        self._file.flush()


class _ParquetWriter:
    def __init__(self, file: IO[bytes]) -> None:
        try:
            pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        except ModuleNotFoundError as error:
            raise UsageError(
                "Parquet files need pyarrow, which is not installed.",
                remedy='Install `pip install "deckhands[rollouts]"`, or write --format jsonl.',
            ) from error
        self._arrow = pa
        self._schema = pa.schema([(name, _to_type(pa, kind)) for name, kind in COLUMNS.items()])
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[Mapping[str, Any]] = []

    def write(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) >= ROWS_AT_ONCE:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = [
                self._arrow.array([row[name] for row in self._rows], type=self._schema.field(name).type)
                for name in COLUMNS
            ]
            self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))
            self._rows = []


def _to_type(arrow: Any, kind: str) -> Any:
    if kind.startswith("list<"):
        return arrow.list_(getattr(arrow, kind[5:-1])())
    return getattr(arrow, {"bool": "bool_"}.get(kind, kind))()


def _to_list(values: Any) -> list[Any]:
    """Return an array as a list, with None in place of NaN, which JSON lacks."""
    return [None if one != one else one for one in values]  # noqa: PLR0124  (NaN)
