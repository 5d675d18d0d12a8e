"""The settings of a task in `task.toml` or `task.yaml`, and those that a workspace does not support.

Source: Harbor's models of `task.toml`, schema 1.4; the keys of Terminal-Bench 1.
Holds: every key is used, ignored and listed, or refused. An unknown key is ignored and listed, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ABOUT = frozenset(
    {
        *("version", "schema_version", "task", "metadata", "source"),
        *("instruction", "author_name", "author_email", "difficulty", "category", "tags", "parser_name"),
        *("estimated_duration_sec", "expert_time_estimate_min", "junior_time_estimate_min", "disable_asciinema"),
    }
)
"""Keys that describe a task and do not affect how it runs."""
_SIZES = ("cpus", "memory_mb", "memory", "storage_mb", "storage")
_NETWORK = ("network_mode", "allowed_hosts", "allow_internet")
USED = frozenset({"environment.env", "environment.workdir", "solution.env", "verifier.env"})
IGNORED: Mapping[str, str] = {
    "agent.timeout_sec": "use --max-seconds",
    "max_agent_timeout_sec": "use --max-seconds",
    "verifier.timeout_sec": "a check may take 600 seconds",
    "max_test_timeout_sec": "a check may take 600 seconds",
    "agent.user": "commands run as the sandbox has it",
    "verifier.user": "commands run as the sandbox has it",
    "environment.build_timeout_sec": "no image is built",
    "environment.docker_image": "the Dockerfile is followed",
    **{f"environment.{name}": "workers decide on that" for name in _SIZES},
    **{
        f"{table}.{name}": "workers decide which hosts agents reach"
        for table in ("environment", "agent")
        for name in _NETWORK
    },
    "verifier.network_mode": "a check has no network",
    "verifier.allowed_hosts": "a check has no network",
    "environment.skills_dir": "agents have the skills of the cluster",
    "environment.healthcheck": "nothing is started",
    "artifacts": "the patch has all files that were changed",
    "run_tests_in_same_shell": "a check has a shell for itself",
}
"""The ignored keys, and their replacements."""
REFUSED: Mapping[str, str] = {
    "steps": "a conversation has one task",
    "multi_step_reward_strategy": "a conversation has one task",
    "environment.gpus": "a workspace has no GPU",
    "environment.gpu_types": "a workspace has no GPU",
    "environment.tpu": "a workspace has no TPU",
    "environment.mcp_servers": "a task cannot bring tools",
    "verifier.environment": "the tests run with the programs of the node",
    "verifier.collect": "nothing runs between the agent and the tests",
}
TABLES = ("agent", "verifier", "environment", "solution")


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """The settings that are used.

    Attributes:
        variables: for the agent's shell and the check; `check`: for the check alone; `solution`: for the solution.
        directory: the working directory, if it is not the Dockerfile's.
        ignored: the ignored settings, each with its name and its replacement.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    check: Mapping[str, str] = field(default_factory=dict)
    solution: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""
    ignored: tuple[str, ...] = ()


def parse_settings(about: Mapping[str, Any]) -> TaskSettings:
    """Return the settings of a task.

    Raises:
        ValueError: the task needs features that a workspace does not have; names the key.
    """
    keys: dict[str, Any] = {}
    for name, value in about.items():
        if name in TABLES and isinstance(value, Mapping):
            keys |= {f"{name}.{inner}": inside for inner, inside in value.items()}
        else:
            keys[name] = value
    ignored = []
    for name, value in keys.items():
        if name in ABOUT or name in USED:
            continue
        if name in REFUSED:
            if value:
                raise ValueError(f"{name} is not supported: {REFUSED[name]}")
        elif name == "environment.os":
            if str(value).lower() != "linux":
                raise ValueError(f"environment.os is {value}: workspaces are of Linux")
        elif name == "verifier.environment_mode":
            if value == "separate":
                raise ValueError("verifier.environment_mode is separate: tests see the workspace, and no artifacts")
        elif name in IGNORED:
            ignored.append(f"{name} is ignored: {IGNORED[name]}")
        else:
            ignored.append(f"{name} is ignored: it is not known")
    if (parser := about.get("parser_name", "pytest")) != "pytest":
        raise ValueError(f"parser_name is {parser}: only pytest's reports are read")
    return TaskSettings(
        _literal("environment.env", keys),
        _literal("verifier.env", keys),
        _literal("solution.env", keys),
        str(keys.get("environment.workdir") or ""),
        tuple(ignored),
    )


def _literal(name: str, keys: Mapping[str, Any]) -> dict[str, str]:
    found = keys.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is no table")  # noqa: TRY004  (it is listed like the others)
    for variable, value in found.items():
        if "${" in str(value):
            raise ValueError(f"{name}.{variable} is a value of the host ({value}): write it into the task")
        if not variable.isidentifier():
            raise ValueError(f"{name}.{variable} is not the name of a variable")
    return {variable: str(value) for variable, value in found.items()}
