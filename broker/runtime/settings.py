"""What the processes of a cluster must agree on, read from the environment; the only place in broker that reads it.

Holds: a misspelt `DECKHANDS_…` name is an error that names the nearest one, never a setting that silently does nothing.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from broker.runtime.errors import UsageError

PREFIX = "DECKHANDS_"
DEFAULT_URL = "redis://127.0.0.1:6379/0"
HEARTBEAT_TTL_SECONDS = 1.7
LEAST_HEARTBEAT_TTL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Settings; each is read from `DECKHANDS_` and its name in capitals.

    Attributes:
        url: the log's store.
        celery_url: Celery's broker; the log's server, database 1, when not given.
        shards: for a store that has never been used.
        home: where embedded clusters and runs live.
        node: id of this machine for workspaces; must stay the same across restarts. Empty: the host's name.
        node_dir: where workspaces, host sockets and journals live. Empty: `<home>/node`.
        workspace_roots: directories below which conversations may name one to work in, as `joined_paths` writes them.
            Empty: they may name none.
        pools: what this tool worker can do, separated by commas.
        tools: tools that this tool worker offers, `module:attribute`, separated by commas.
        pass_env: names or patterns of variables, separated by commas, that the tool workers of an embedded cluster, and
            `deckhands tools`, get besides those of `broker.runtime.environment`.
        mcp: a file that names the MCP servers whose tools this tool worker offers.
        sandbox: what workspaces run in here: `auto`, `bwrap`, `docker` or `none`.
        docker_images: patterns of images that containers may have, separated by commas; the first is used where none is
            asked for.
        docker_host: address of the engine, if it is not the usual one.
        docker_cpus: how many a container may keep busy; 0: all.
        workspace_memory_bytes: bound for all programs of a workspace together; 0: half of the machine's.
        workspace_processes: how many it may have at once.
        egress: hosts that workspaces of this tool worker may be given, separated by commas; `none`; empty: any, and the
            whole network too.
        egress_private: networks that they may reach by name although they are not public, separated by commas.
        repository_roots: directories of this machine below which repositories may be cloned (`git+file://`), separated
            by commas. Empty: none may be.
        egress_bytes: that a workspace with a list of hosts may move, in both directions together.
        chromium: where Chromium is, for the pool `browser`. Empty: where it is usually installed.
        quotas: what providers let us call: the path of a TOML file, or the table itself; see docs/quotas.md.
        hooks: a file that names what a controller worker does before and after what happens; see docs/hooks.md.
        heartbeat_ttl_seconds: how long after a worker's last heartbeat it is presumed dead, on a fast store.
        concurrency: actions a tool worker runs at once.
        max_conversations: conversations a controller worker holds at once.
        idle_seconds: how long a conversation that only waits is kept in memory.
        workspace_ttl_seconds: how long a workspace's processes outlive the last use.
        workspace_idle_seconds: how long they outlive it when only a shell is left that waits.
        workspace_ends_with_worker: whether a tool worker that stops ends the processes of workspaces in which only a
            shell is left that waits, and whose conversations have ended; embedded clusters want it.
        workspace_keep_seconds: how long the directory of a closed conversation is kept after its last use.
        workspace_bytes: how much the regular files of a workspace of ours may hold together.
        workspace_files: how many entries it may have.
        node_lost_seconds: how long none of this node's tool workers has to be heard of until its workspaces go on
            at other nodes, from their checkpoints.
        checkpoints: where workspaces are saved: a directory's `file://` URL, or any that fsspec knows. Empty: nowhere.
        checkpoint_every: after how many actions that may change files a workspace is saved.
        store_patched: the store's server has the fixes of newer versions, whatever its number says (see
            `broker.store.server_versions`).
        secret_key: encrypts the secrets of conversations: 32 bytes in base64, the same for all workers and clients.
        secret_key_file: a file that holds it. Neither: `<home>/secret.key`, made when the first secret is kept.
        debug: tracebacks instead of one-line errors.
        failpoints: see `failpoints`; for tests.
        failpoint_log: file in which hits of failpoints are noted; for tests.
    """

    url: str = DEFAULT_URL
    celery_url: str = ""
    shards: int = 1
    home: Path = Path("~/.deckhands")
    node: str = ""
    node_dir: str = ""
    workspace_roots: str = ""
    pools: str = "bash"
    tools: str = ""
    pass_env: str = ""
    mcp: str = ""
    sandbox: str = "auto"
    docker_images: str = ""
    docker_host: str = ""
    docker_cpus: float = 0.0
    workspace_memory_bytes: int = 0
    workspace_processes: int = 4096
    egress: str = ""
    egress_private: str = ""
    repository_roots: str = ""
    egress_bytes: int = 20 * 2**30
    chromium: str = ""
    quotas: str = ""
    hooks: str = ""
    heartbeat_ttl_seconds: float = HEARTBEAT_TTL_SECONDS
    concurrency: int = 64
    max_conversations: int = 2_000
    idle_seconds: float = 30.0
    workspace_ttl_seconds: float = 3_600.0
    workspace_idle_seconds: float = 300.0
    workspace_ends_with_worker: bool = False
    workspace_keep_seconds: float = 604_800.0
    workspace_bytes: int = 4 * 2**30
    workspace_files: int = 200_000
    node_lost_seconds: float = 120.0
    checkpoints: str = ""
    checkpoint_every: int = 10
    store_patched: bool = False
    secret_key: str = ""
    secret_key_file: str = ""
    debug: bool = False
    failpoints: str = ""
    failpoint_log: str = ""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> BrokerSettings:
        """Read the settings; empty values count as unset.

        Raises:
            UsageError: a name is unknown or a value cannot be used.
        """
        known = {field.name: field for field in fields(cls)}
        values: dict[str, object] = {}
        for name, text in env.items():
            if not name.startswith(PREFIX) or not text.strip():
                continue
            key = name.removeprefix(PREFIX).lower()
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"Did you mean {PREFIX}{near[0].upper()}?" if near else "Unset it."
                raise UsageError(f"The environment variable {name} is not known.", remedy=hint)
            values[key] = _converted(name, text.strip(), str(known[key].type))
        settings = cls(**values)  # type: ignore[arg-type]
        for name in ("concurrency", "max_conversations"):
            if (value := getattr(settings, name)) < 1:
                raise UsageError(f"{PREFIX}{name.upper()} is {value}.", remedy="It must be 1 or more.")
        if settings.heartbeat_ttl_seconds < LEAST_HEARTBEAT_TTL_SECONDS:
            found, least = settings.heartbeat_ttl_seconds, LEAST_HEARTBEAT_TTL_SECONDS
            raise UsageError(f"{PREFIX}HEARTBEAT_TTL_SECONDS is {found:g}.", remedy=f"It must be {least:g} or more.")
        if not 1 <= settings.shards <= 1024:
            raise UsageError(f"{PREFIX}SHARDS is {settings.shards}.", remedy="Use 1 to 1024.")
        try:
            object.__setattr__(settings, "home", settings.home.expanduser())
        except RuntimeError as error:  # a user whom nobody knows, or without a home
            raise UsageError(
                f"The directory {settings.home} cannot be found: {error}", remedy="Name a directory by DECKHANDS_HOME."
            ) from error
        object.__setattr__(settings, "celery_url", settings.celery_url or celery_url_beside(settings.url))
        return settings


def celery_url_beside(url: str) -> str:
    """Return kombu's URL of database 1 of a store's server."""
    if url.startswith("unix://"):
        return f"redis+socket://{url.removeprefix('unix://').partition('?')[0]}?virtual_host=1"
    parts = urlsplit(url)
    kept = [(name, value) for name, value in parse_qsl(parts.query) if name != "db"]
    return urlunsplit(parts._replace(path="/1", query=urlencode(kept)))


def joined_paths(paths: Iterable[Path | str]) -> str:
    r"""Write paths as a variable holds them: with `:` between them, as in PATH, and `\:` for one in a name."""
    return ":".join(str(path).replace(":", r"\:") for path in paths)


def split_paths(text: str) -> tuple[str, ...]:
    """Read what `joined_paths` wrote."""
    return tuple(path.replace(r"\:", ":") for path in re.split(r"(?<!\\):", text) if path)


def _converted(name: str, text: str, kind: str) -> object:
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            number = float(text)
    except ValueError as error:
        raise UsageError(f"{name} is {text!r}.", remedy="It must be a number.") from error
    if kind == "float":
        if not 0 <= number < math.inf:
            raise UsageError(f"{name} is {text!r}.", remedy="It must be a number, 0 or above.")
        return number
    if kind == "bool":
        return text.lower() in ("1", "true", "yes", "on")
    return Path(text) if kind == "Path" else text
