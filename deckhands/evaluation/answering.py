"""Who waits for an evaluation: the Celery task that asked for it, if one did; see `deckhands.door.evaluations`.

task.json   in the directory of the evaluation: the task, what Celery keeps of it, and whether all attempts have ended
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.celery.door_app import make_door_app
from broker.celery.door_results import TaskResults
from broker.runtime.settings import BrokerSettings

TASK = "task.json"
EVALUATE = "deckhands.evaluate"


class Asker(BaseModel):
    """The task that asked last."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    task_id: str
    options: dict[str, Any]
    kept: dict[str, Any] = {}
    is_over: bool = False

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Return it; None: no task asked, or what is written cannot be used."""
        try:
            return cls.model_validate_json((directory / TASK).read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, directory: Path) -> None:
        """Write it down, in place of an earlier one."""
        draft = directory / f"{TASK}.new"
        draft.write_text(self.model_dump_json(), encoding="utf-8")
        draft.replace(directory / TASK)


def answer(directory: Path) -> None:
    """Send the task that waits for an evaluation again: all attempts have ended, and its door returns the summary.

    Raises:
        kombu.exceptions.OperationalError: the broker is away.
    """
    asker = Asker.read(directory)
    if asker is None or asker.is_over:
        return
    asker.model_copy(update={"is_over": True}).write(directory)
    settings = BrokerSettings.from_env()
    results = TaskResults(make_door_app(settings.celery_url, settings.result_url))
    results.send_second_half(asker.task_id, asker.kept, task=EVALUATE, options=asker.options)
