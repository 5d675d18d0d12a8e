"""What of a Dockerfile a workspace can have: the files that it copies, its variables, and its commands.

Holds: what cannot be had is an error, but for two things: the image is the node's, and programs that a command installs
have to be there already.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from deckhands.datasets.file_trees import File, tree_of
from deckhands.datasets.repositories import is_safe

INSTALLERS = re.compile(
    r"(sudo\s+)?(apt-get|apt|apk|dnf|yum|microdnf|pip3?|uvx?|npm|yarn|pnpm|conda|mamba|gem|cargo install|go install|"
    r"curl|wget|python3? -m pip|rm -rf /(var|root)/|useradd|groupadd|chown|locale-gen|ln -s)\b"
)
IGNORED = frozenset({"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "USER", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "SHELL"})


@dataclass(slots=True)
class Built:
    """What a Dockerfile makes of a workspace.

    Attributes:
        directory: where its commands work, in its image.
        files: below that directory.
        variables: of the environment.
        commands: what it runs, without what only installs programs.
    """

    directory: str = "/app"
    files: dict[str, File] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)


def built(path: Path) -> Built:
    """Return what a Dockerfile makes; `COPY` reads beside it.

    Raises:
        ValueError: a line of it needs more than a workspace has.
    """
    found, lines = Built(), _lines(path.read_text(encoding="utf-8"))
    places = [words[0] for _, name, text in lines if name == "WORKDIR" and (words := shlex.split(text))]
    found.directory = str(PurePosixPath("/", *places)) if places else found.directory
    now, images = "/", 0
    for number, name, text in lines:
        try:
            match name:
                case "FROM":
                    images += 1
                    if images > 1:
                        raise ValueError("a workspace is built in one stage")  # noqa: TRY301  (the line is added below)
                case "WORKDIR":
                    now = str(PurePosixPath(now, shlex.split(text)[0]))
                case "COPY" | "ADD":
                    found.files |= _copied(text, path.parent, now, found.directory)
                case "ENV" | "ARG":
                    found.variables |= _variables(text)
                case "RUN":
                    if not all(INSTALLERS.match(part.strip()) for part in re.split(r"&&|;|\n", text) if part.strip()):
                        found.commands.append(text)
                case _ if name not in IGNORED:
                    raise ValueError(f"{name} is not known")  # noqa: TRY301  (the line is added below)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
    return found


def _lines(text: str) -> list[tuple[int, str, str]]:
    """Return the instructions with the numbers of their first lines."""
    found: list[tuple[int, str, str]] = []
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first or number
        begun += line.strip()
        if begun.endswith("\\"):
            begun = begun[:-1] + " "
            continue
        name, _, rest = begun.partition(" ")
        found.append((first, name.upper(), rest.strip()))
        begun, first = "", 0
    return found


def _copied(text: str, folder: Path, now: str, directory: str) -> dict[str, File]:
    words = shlex.split(text.replace("[", "").replace("]", "").replace('",', '"'))
    if any(word.startswith("--from") for word in words):
        raise ValueError("a workspace is built in one stage")
    *sources, target = (word for word in words if not word.startswith("--"))
    place = PurePosixPath(now, target)
    if not place.is_relative_to(directory):
        raise ValueError(f"it copies to {place}; a workspace has only what is below {directory}")
    inside = place.relative_to(directory)
    found: dict[str, File] = {}
    for source in sources:
        if "://" in source or not is_safe(source.lstrip("/") or "."):
            raise ValueError(f"it copies {source}; only files beside it can be copied")
        chosen = [folder] if source in (".", "./", "/") else sorted(folder.glob(source.strip("/").removeprefix("./")))
        if not chosen:
            raise ValueError(f"there is no {source} to copy")
        for one in chosen:
            if one.is_dir():
                found |= {
                    str(inside / name): file for name, file in tree_of(one).items() if _is_content(one, folder, name)
                }
            else:
                is_folder = (
                    target.endswith(("/", ".")) or len(chosen) > 1 or len(sources) > 1 or place == PurePosixPath(now)
                )
                content = tree_of(one.parent)[one.name]
                found[str(inside / one.name if is_folder else inside)] = content
    return found


def _is_content(chosen: Path, folder: Path, name: str) -> bool:
    first = PurePosixPath(name).parts[0]
    return chosen != folder or first not in {"Dockerfile", "docker-compose.yaml", "tests", "solution", "solution.sh"}


def _variables(text: str) -> dict[str, str]:
    words = shlex.split(text)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])} if len(words) > 1 else {}
    return dict(word.split("=", 1) for word in words if "=" in word)
