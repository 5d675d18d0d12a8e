"""The settings of a task of inspect_ai: each is kept, or named as ignored."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deckhands.evaluation.datasets.inspect_tasks import list_ignored, to_defaults


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"epochs": 3}, {"attempts": 3}),
        ({"message_limit": 7}, {"max_iterations": 3}),
        ({"message_limit": 40, "turn_limit": 5}, {"max_iterations": 5}),
        ({"time_limit": 90}, {"max_seconds": 90}),
        ({"cost_limit": 0.5}, {"max_budget": 0.5}),
        ({"epochs": None, "message_limit": None}, {}),
    ],
)
def test_settings_of_a_task_are_the_defaults_of_an_evaluation(
    setting: dict[str, float], kept: dict[str, float]
) -> None:
    task = SimpleNamespace(**setting)
    assert to_defaults(task).values == kept
    assert list_ignored(task) == []


def test_options_win_and_the_ignored_setting_is_named() -> None:
    chosen, notes = to_defaults(SimpleNamespace(epochs=3, time_limit=90)).resolve({"attempts": 1, "max_seconds": None})
    assert chosen == {"attempts": 1, "max_seconds": 90}
    assert notes == [
        "The dataset's epochs=3 is ignored: attempts is 1.",
        "The dataset sets max_seconds to 90: time_limit=90.",
    ]


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"sandbox": "docker"}, "sandbox docker is ignored"),
        ({"sandbox": SimpleNamespace(type="docker", config="a.yaml")}, "sandbox docker with a.yaml is ignored"),
        ({"token_limit": 1_000}, "token_limit of the task is ignored"),
        ({"working_limit": 60}, "working_limit of the task is ignored"),
        ({"epochs_reducer": ["max"]}, "epochs_reducer of the task is ignored"),
    ],
)
def test_other_settings_are_named_as_ignored(setting: dict[str, object], text: str) -> None:
    (named,) = list_ignored(SimpleNamespace(**setting))
    assert named.startswith(text)
    assert to_defaults(SimpleNamespace(**setting)).values == {}
