"""The parts of a Dockerfile that a workspace supports: the files that it copies, its variables, and its commands.

Holds: an unsupported part is an error, except for those listed in `left_out`: the node chooses the image, programs that
a command installs must exist already, and no service is started.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from deckhands.evaluation.datasets.file_trees import TreeFile, read_tree
from deckhands.evaluation.datasets.repositories import is_safe

INSTALLERS = re.compile(
    r"(sudo\s+)?(apt-get|apt|apk|dnf|yum|microdnf|pip3?|uvx?|npm|yarn|pnpm|conda|mamba|gem|cargo install|go install|"
    r"curl|wget|python3? -m pip|rm -rf /(var|root)/|useradd|groupadd|chown|locale-gen|ln -s)\b"
)
IGNORED = frozenset(
    {"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "USER", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "SHELL", "MAINTAINER"}
)
SILENT = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL"})
"""Instructions without an effect on the agent or a test."""
ARCHIVES = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$")
MAX_SHOWN_CHARS = 60


@dataclass(slots=True)
class DockerfileWorkspace:
    """A workspace built from a Dockerfile.

    Attributes:
        directory: the working directory of its commands in the image.
        files: the files below that directory.
        variables: environment variables.
        commands: its commands, without those that only install programs.
        left_out: parts of the Dockerfile that the workspace does not have.
    """

    directory: str = "/app"
    files: dict[str, TreeFile] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def parse_dockerfile(path: Path, *, directory: str = "") -> DockerfileWorkspace:
    """Return the workspace for a Dockerfile; `COPY` reads from the Dockerfile's directory.

    Args:
        directory: the directory that becomes the workspace, if it is not the last `WORKDIR`.

    Raises:
        ValueError: a line requires a feature that a workspace does not have.
    """
    found, lines = DockerfileWorkspace(), _parse_lines(path.read_text(encoding="utf-8"))
    places = [words[0] for _, name, text in lines if name == "WORKDIR" and (words := shlex.split(text))]
    found.directory = directory or (str(PurePosixPath("/", *places)) if places else found.directory)
    if found.directory == "/":
        raise ValueError("its working directory is /: a workspace cannot stand for all files")
    now, images = "/", 0
    for number, name, text in lines:
        try:
            if name == "FROM":
                images += 1
            now = _apply_instruction(found, path.parent, name, text, now=now, images=images)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
    return found


def _apply_instruction(found: DockerfileWorkspace, folder: Path, name: str, text: str, *, now: str, images: int) -> str:
    """Apply an instruction, and return the working directory of the next one."""
    match name:
        case "FROM":
            if images > 1:
                raise ValueError("a workspace is built in one stage")
            found.left_out.append(f"FROM {text} is ignored: the programs are those of the node")
        case "WORKDIR":
            return str(PurePosixPath(now, shlex.split(_literal(name, text))[0]))
        case "COPY" | "ADD":
            found.files |= _copy(name, _literal(name, text), folder, now, found.directory)
            found.left_out += [
                f"{name} {word.split('=')[0]} is ignored" for word in text.split() if word.startswith("--ch")
            ]
        case "ENV" | "ARG":
            found.variables |= _parse_variables(text)
        case "RUN":
            _run(found, text, now)
        case _ if name not in IGNORED:
            raise ValueError(f"{name} is not known")
        case _ if name not in SILENT:
            found.left_out.append(f"{name} is ignored: {_short(text)}")
    return now


def _run(found: DockerfileWorkspace, text: str, now: str) -> None:
    if text.startswith("--"):
        raise ValueError(f"RUN {text.split('=', maxsplit=1)[0].split(maxsplit=1)[0]} is not supported")
    if "<<" in text:
        raise ValueError("RUN with a here-document is not supported")
    if text.startswith("["):
        try:
            text = shlex.join(json.loads(text))
        except (ValueError, TypeError) as error:
            raise ValueError("RUN has no list of words") from error
    command = text
    # else `&&` may be part of a text, and later commands may depend on earlier ones
    if not re.search(r"[\"';|\n]", text):
        parts = [part.strip() for part in text.split("&&")]
        command = " && ".join(part for part in parts if not INSTALLERS.match(part))
    elif all(INSTALLERS.match(part.strip()) for part in re.split(r"&&|;|\n", text) if part.strip()):
        command = ""
    if command != text:
        found.left_out.append(f"RUN installs nothing: {_short(text)}")
    elif any(INSTALLERS.match(part.strip()) for part in re.split(r"&&|;|\n", text)):
        found.left_out.append(f"RUN runs without the network: {_short(text)}")
    if not command:
        return
    place = PurePosixPath(now)
    if now != "/" and str(place) != found.directory:
        if not place.is_relative_to(found.directory):
            raise ValueError(f"it runs a command in {now}; a workspace has only what is below {found.directory}")
        command = f"mkdir -p {shlex.quote(str(place))} && cd {shlex.quote(str(place))} && {command}"
    found.commands.append(command)


def _literal(name: str, text: str) -> str:
    if "$" in text:
        raise ValueError(f"{name} names a variable, which is not supported: {_short(text)}")
    if "<<" in text:
        raise ValueError(f"{name} with a here-document is not supported")
    return text


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN_CHARS else f"{line[:MAX_SHOWN_CHARS]}…"


def _parse_lines(text: str) -> list[tuple[int, str, str]]:
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


def _copy(name: str, text: str, folder: Path, now: str, directory: str) -> dict[str, TreeFile]:
    words = shlex.split(text.replace("[", "").replace("]", "").replace('",', '"'))
    if any(word.startswith("--from") for word in words):
        raise ValueError("a workspace is built in one stage")
    *sources, target = (word for word in words if not word.startswith("--"))
    place = PurePosixPath(now, target)
    if not place.is_relative_to(directory):
        raise ValueError(f"it copies to {place}; a workspace has only what is below {directory}")
    inside = place.relative_to(directory)
    found: dict[str, TreeFile] = {}
    for source in sources:
        if "://" in source or not is_safe(source.lstrip("/") or "."):
            raise ValueError(f"it copies {source}; only files beside it can be copied")
        chosen = [folder] if source in (".", "./", "/") else sorted(folder.glob(source.strip("/").removeprefix("./")))
        if name == "ADD" and any(ARCHIVES.search(one.name) for one in chosen if one.is_file()):
            raise ValueError(f"ADD unpacks {source}, which is not supported: copy files")
        if not chosen:
            raise ValueError(f"there is no {source} to copy")
        for one in chosen:
            if one.is_dir():
                found |= {
                    str(inside / name): file for name, file in read_tree(one).items() if _is_content(one, folder, name)
                }
            else:
                is_folder = (
                    target.endswith(("/", ".")) or len(chosen) > 1 or len(sources) > 1 or place == PurePosixPath(now)
                )
                content = read_tree(one.parent)[one.name]
                found[str(inside / one.name if is_folder else inside)] = content
    return found


def _is_content(chosen: Path, folder: Path, name: str) -> bool:
    first = PurePosixPath(name).parts[0]
    return chosen != folder or first not in {"Dockerfile", "docker-compose.yaml", "tests", "solution", "solution.sh"}


def _parse_variables(text: str) -> dict[str, str]:
    if "$(" in text or "`" in text or re.search(r"\$\{\w*[^\w}]", text):
        raise ValueError(f"a variable of this form is not supported: {_short(text)}")
    words = shlex.split(text)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])} if len(words) > 1 else {}
    return dict(word.split("=", 1) for word in words if "=" in word)
