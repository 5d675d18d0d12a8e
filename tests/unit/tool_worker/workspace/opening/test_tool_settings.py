"""The settings of a tool worker from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from tool_worker.settings import load_tool_settings
from tool_worker.workspace.opening.repository_roots import RepositoryRoots


def test_default_settings() -> None:
    settings = load_tool_settings({})
    assert settings.no_change_timeout_seconds == 10.0
    assert (settings.variables.workspace_idle_seconds, settings.variables.workspace_ttl_seconds) == (300.0, 3600.0)
    assert (settings.environment, settings.search_path) == ({}, "")


def test_variables_of_shells() -> None:
    settings = load_tool_settings(
        {
            "NO_CHANGE_TIMEOUT_SECONDS": "2.5",
            "SANDBOX_ENV_Region": "eu",
            "SANDBOX_ENV_EMPTY": "",
            "PATH": "/opt/bin:/bin",
            "DECKHANDS_WORKSPACE_IDLE_SECONDS": "7",
            "SOMETHING_ELSE": "1",
        }
    )
    assert settings.no_change_timeout_seconds == 2.5
    assert settings.environment == {"REGION": "eu", "EMPTY": ""}
    assert settings.search_path == "/opt/bin:/bin"
    assert settings.variables.workspace_idle_seconds == 7.0


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=f"NO_CHANGE_TIMEOUT_SECONDS is '{text}'"):
        load_tool_settings({"NO_CHANGE_TIMEOUT_SECONDS": text})


def test_a_name_that_no_variable_can_have() -> None:
    with pytest.raises(UsageError, match="SANDBOX_ENV_1-X would set the variable '1-X'"):
        load_tool_settings({"SANDBOX_ENV_1-X": "1"})


def test_the_roots_of_repositories_are_absolute_paths() -> None:
    assert load_tool_settings({}).repository_roots == RepositoryRoots()
    named = load_tool_settings({"DECKHANDS_REPOSITORY_ROOTS": "/srv/git, /srv/more"}).repository_roots
    assert named == RepositoryRoots((Path("/srv/git"), Path("/srv/more")))
    for text in ("git", "/srv/../etc"):
        with pytest.raises(UsageError, match="DECKHANDS_REPOSITORY_ROOTS"):
            load_tool_settings({"DECKHANDS_REPOSITORY_ROOTS": text})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NODE_LOST_SECONDS", "-3"),
        ("WORKSPACE_TTL_SECONDS", "inf"),
        ("CONCURRENCY", "0"),
        ("CONCURRENCY", "-1"),
        ("DOCKER_CPUS", "-1"),
        ("WORKSPACE_PROCESSES", "0"),
        ("WORKSPACE_MEMORY_BYTES", "-1"),
        ("EGRESS_BYTES", "0"),
        ("WORKSPACE_FILES", "none"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(name, text):
    with pytest.raises(UsageError, match=f"DECKHANDS_{name} is '?{text}'?. It must be"):
        load_tool_settings({f"DECKHANDS_{name}": text})
