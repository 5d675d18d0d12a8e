"""The settings of a tool worker from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.contract.skill_sources import SkillSourceRule
from broker.runtime.errors import UsageError
from tool_worker.settings import load_tool_settings
from tool_worker.workspace.opening.repositories import RepositoryRoots


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


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        *(
            ("NO_CHANGE_TIMEOUT_SECONDS", text, f"NO_CHANGE_TIMEOUT_SECONDS is '{text}'")
            for text in ("soon", "0", "-1", "nan", "inf")
        ),
        ("SANDBOX_ENV_1-X", "1", "SANDBOX_ENV_1-X would set the variable '1-X'"),
    ],
)
def test_variable_of_shells_that_cannot_be_used(name: str, text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load_tool_settings({name: text})


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


def test_places_of_skills_are_read() -> None:
    assert load_tool_settings({}).skill_rules == ()
    places = load_tool_settings({"DECKHANDS_SKILL_SOURCES": "/srv/skills, acme=git.example.com/acme"}).skill_rules
    assert places == (SkillSourceRule("*", "/srv/skills"), SkillSourceRule("acme", "git.example.com/acme"))
    with pytest.raises(UsageError, match="DECKHANDS_SKILL_SOURCES"):
        load_tool_settings({"DECKHANDS_SKILL_SOURCES": "https://git.example.com"})
