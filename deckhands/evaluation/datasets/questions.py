"""Rows in the format of GAIA: a question, its short answer, and optionally an attached file.

    {"task_id": "…", "Question": "…", "Level": 1, "Final answer": "…", "file_name": "…"}

Source: the `metadata.jsonl` of the data set gaia-benchmark/GAIA, whose attachments are beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from deckhands.evaluation.datasets.file_trees import MAX_BYTES, MemoryFiles, TreeFile
from deckhands.evaluation.datasets.human_eval import make_command_script
from deckhands.evaluation.datasets.instances import ID, Instance
from deckhands.evaluation.datasets.own_rows import resolve_images
from deckhands.evaluation.datasets.repositories import is_safe

KEYS = frozenset({"task_id", "Question"})
UNKNOWN = "?"
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
HOW_TO_ANSWER = (
    "When you finish, end your message with: FINAL ANSWER: followed by the answer alone. The answer is a number, as "
    "few words as possible, or a list of these separated by commas. Write numbers in digits, without thousands "
    "separators and without units, unless the question asks for them."
)


class _GaiaRow(BaseModel):
    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    task_id: str = Field(pattern=ID)
    question: str = Field(alias="Question", min_length=1, max_length=50_000)
    answer: str = Field(alias="Final answer", min_length=1)
    level: str = Field(alias="Level", default="", max_length=20)
    file_name: str = ""


def question_instance(row: Mapping[str, Any], folder: Path) -> Instance:
    """Return the instance of a row.

    Raises:
        ValueError: the row is invalid.
    """
    found = _GaiaRow.model_validate(row)
    if found.answer == UNKNOWN:
        raise ValueError("Final answer: it is not published, so nothing could be scored")
    task, workspace = found.question, None
    images: tuple[str, ...] = ()
    if found.file_name:
        if not is_safe(found.file_name):
            raise ValueError(f"file_name: {found.file_name!r} is no relative path")
        path = folder / found.file_name
        if not path.is_file():
            raise ValueError(f"file_name: there is no {path}")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"file_name: {path} has more than {MAX_BYTES:,} bytes")
        if path.suffix.lower() in PICTURES:
            images = resolve_images(folder, (found.file_name,))
        workspace = MemoryFiles({path.name: TreeFile(path.read_bytes())})
        task += f"\n\nThe file {path.name} in your working directory belongs to the question."
    return Instance(
        found.task_id,
        f"{task}\n\n{HOW_TO_ANSWER}",
        workspace=workspace,
        answer=found.answer,
        images=images,
        tags=(f"level-{found.level}",) if found.level else (),
        turns=make_command_script("true", f"FINAL ANSWER: {found.answer}"),
    )
