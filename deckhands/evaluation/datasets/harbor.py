"""Task directories of Harbor and Terminal-Bench, as far as a workspace can replace their container.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh       Harbor
    task.yaml  Dockerfile  run-tests.sh  tests/test_outputs.py  solution.sh                    Terminal-Bench 1

Sources: https://harborframework.com/docs, https://github.com/laude-institute/terminal-bench.

`task.toml` or `task.yaml` has the settings of a task.

Source: Harbor's models of `task.toml`, schema 1.4; the keys of Terminal-Bench 1.
Holds: the workspace replaces the working directory of the image, `/app` for most, in instruction and tests. Every key
is used, ignored and listed, or refused. An unknown key is ignored and listed, too.
Does not: build images, start services, or install anything; see docs/evaluation.md.
"""

from __future__ import annotations

import base64
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from broker.runtime import UsageError
from deckhands.evaluation.datasets.dockerfile import INSTALLERS, DockerfileWorkspace, parse_dockerfile
from deckhands.evaluation.datasets.file_trees import (
    COMMAND,
    FOLDER,
    MemoryFiles,
    TreeFile,
    pack_tree,
    program_files,
    read_tree,
)
from deckhands.evaluation.datasets.human_eval import make_command_script
from deckhands.evaluation.datasets.instances import ID, Instance

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
        variables: for the agent's shell and the check; `check` is for the check alone, `solution` for the solution.
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
        ValueError: the task requires a feature that a workspace does not have; the text names the key.
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


MARKS = ("task.toml", "task.yaml")
WHERE = "Your working directory stands for {directory}: where the task says {directory}/x, use x in it.\n\n"
BUILT = ".openhands/built"
OF_EVERY_SERVICE = frozenset({"build", "image", "container_name", "command"})
"""Keys of a task's single service that a workspace does not need."""
MAX_SOLUTION_CHARS = 90_000
"""The limit of a packed solution, which is a word of a command."""
_SPECIAL = re.compile(r'["`\\]')


def find_tasks(directory: Path) -> list[Path]:
    """Return the directories of tasks: the directory itself, or its subdirectories.

    Raises:
        UsageError: there are no tasks.
    """
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    found = [folder for folder in folders if any((folder / mark).is_file() for mark in MARKS)]
    if not found:
        raise UsageError(
            f"{directory} has no tasks.", remedy="Name a directory with task.toml, or one that has such directories."
        )
    return found


def harbor_instance(folder: Path) -> Instance:
    """Return the instance of a task.

    Raises:
        ValueError: the task requires a feature that a workspace does not have, or a part of it is missing.
    """
    folder = folder.resolve()
    if not re.fullmatch(ID, folder.name):
        raise ValueError("its name has other characters than letters, digits, '.', '_' and '-', or is too long")
    is_harbor = (folder / "task.toml").is_file()
    about = _read_about(folder, is_harbor=is_harbor)
    instruction = _read_text(folder / "instruction.md") if is_harbor else str(about.get("instruction", ""))
    if not instruction.strip():
        raise ValueError("it has no instruction")
    environment = folder / "environment" if is_harbor else folder
    services = _find_ignored_settings(environment)
    if not (environment / "Dockerfile").is_file():
        raise ValueError("it has no Dockerfile: a ready-made image cannot be used")
    settings = parse_settings(about)
    made = parse_dockerfile(environment / "Dockerfile", directory=settings.directory)
    made.variables |= settings.variables
    if (folder / "trajectory.json").is_file():
        raise ValueError("trajectory.json is not supported: a conversation starts with its task")
    metadata = about.get("metadata", about)
    tags = [metadata.get("difficulty"), metadata.get("category"), *(metadata.get("tags") or [])]
    turns, without = _read_solution(folder, made.directory, settings, is_harbor=is_harbor)
    hidden, writes_reward = _make_check(folder, made, settings, is_harbor=is_harbor)
    return Instance(
        folder.name,
        WHERE.format(directory=made.directory) + instruction.strip(),
        workspace=MemoryFiles(made.files),
        hidden=MemoryFiles(hidden),
        setup=_make_setup(made),
        check=COMMAND,
        has_rewards=writes_reward,
        tags=tuple(dict.fromkeys(str(tag) for tag in tags if tag)),
        turns=turns,
        left_out=(*made.left_out, *settings.ignored, *services, *without),
    )


def _read_about(folder: Path, *, is_harbor: bool) -> Mapping[str, Any]:
    try:
        if is_harbor:
            return tomllib.loads(_read_text(folder / "task.toml"))
        found = yaml.safe_load(_read_text(folder / "task.yaml"))
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"its description cannot be read: {error}") from error
    return found if isinstance(found, Mapping) else {}


def _find_ignored_settings(environment: Path) -> list[str]:
    """Return the ignored settings of the service that the Dockerfile builds.

    Raises:
        ValueError: there are several services.
    """
    left_out = []
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (environment / name).is_file():
            found = yaml.safe_load(_read_text(environment / name))
            services = found.get("services", {}) if isinstance(found, Mapping) else {}
            if len(services) > 1:
                raise ValueError(f"{name}: it has {len(services)} services, and a workspace starts none")
            for service in services.values():
                keys = sorted(set(service if isinstance(service, Mapping) else ()) - OF_EVERY_SERVICE)
                left_out += [f"{name}: {key} is ignored" for key in keys]
    return left_out


def _make_check(
    folder: Path, made: DockerfileWorkspace, settings: TaskSettings, *, is_harbor: bool
) -> tuple[dict[str, TreeFile], bool]:
    """Return the hidden files, and whether the tests write a reward: pytest decides otherwise."""
    tests = read_tree(folder / "tests")
    runner = folder / ("tests/test.sh" if is_harbor else "run-tests.sh")
    installs = runner.is_file() and any(INSTALLERS.search(line.strip()) for line in _read_text(runner).splitlines())
    asked: dict[str, object] = {"directory": made.directory, "variables": dict(settings.check)}
    if "test_outputs.py" in tests and (installs or not is_harbor):
        asked["pytest"] = "test_outputs.py"
    elif not is_harbor or not runner.is_file():
        raise ValueError(f"it has neither {runner.name} nor tests/test_outputs.py")
    elif installs:
        raise ValueError(f"tests/{runner.name} installs programs, and a check has no network")
    found = {f"{FOLDER}/tests/{name}": file for name, file in tests.items()}
    return found | program_files("harbor", asked), "pytest" not in asked


def _make_setup(made: DockerfileWorkspace) -> str | None:
    """Return the text that runs in every shell (variables) and in the agent's first one only (commands)."""
    variables = {name: value for name, value in made.variables.items() if name.isidentifier()}
    lines = [f"export {name}={_quote(value, made.directory)}" for name, value in variables.items()]
    if made.commands:
        here = [_replace_directory(text, made.directory) for text in made.commands]
        commands = " && ".join(f"( {text} )" for text in here)
        lines.append(f"test -e {FOLDER} || test -e {BUILT} || {{ {commands} && touch {BUILT}; }}")
    return " && ".join(lines) or None


def _replace_directory(text: str, directory: str) -> str:
    """Return a shell text with the workspace in place of the image's directory."""
    return re.sub(rf"(?<![\w./-]){re.escape(directory)}(?![\w.-])", "$PWD", text)


def _quote(value: str, directory: str) -> str:
    """Return a variable's value, quoted for a shell; references to variables expand as in a Dockerfile."""
    turned = _replace_directory(value, directory)
    if "$" not in turned:
        return shlex.quote(turned)
    escaped = re.sub(_SPECIAL, r"\\\g<0>", turned)
    return f'"{escaped}"'


def _read_solution(
    folder: Path, directory: str, settings: TaskSettings, *, is_harbor: bool
) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """Return a script that runs a solution, and the parts that are left out."""
    path = folder / ("solution/solve.sh" if is_harbor else "solution.sh")
    if not path.is_file():
        return (), [f"{path.name} is missing, so no script comes with the task"]
    files = read_tree(path.parent) if is_harbor else {path.name: read_tree(folder)[path.name]}
    _, content = pack_tree(files)
    text = base64.b64encode(content or b"").decode()
    if len(text) > MAX_SOLUTION_CHARS:
        return (), [f"the solution has {len(text):,} characters: too much for a script"]
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in settings.solution.items())
    return make_command_script(
        f'solution="$(mktemp -d)"; echo {text} | base64 -d | tar -xz -C "$solution"; {exports}'
        f'grep -rIlZ . "$solution" | xargs -0 sed -i "s#{directory}\\b#$PWD#g; s#/solution/#$solution/#g"; '
        f'bash "$solution/{path.name}"'
    ), []


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} cannot be read") from error
