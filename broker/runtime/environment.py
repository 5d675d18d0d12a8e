"""What a program may know of the environment in which it is started: the variables that are listed here.

A list of what is secret would never be complete, and what a shell holds besides (keys of model providers, tokens of
forges, passwords of databases) is the business of controller workers alone.

Holds: a worker of any other role gets what programs need to run and our own settings, without those of models and
without those that only other roles read; tool workers, too, the variables that the operator's file of MCP servers
names and those that DECKHANDS_PASS_ENV names; jobs workers those of the cloud in which the archive or the checkpoints
are, tool workers those of the cloud in which the checkpoints are.
Does not: bound controller workers: they call models, and which variables a provider's library reads cannot be listed.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

CONTROLLER, TOOLS, DOOR, JOBS, BEAT = "controller", "tools", "door", "jobs", "beat"
"""The roles of workers, as the commands that start them are called."""

OF_PROGRAMS = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "XDG_*_HOME", "XDG_RUNTIME_DIR"),
    *("TMPDIR", "TEMP", "TMP"),
    *("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("DECKHANDS_*", "OTEL_*"),
)
OF_TOOL_WORKERS = (*OF_PROGRAMS, "SANDBOX_ENV_*", "NO_CHANGE_TIMEOUT_SECONDS", "PLAYWRIGHT_*")
LISTED = {
    TOOLS: OF_TOOL_WORKERS,
    DOOR: (*OF_PROGRAMS, "OPENHANDS_USE_SDK_AGENTS"),
    JOBS: (*OF_PROGRAMS, "OPENHANDS_USE_SDK_AGENTS"),
    BEAT: OF_PROGRAMS,
}
REFUSED = {
    TOOLS: ("LLM_*", "LITELLM_*", "DECKHANDS_API_KEY"),
    DOOR: ("DECKHANDS_API_KEY",),
    JOBS: ("DECKHANDS_API_KEY",),
    # It reaches Celery's broker alone.
    BEAT: ("DECKHANDS_API_KEY", "DECKHANDS_SECRET_KEY*", "DECKHANDS_URL", "DECKHANDS_URL_FILE"),
}
PASSED_ON, MCP_FILE = "DECKHANDS_PASS_ENV", "DECKHANDS_MCP"
MAX_CAUSES = 10
PLACES = {JOBS: ("DECKHANDS_ARCHIVE", "DECKHANDS_CHECKPOINTS"), TOOLS: ("DECKHANDS_CHECKPOINTS",)}
"""The settings that name a place which a role reads and writes."""
OF_CLOUDS = {
    "s3": ("AWS_*", "FSSPEC_*"),
    "gs": ("GOOGLE_*", "GCS_*", "FSSPEC_*"),
    "abfs": ("AZURE_*", "FSSPEC_*"),
    "file": (),
}
"""What fsspec reads for a place, by the scheme of its URL; of all other schemes `FSSPEC_*`."""
SAME_CLOUD = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs", "adl": "abfs"}

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""How a file of MCP servers names a variable."""


def worker_environment(role: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a worker of a role may know of an environment: the one place that decides it."""
    if role == CONTROLLER:
        return dict(environment)
    listed = [*LISTED[role]]
    if role == TOOLS:
        listed += [*_patterns(environment.get(PASSED_ON, "")), *_named_by(environment.get(MCP_FILE, ""))]
    for name in PLACES.get(role, ()):
        schemes, separator, _ = environment.get(name, "").strip().partition("://")
        if separator:
            scheme = schemes.rpartition("::")[2]
            listed += OF_CLOUDS.get(SAME_CLOUD.get(scheme, scheme), ("FSSPEC_*",))
    refused = REFUSED[role]
    return {name: value for name, value in environment.items() if _fits(name, listed) and not _fits(name, refused)}


def find_missing_variable(error: BaseException) -> str:
    """Return the environment variable that a program has read in vain, if that is what an error says; or empty."""
    seen: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if seen is None:
            break
        frames = [frame for frame, _ in traceback.walk_tb(seen.__traceback__)]
        if isinstance(seen, KeyError) and frames and frames[-1].f_code is os._Environ.__getitem__.__code__:  # noqa: SLF001
            return str(seen.args[0])
        seen = seen.__cause__ or seen.__context__
    return ""


def say_how_to_pass(variable: str) -> str:
    """Return what an operator does about a variable that a tool worker lacks."""
    return f"Set it where the tool worker is started, and pass it on by {PASSED_ON}={variable}."


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _patterns(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _named_by(path: str) -> list[str]:
    """Return the variables that a file of MCP servers names; that it cannot be read the tool worker says."""
    try:
        return VARIABLE.findall(Path(path.strip()).expanduser().read_text("utf-8", "replace")) if path.strip() else []
    except (OSError, RuntimeError):
        return []
