"""Configuration files: `.env` and `deckhands.toml` as environment variables for a command and its workers.

Holds: only commands read files; workers and the Python client read variables alone. The environment wins over `.env`,
which wins over the TOML file. Files of the working directory are not read if an agent or another user may have written
them: in a repository, below a workspace root, in the home of Deckhands, or in a directory that another user may change.
No workspace may contain a file that was read (`find_private_paths`).
Does not: check a file that DECKHANDS_CONFIG names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from broker.runtime import (
    CONFIG_FILE,
    CONFIG_FILES_READ,
    PREFIX,
    USE_SDK_AGENTS,
    BrokerSettings,
    UsageError,
    join_paths,
    split_paths,
)

DOTENV, TOML = ".env", "deckhands.toml"
OURS = (PREFIX, "LLM_", "LITELLM_", "SANDBOX_ENV_", "NO_CHANGE_TIMEOUT_SECONDS", USE_SDK_AGENTS)
"""The prefixes of the variables taken from `.env`; all others there belong to other programs."""
REPOSITORIES = (".git", ".hg", ".svn", ".jj")
TABLES = {"llm": "LLM_", "shell": "SANDBOX_ENV_"}
"""The tables of the TOML file, and the prefixes of their variables."""
WRITABLE_BY_ALL = 0o002


@dataclass(slots=True)
class Configuration:
    """Additions of files to an environment.

    Attributes:
        values: variables that the environment does not have.
        files: the files that were read.
        notices: why other files were left out.
    """

    values: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def read_configuration(env: Mapping[str, str], directory: Path, *, others: Collection[str] = ()) -> Configuration:
    """Read the configuration files of a command.

    Args:
        env: the environment of the command.
        directory: its working directory.
        others: further variables to take from `.env`.

    Raises:
        UsageError: a file cannot be read or is invalid; the text names it.
    """
    found = Configuration()
    named = env.get(CONFIG_FILE, "").strip()
    for path, read in (
        (directory / DOTENV, partial(_read_dotenv, others)),
        (Path(named or directory / TOML).expanduser(), _read_toml),
    ):
        is_named = bool(named) and read is _read_toml
        if not (is_named or path.is_file()):
            continue
        reason = "" if is_named else find_doubt(path, env)
        try:
            values = read(path)
            if not reason:
                _check(values)
        except (OSError, UsageError, ValueError) as error:
            if reason:
                continue
            raise _unusable(path, error) from error
        if values and reason:
            found.notices.append(f"{path} is not read: {reason}. Name a TOML file by {CONFIG_FILE}, or set variables.")
        elif values:
            found.values = values | found.values
            found.files.append(path.absolute())
    found.values = {name: text for name, text in found.values.items() if not env.get(name, "").strip()}
    if found.files:
        found.values[CONFIG_FILES_READ] = join_paths(found.files)
    return found


def _read_dotenv(others: Collection[str], path: Path) -> dict[str, str]:
    from dotenv import dotenv_values

    values = dotenv_values(path, interpolate=False, encoding="utf-8")
    return {name: text for name, text in values.items() if text and (name.startswith(OURS) or name in others)}


def _read_toml(path: Path) -> dict[str, str]:
    import tomllib  # few have such a file

    content = tomllib.loads(path.read_text("utf-8"))
    values: dict[str, str] = {}
    for name, value in content.items():
        if name in TABLES and isinstance(value, dict):
            values |= {f"{TABLES[name]}{key.upper()}": _text(f"{name}.{key}", item) for key, item in value.items()}
        else:
            separator = ":" if name == "workspace_roots" else ","
            values[f"{PREFIX}{name.upper()}"] = _text(name, value, separator)
    return values


def _text(name: str, value: object, separator: str = ",") -> str:
    """Return a value of a TOML file in the form of a variable."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return join_paths(value) if separator == ":" else separator.join(value)
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"{name} is {value!r}.", remedy="Write a text, a number, true, false, or a list of texts.")


def _check(values: Mapping[str, str]) -> None:
    for name in (CONFIG_FILE, CONFIG_FILES_READ):
        if name in values:
            raise UsageError(f"{name} cannot stand in a file.", remedy="Set it in the environment.")
    BrokerSettings.from_env(values)


def _unusable(path: Path, error: Exception) -> UsageError:
    if isinstance(error, UsageError):
        return UsageError(f"{path}: {error.message}", remedy=error.remedy)
    what = error.strerror if isinstance(error, OSError) else str(error)
    return UsageError(f"The file {path} cannot be read: {what}.", remedy="Correct it, or move it away.")


def find_doubt(path: Path, env: Mapping[str, str]) -> str:
    """Return why another user or an agent may have written a file of the working directory; empty if neither can."""
    return next(_doubts(path, env), "")


def _doubts(path: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Yield the reasons why another user or an agent may have written a file of the working directory."""
    directory = path.parent.resolve()
    for place in (directory, *directory.parents):
        if any((place / name).exists() for name in REPOSITORIES):
            yield f"it lies in the repository {place}"
    for root in _places_of_agents(env):
        if directory.is_relative_to(root):
            yield f"it lies in {root}, where agents work"
    for place in (path, directory):
        found = place.stat()
        if found.st_uid not in (os.getuid(), 0):
            yield f"{place} belongs to another user"
        if found.st_mode & WRITABLE_BY_ALL:
            yield f"every user can write {place}"


def _places_of_agents(env: Mapping[str, str]) -> list[Path]:
    settings = BrokerSettings.from_env({name: text for name, text in env.items() if name.startswith(PREFIX)})
    names = [*split_paths(settings.workspace_roots), *filter(None, [settings.node_dir]), str(settings.home)]
    return [Path(name).expanduser().resolve() for name in names]
