"""The settings of the command line, from the environment; the only module of this package that reads it.

Holds: the environment is read once, when a command starts, and handed unchanged to the workers it starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from broker.runtime import BrokerSettings, UsageError
from deckhands.configuration import read_configuration

SANDBOXES = ("auto", "bwrap", "docker", "kubernetes", "none")
SANDBOX_REMEDY = (
    "Use auto, bwrap, docker, kubernetes or none, or the name of a sandbox that a package of the tool workers has."
)
MODEL_VARIABLES = ("LLM_MODEL", "LITELLM_MODEL")
PROFILES_VARIABLE = "LLM_CONFIG"
PLAIN_VARIABLES = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV")


def is_sandbox_name(name: str) -> bool:
    """Return whether tool workers may have a sandbox with this name: ours, or one of a package with a distinct name."""
    if name in SANDBOXES:
        return True
    from broker.contract import SANDBOX_PATTERN  # late: it imports pydantic, and most commands need neither

    return re.fullmatch(SANDBOX_PATTERN, name) is not None and not get_close_matches(name, SANDBOXES)


def read_configuration_files(*, others: Collection[str] = ()) -> list[str]:
    """Add the values of `.env` and `deckhands.toml` to this process' environment, and return the notices to print.

    Args:
        others: variables to read from `.env` in addition to our own.

    Raises:
        UsageError: a file cannot be read or is invalid.
    """
    try:
        directory = Path.cwd()
    except OSError:  # the directory was removed, so it has no files
        return []
    found = read_configuration(os.environ, directory, others=others)
    os.environ.update(found.values)
    return found.notices


def read_plain_environment() -> dict[str, str]:
    """Return the variables with which Python finds our code: no setting and no secret."""
    return {name: os.environ[name] for name in PLAIN_VARIABLES if name in os.environ}


def skip_pydantic_plugins(env: MutableMapping[str, str] = os.environ) -> None:
    """Keep Pydantic from reading the metadata of every installed package in search of plugins, unless the user says."""
    env.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def takes_colour() -> bool:
    """Return whether a terminal supports colours: not with NO_COLOR (https://no-color.org), and not if it is dumb."""
    return not os.environ.get("NO_COLOR") and can_redraw()


def can_redraw(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a terminal can move its cursor, according to TERM."""
    return env.get("TERM", "") != "dumb"


@dataclass(frozen=True, slots=True)
class CliSettings:
    """The settings of one command.

    Attributes:
        url: the store named by DECKHANDS_URL or DECKHANDS_URL_FILE; None if none is named.
        archive: the location of archived conversations; empty for none.
        api_key: the API key for a server; empty for none.
        home: the directory of embedded clusters and runs.
        model: the model named by the environment; None if none is named.
        has_profiles: whether a file of model profiles is named, which may name the model.
        sandbox: the sandbox of workspaces: `auto`, `bwrap`, `docker`, `kubernetes` or `none`.
        debug: show tracebacks instead of one-line errors.
        environment: all variables, for the workers.
    """

    url: str | None
    archive: str
    api_key: str = field(repr=False)
    shards: int | None
    home: Path
    model: str | None
    has_profiles: bool
    sandbox: str
    debug: bool
    environment: Mapping[str, str]

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> CliSettings:
        """Read the settings.

        Raises:
            UsageError: a name that starts with DECKHANDS_ is unknown, or a value is invalid.
        """
        broker = BrokerSettings.from_env(env)
        if not is_sandbox_name(broker.sandbox):
            raise UsageError(f"DECKHANDS_SANDBOX is {broker.sandbox!r}.", remedy=SANDBOX_REMEDY)
        return cls(
            url=broker.url if broker.url_file or env.get("DECKHANDS_URL", "").strip() else None,
            archive=broker.archive,
            api_key=broker.api_key,
            shards=broker.shards,
            home=broker.home.absolute(),
            model=next((found for name in MODEL_VARIABLES if (found := env.get(name, "").strip())), None),
            has_profiles=bool(env.get(PROFILES_VARIABLE, "").strip()),
            sandbox=broker.sandbox,
            debug=broker.debug,
            environment=dict(env),
        )
