"""What a program may know of the environment in which it is started: the variables that are listed here.

A list of what is secret would never be complete, and what a shell holds besides (cloud credentials, tokens of forges,
passwords of databases) is none of a tool worker's business, which runs what agents say.

Holds: a tool worker gets what programs need to run, our own settings, the variables that the operator's file of MCP
servers names, and those that DECKHANDS_PASS_ENV names; never a setting of models.
Does not: bound controller workers: they ask models, and which variables a provider's library reads cannot be listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

OF_TOOL_WORKERS = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_*_HOME", "XDG_RUNTIME_DIR"),
    *("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("DECKHANDS_*", "OTEL_*", "SANDBOX_ENV_*", "NO_CHANGE_TIMEOUT_SECONDS"),
)
OF_MODELS = ("LLM_*", "LITELLM_*")
PASSED_ON, MCP_FILE = "DECKHANDS_PASS_ENV", "DECKHANDS_MCP"

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""How a file of MCP servers names a variable."""


def tool_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a tool worker may know of an environment."""
    listed = (*OF_TOOL_WORKERS, *_patterns(environment.get(PASSED_ON, "")), *_named_by(environment.get(MCP_FILE, "")))
    return {name: value for name, value in environment.items() if _fits(name, listed) and not _fits(name, OF_MODELS)}


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
