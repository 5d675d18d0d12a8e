"""The table of variables in docs/deployment.md is what the settings classes say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from broker.runtime.settings import NAMES_OF_WORKERS, BrokerSettings
from controller_worker.settings import ControllerVariables
from deckhands.door.settings import DoorSettings
from tool_worker.settings import ToolVariables

PAGE = Path(__file__).resolve().parents[4] / "docs" / "deployment.md"
READERS = {
    BrokerSettings: "all",
    ControllerVariables: "controller workers",
    ToolVariables: "tool workers",
    DoorSettings: "doors",
}


def own_fields(settings: type[BrokerSettings]) -> set[str]:
    return settings.model_fields.keys() - (set() if settings is BrokerSettings else BrokerSettings.model_fields.keys())


def rows() -> Iterator[str]:
    for settings, reader in READERS.items():
        for name in settings.model_fields:
            field = settings.model_fields[name]
            assert field.description, f"{settings.__name__}.{name} has no description"
            if name in own_fields(settings):
                default = field.default
                shown = "" if default in ("", False) else f"`{default:g}`" if type(default) is float else f"`{default}`"
                yield f"| `DECKHANDS_{name.upper()}` | {shown} | {reader} | {field.description} |"


def test_the_page_has_every_variable_with_its_default() -> None:
    table = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `DECKHANDS_")]
    assert table == list(rows())


def test_every_process_knows_the_names_that_workers_read() -> None:
    assert own_fields(ControllerVariables) | own_fields(ToolVariables) | own_fields(DoorSettings) == NAMES_OF_WORKERS
