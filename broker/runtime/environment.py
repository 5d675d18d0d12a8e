"""Restricts the environment of a worker to an allowlist of variables.

A list of secret variables would never be complete. Other contents of a shell (keys of model providers, tokens of
forges, passwords of databases) are for controller workers only.

Holds: a worker of any other role gets the variables that programs need to run, and our own settings except those of
models and of other roles. Tool workers also get the variables named in the operator's files of MCP servers and of
secret sources, and in DECKHANDS_PASS_ENV. Jobs workers get the variables of the cloud that holds the archive or the
checkpoints; tool workers those of the cloud that holds the checkpoints.
Does not: restrict controller workers. They call models, and the variables that a provider's library reads are unknown.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

CONTROLLER, TOOLS, INGRESS, JOBS, BEAT = "controller", "tools", "ingress", "jobs", "beat"
"""The roles of workers, named as the commands that start them."""
SERVICES = "services"
"""An ingress, a jobs worker and a beat in one process. It gets the variables of a jobs worker; no other gets more."""

PROGRAM_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "XDG_*_HOME", "XDG_RUNTIME_DIR"),
    *("TMPDIR", "TEMP", "TMP"),
    *("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("DECKHANDS_*", "OTEL_*"),
)
TOOL_WORKER_VARIABLES = (
    *(*PROGRAM_VARIABLES, "SANDBOX_ENV_*", "NO_CHANGE_TIMEOUT_SECONDS", "PLAYWRIGHT_*"),
    *("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"),  # the API server's address, in every pod
)
ALLOWED = {
    TOOLS: TOOL_WORKER_VARIABLES,
    INGRESS: (*PROGRAM_VARIABLES, "OPENHANDS_USE_SDK_AGENTS"),
    JOBS: (*PROGRAM_VARIABLES, "OPENHANDS_USE_SDK_AGENTS"),
    BEAT: PROGRAM_VARIABLES,
}
REFUSED = {
    TOOLS: ("LLM_*", "LITELLM_*", "DECKHANDS_API_KEY"),
    INGRESS: ("DECKHANDS_API_KEY",),
    JOBS: ("DECKHANDS_API_KEY",),
    # For Celery's broker only.
    BEAT: (
        *("DECKHANDS_API_KEY", "DECKHANDS_SECRET_KEY*", "DECKHANDS_MASTER_KEYS*"),
        *("DECKHANDS_URL", "DECKHANDS_URL_FILE"),
    ),
}
PASS_ENV = "DECKHANDS_PASS_ENV"  # noqa: S105  (a name)
TABLES = ("DECKHANDS_MCP", "DECKHANDS_SECRET_SOURCES", "DECKHANDS_SKILL_CREDENTIALS")
"""The operator's files for tool workers that name variables."""
MAX_CAUSES = 10
STORAGE_SETTINGS = {JOBS: ("DECKHANDS_ARCHIVE", "DECKHANDS_CHECKPOINTS"), TOOLS: ("DECKHANDS_CHECKPOINTS",)}
"""The settings with a storage location that a role reads and writes."""
CLOUD_VARIABLES = {
    "s3": ("AWS_*", "FSSPEC_*"),
    "gs": ("GOOGLE_*", "GCS_*", "FSSPEC_*"),
    "abfs": ("AZURE_*", "FSSPEC_*"),
    "file": (),
}
"""The variables that fsspec reads for a location, by URL scheme; `FSSPEC_*` for all other schemes."""
SAME_CLOUD = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs", "adl": "abfs"}

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""The syntax of a variable in a file of MCP servers, of secret sources or of passwords."""


def make_worker_environment(role: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a worker of a role. No other code decides this."""
    role = JOBS if role == SERVICES else role
    if role == CONTROLLER:
        return dict(environment)
    listed = [*ALLOWED[role]]
    if role == TOOLS:
        listed += [word.strip() for word in environment.get(PASS_ENV, "").split(",")]
        listed += [name for table in TABLES for name in _find_variables(environment.get(table, ""))]
    for name in STORAGE_SETTINGS.get(role, ()):
        schemes, separator, _ = environment.get(name, "").strip().partition("://")
        if separator:
            scheme = schemes.rpartition("::")[2]
            listed += CLOUD_VARIABLES.get(SAME_CLOUD.get(scheme, scheme), ("FSSPEC_*",))
    refused = REFUSED[role]
    return {
        name: value for name, value in environment.items() if _matches(name, listed) and not _matches(name, refused)
    }


def find_missing_variable(error: BaseException) -> str:
    """Return the missing environment variable that an error names; empty if it names none."""
    seen: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if seen is None:
            break
        frames = [frame for frame, _ in traceback.walk_tb(seen.__traceback__)]
        if isinstance(seen, KeyError) and frames and frames[-1].f_code is os._Environ.__getitem__.__code__:  # noqa: SLF001
            return str(seen.args[0])
        seen = seen.__cause__ or seen.__context__
    return ""


def explain_passing(variable: str) -> str:
    """Return the instruction for an operator whose tool worker lacks a variable."""
    return f"Set it where the tool worker is started, and pass it on by {PASS_ENV}={variable}."


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _find_variables(path: str) -> list[str]:
    """Return the variables named in a file of the operator. The tool worker itself reports an unreadable file."""
    try:
        return VARIABLE.findall(Path(path.strip()).expanduser().read_text("utf-8", "replace")) if path.strip() else []
    except (OSError, RuntimeError):
        return []
