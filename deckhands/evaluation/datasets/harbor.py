"""Task directories of Harbor and Terminal-Bench, as far as a workspace can replace their container.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh       Harbor
    task.yaml  Dockerfile  run-tests.sh  tests/test_outputs.py  solution.sh                    Terminal-Bench 1

Sources: https://harborframework.com/docs, https://github.com/laude-institute/terminal-bench.
Holds: the workspace replaces the working directory of the image, `/app` for most, in instruction and tests.
Does not: build images, start services, or install anything; see docs/evaluation.md.
"""

from __future__ import annotations

import base64
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from broker.runtime import UsageError
from deckhands.evaluation.datasets.check_programs import COMMAND, FOLDER, program_files
from deckhands.evaluation.datasets.dockerfile import INSTALLERS, DockerfileWorkspace, parse_dockerfile
from deckhands.evaluation.datasets.file_trees import MemoryFiles, TreeFile, pack_tree, read_tree
from deckhands.evaluation.datasets.human_eval import make_command_script
from deckhands.evaluation.datasets.instances import ID, Instance
from deckhands.evaluation.datasets.task_settings import TaskSettings, parse_settings

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
        UsageError: there are none.
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
        ValueError: it needs features that a workspace does not have, or a part of it is missing.
    """
    folder = folder.resolve()
    if not re.fullmatch(ID, folder.name):
        raise ValueError("its name has other characters than letters, digits, '.', '_' and '-', or is too long")
    is_harbor = (folder / "task.toml").is_file()
    about = _about(folder, is_harbor=is_harbor)
    instruction = _text(folder / "instruction.md") if is_harbor else str(about.get("instruction", ""))
    if not instruction.strip():
        raise ValueError("it has no instruction")
    environment = folder / "environment" if is_harbor else folder
    services = _services_left_out(environment)
    if not (environment / "Dockerfile").is_file():
        raise ValueError("it has no Dockerfile: a ready-made image cannot be used")
    settings = parse_settings(about)
    made = parse_dockerfile(environment / "Dockerfile", directory=settings.directory)
    made.variables |= settings.variables
    if (folder / "trajectory.json").is_file():
        raise ValueError("trajectory.json is not supported: a conversation starts with its task")
    metadata = about.get("metadata", about)
    tags = [metadata.get("difficulty"), metadata.get("category"), *(metadata.get("tags") or [])]
    turns, without = _solution(folder, made.directory, settings, is_harbor=is_harbor)
    hidden, writes_reward = _hidden(folder, made, settings, is_harbor=is_harbor)
    return Instance(
        folder.name,
        WHERE.format(directory=made.directory) + instruction.strip(),
        workspace=MemoryFiles(made.files),
        hidden=MemoryFiles(hidden),
        setup=_setup(made),
        check=COMMAND,
        has_rewards=writes_reward,
        tags=tuple(dict.fromkeys(str(tag) for tag in tags if tag)),
        turns=turns,
        left_out=(*made.left_out, *settings.ignored, *services, *without),
    )


def _about(folder: Path, *, is_harbor: bool) -> Mapping[str, Any]:
    try:
        if is_harbor:
            return tomllib.loads(_text(folder / "task.toml"))
        found = yaml.safe_load(_text(folder / "task.yaml"))
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"its description cannot be read: {error}") from error
    return found if isinstance(found, Mapping) else {}


def _services_left_out(environment: Path) -> list[str]:
    """Return the ignored settings of the service that the Dockerfile builds.

    Raises:
        ValueError: there are several services.
    """
    left_out = []
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (environment / name).is_file():
            found = yaml.safe_load(_text(environment / name))
            services = found.get("services", {}) if isinstance(found, Mapping) else {}
            if len(services) > 1:
                raise ValueError(f"{name}: it has {len(services)} services, and a workspace starts none")
            for service in services.values():
                keys = sorted(set(service if isinstance(service, Mapping) else ()) - OF_EVERY_SERVICE)
                left_out += [f"{name}: {key} is ignored" for key in keys]
    return left_out


def _hidden(
    folder: Path, made: DockerfileWorkspace, settings: TaskSettings, *, is_harbor: bool
) -> tuple[dict[str, TreeFile], bool]:
    """Return the hidden files, and whether the tests write a reward: pytest decides otherwise."""
    tests = read_tree(folder / "tests")
    runner = folder / ("tests/test.sh" if is_harbor else "run-tests.sh")
    installs = runner.is_file() and any(INSTALLERS.search(line.strip()) for line in _text(runner).splitlines())
    asked: dict[str, object] = {"directory": made.directory, "variables": dict(settings.check)}
    if "test_outputs.py" in tests and (installs or not is_harbor):
        asked["pytest"] = "test_outputs.py"
    elif not is_harbor or not runner.is_file():
        raise ValueError(f"it has neither {runner.name} nor tests/test_outputs.py")
    elif installs:
        raise ValueError(f"tests/{runner.name} installs programs, and a check has no network")
    found = {f"{FOLDER}/tests/{name}": file for name, file in tests.items()}
    return found | program_files("harbor", asked), "pytest" not in asked


def _setup(made: DockerfileWorkspace) -> str | None:
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


def _solution(
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} cannot be read") from error
