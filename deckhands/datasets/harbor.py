"""Directories of tasks as Harbor and Terminal-Bench have them, as far as a workspace can be such a container.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh       Harbor
    task.yaml  Dockerfile  run-tests.sh  tests/test_outputs.py  solution.sh                    Terminal-Bench 1

Sources: https://harborframework.com/docs, https://github.com/laude-institute/terminal-bench.
Holds: the working directory of the image, `/app` for most, stands for the workspace, in instruction and tests.
Does not: build images, start services, or install anything; see docs/evaluation.md.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from broker.runtime.errors import UsageError
from deckhands.datasets.dockerfile import INSTALLERS, Built, built
from deckhands.datasets.file_trees import File, FixedFiles, tree_of
from deckhands.datasets.human_eval import CHECKS, FOLDER, scripted
from deckhands.datasets.instances import ID, Instance

MARKS = ("task.toml", "task.yaml")
SCRIPT = CHECKS / "harbor.py"
WHERE = "Your working directory stands for {directory}: where the task says {directory}/x, use x in it.\n\n"
BUILT = ".openhands/built"


def find_tasks(directory: Path) -> list[Path]:
    """Return the directories of tasks: the directory itself, or those in it.

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
        ValueError: it needs what a workspace cannot give, or a part of it is missing.
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
    _check_services(environment)
    if not (environment / "Dockerfile").is_file():
        raise ValueError("it has no Dockerfile: a ready-made image cannot be used")
    made = built(environment / "Dockerfile")
    metadata = about.get("metadata", about)
    tags = [metadata.get("difficulty"), metadata.get("category"), *(metadata.get("tags") or [])]
    return Instance(
        folder.name,
        WHERE.format(directory=made.directory) + instruction.strip(),
        workspace=FixedFiles(made.files),
        hidden=FixedFiles(_hidden(folder, made, is_harbor=is_harbor)),
        setup=_setup(made),
        check=f"python3 {FOLDER}/run.py",
        tags=tuple(dict.fromkeys(str(tag) for tag in tags if tag)),
        turns=_solution(folder / ("solution/solve.sh" if is_harbor else "solution.sh"), made.directory),
    )


def _about(folder: Path, *, is_harbor: bool) -> Mapping[str, Any]:
    try:
        if is_harbor:
            return tomllib.loads(_text(folder / "task.toml"))
        found = yaml.safe_load(_text(folder / "task.yaml"))
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"its description cannot be read: {error}") from error
    return found if isinstance(found, Mapping) else {}


def _check_services(environment: Path) -> None:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (environment / name).is_file():
            found = yaml.safe_load(_text(environment / name))
            services = found.get("services", {}) if isinstance(found, Mapping) else {}
            if len(services) > 1:
                raise ValueError(f"{name}: it has {len(services)} services, and a workspace starts none")


def _hidden(folder: Path, made: Built, *, is_harbor: bool) -> dict[str, File]:
    tests = tree_of(folder / "tests")
    runner = folder / ("tests/test.sh" if is_harbor else "run-tests.sh")
    installs = runner.is_file() and any(INSTALLERS.search(line.strip()) for line in _text(runner).splitlines())
    if "test_outputs.py" in tests and (installs or not is_harbor):
        asked = {"directory": made.directory, "pytest": "test_outputs.py"}
    elif not is_harbor or not runner.is_file():
        raise ValueError(f"it has neither {runner.name} nor tests/test_outputs.py")
    elif installs:
        raise ValueError(f"tests/{runner.name} installs programs, and a check has no network")
    else:
        asked = {"directory": made.directory}
    found = {f"{FOLDER}/tests/{name}": file for name, file in tests.items()}
    return found | {
        f"{FOLDER}/run.py": File(SCRIPT.read_bytes()),
        f"{FOLDER}/asked.json": File(json.dumps(asked).encode()),
    }


def _setup(made: Built) -> str | None:
    """Return what runs in every shell (variables) and what only the agent's first one does (commands)."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in made.variables.items() if name.isidentifier()]
    if made.commands:
        here = [re.sub(rf"(?<![\w./-]){re.escape(made.directory)}(?![\w.-])", "$PWD", text) for text in made.commands]
        commands = " && ".join(f"( {text} )" for text in here)
        lines.append(f"test -e {FOLDER} || test -e {BUILT} || {{ {commands} && touch {BUILT}; }}")
    return " && ".join(lines) or None


def _solution(path: Path, directory: str) -> tuple[dict[str, Any], ...]:
    if not path.is_file():
        return ()
    packed = base64.b64encode(path.read_bytes()).decode()
    return scripted(f'echo {packed} | base64 -d | sed "s#{directory}#$PWD#g" | bash')


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} cannot be read") from error
