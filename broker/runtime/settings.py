"""The settings that several processes of a cluster share, read from variables named `DECKHANDS_…`.

Each worker declares its own settings in its own settings file, in a class derived from `BrokerSettings`. The default of
a variable is defined on its field and nowhere else.

Holds: a misspelt `DECKHANDS_…` name is an error that suggests the nearest one, never a setting that is silently
ignored.
Does not: read files. Commands convert `.env` and `deckhands.toml` to variables, see `deckhands.configuration`.
"""

from __future__ import annotations

import difflib
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field as DataclassField
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from broker.runtime.errors import UsageError

if TYPE_CHECKING:
    from pydantic import Field

PREFIX = "DECKHANDS_"
DEFAULT_URL = "redis://127.0.0.1:6379/0"
HEARTBEAT_TTL_SECONDS = 1.7
LEAST_HEARTBEAT_TTL_SECONDS = 1.0
USE_SDK_AGENTS = "OPENHANDS_USE_SDK_AGENTS"
"""An alias of `prefer_sdk_agents`, known to OpenHands' users."""
AGENT_VARIABLES = (
    USE_SDK_AGENTS,
    *(f"{PREFIX}{name}" for name in ("PREFER_SDK_AGENTS", "SDK_AGENTS_PERCENT")),
    *(f"{PREFIX}{name}" for name in ("FALLBACK_TO_LEGACY", "SDK_TIMEOUT_SECONDS")),
)
IDEMPOTENCY_KEY_VARIABLE = "DECKHANDS_IDEMPOTENCY_KEY"
"""Set for each command of an agent, so that commands of ours in a workspace must accept it. No setting."""
CONFIG_FILE = "DECKHANDS_CONFIG"
CONFIG_FILES_READ = "DECKHANDS_CONFIG_FILES"

WORKER_SETTINGS = frozenset(
    (
        *("max_conversations", "idle_seconds", "quotas", "tenants", "admit_memory", "hooks", "any_model"),
        *("sdk_sessions", "sdk_sandbox", "priced_models"),
        *("node", "pools", "labels", "tools", "pass_env", "mcp", "secret_sources", "concurrency", "chromium"),
        *("docker_images", "docker_host", "docker_cpus", "workspace_memory_bytes", "workspace_processes"),
        *("kubernetes_config", "kubernetes_pod", "kubernetes_template", "kubernetes_pending_seconds"),
        *("egress", "egress_private", "egress_bytes", "repository_roots", "skill_sources", "skill_credentials"),
        *("workspace_bytes", "workspace_files"),
        *("workspace_ttl_seconds", "workspace_idle_seconds", "workspace_ends_with_worker", "workspace_keep_seconds"),
        *("node_lost_seconds", "checkpoint_every", "git_user_name", "git_user_email"),
    )
)
"""The settings that only one kind of worker reads. All other processes accept their names; the worker declares the
rest."""

Acks = Literal["local", "disk", "replica"]
"""When a write to the store counts; see `BrokerSettings.acks`."""


@dataclass(frozen=True, kw_only=True)
class BrokerSettings:
    """Settings that more than one kind of process reads: `DECKHANDS_` and the name of the field in capitals.

    The constructor uses defaults and its arguments; `from_env` reads variables. Pydantic converts those that are not
    texts or paths. It is imported only if one of them is set, because its import takes as long as a command that reads.
    """

    url: Annotated[
        str,
        Field(
            description="the log's store: `redis://`, `rediss://`, `unix://`, `redis+sentinel://` or `redis+cluster://`"
        ),
    ] = DEFAULT_URL
    url_file: Annotated[
        str,
        Field(
            description="a file that holds the store's URL, instead of `DECKHANDS_URL`; read again at each connection"
        ),
    ] = ""
    celery_url: Annotated[
        str, Field(description="Celery's broker; empty: database 1 of the store's server, unless it is a cluster")
    ] = ""
    celery_url_file: Annotated[
        str, Field(description="a file that holds the URL of Celery's broker; read again at each connection")
    ] = ""
    celery_result_url: Annotated[
        str, Field(description="the result backend of Celery tasks; empty: Celery's broker")
    ] = ""
    celery_name: Annotated[
        str,
        Field(description="name of Celery's broker, where several brokers share a store; empty: its address"),
    ] = ""
    acks: Annotated[
        Acks,
        Field(
            description="when a write to the store counts: `local`, at its reply; `disk`, when its append-only file is "
            "synchronized; `replica`, when one replica has it"
        ),
    ] = "local"
    shards: Annotated[
        int | None,
        Field(ge=1, le=1024, description="number of shards of a new store; empty: 1, and 64 on a Redis Cluster"),
    ] = None
    home: Annotated[Path, Field(description="the directory of embedded clusters and runs")] = Path("~/.deckhands")
    node_dir: Annotated[
        str, Field(description="the directory of workspaces, host sockets and journals; empty: `node` in the home")
    ] = ""
    workspace_roots: Annotated[
        str,
        Field(description="directories in which conversations may choose a workspace, separated by `:`; empty: none"),
    ] = ""
    sandbox: Annotated[
        str,
        Field(description="the sandbox of workspaces: `auto`, `bwrap`, `docker`, `kubernetes`, `none`, or a package's"),
    ] = "auto"
    checkpoints: Annotated[
        str, Field(description="the location of checkpoints: a URL that fsspec knows; empty: none")
    ] = ""
    archive: Annotated[
        str, Field(description="the location of archived conversations: a URL that fsspec knows; empty: none")
    ] = ""
    evaluations: Annotated[
        str, Field(description="the directory of evaluations started by Celery tasks; empty: such tasks are refused")
    ] = ""
    api_key: Annotated[
        str,
        Field(description='the API key of a server, for `Conversation(cluster="https://…")`; empty: none'),
    ] = field(default="", repr=False)
    retention: Annotated[
        str, Field(description="the TOML file with the retention of conversations in the store; empty: for ever")
    ] = ""
    operations_days: Annotated[
        int,
        Field(
            ge=0,
            le=36_500,
            description="how many days the record of operations keeps an entry; 0: for ever; read by jobs workers",
        ),
    ] = 400
    webhook_private: Annotated[str, Field(description="private networks that webhooks may reach, separated by `,`")] = (
        ""
    )
    heartbeat_ttl_seconds: Annotated[
        float,
        Field(
            ge=LEAST_HEARTBEAT_TTL_SECONDS,
            allow_inf_nan=False,
            description="time after its last heartbeat at which a worker is presumed dead, on a fast store",
        ),
    ] = HEARTBEAT_TTL_SECONDS
    prefer_sdk_agents: Annotated[
        bool,
        Field(description="new conversations use the SDK agent of their agent, if any; or `OPENHANDS_USE_SDK_AGENTS`"),
    ] = False
    sdk_agents_percent: Annotated[
        float,
        Field(
            ge=0,
            le=100,
            allow_inf_nan=False,
            description="the percentage of conversations that do, chosen by their ids",
        ),
    ] = 100.0
    fallback_to_legacy: Annotated[
        bool, Field(description="if the SDK cannot run, the legacy agent continues the conversation")
    ] = True
    sdk_timeout_seconds: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False, description="time limit for the SDK's first model call once it may make it"),
    ] = 120.0
    store_patched: Annotated[
        bool, Field(description="the store's server has the fixes of newer versions, whatever its version number")
    ] = False
    secret_key: Annotated[
        str,
        Field(
            description="key for secrets and archives: 32 bytes in base64, the same for all workers and clients",
        ),
    ] = field(default="", repr=False)
    secret_key_file: Annotated[
        str, Field(description="a file that holds the key; neither: `secret.key` in the home, made when needed")
    ] = ""
    master_keys: Annotated[
        str,
        Field(
            description="keys that encrypt conversations at rest: `ID:KEY`, separated by `,`; the first one encrypts; "
            "empty: no encryption",
        ),
    ] = field(default="", repr=False)
    master_keys_file: Annotated[
        str, Field(description="a file that holds them, instead of `DECKHANDS_MASTER_KEYS`")
    ] = ""
    config: Annotated[
        str, Field(description="the TOML file that commands read; empty: `deckhands.toml` in the working directory")
    ] = ""
    config_files: Annotated[
        str, Field(description="set by commands: the files that they read, which no workspace may hold")
    ] = ""
    log_format: Annotated[
        Literal["text", "json"],
        Field(description="the format of workers' logs: `text`, or `json`, one object per line"),
    ] = "text"
    debug: Annotated[bool, Field(description="tracebacks instead of one-line errors")] = False
    failpoints: Annotated[str, Field(description="for tests: the failpoints to arm")] = ""
    failpoint_log: Annotated[str, Field(description="for tests: the file that records hits of failpoints")] = ""

    @property
    def result_url(self) -> str:
        """The result backend of Celery tasks."""
        return self.celery_result_url or self.celery_url

    @property
    def broker_name(self) -> str:
        """The name of Celery's broker among others that share the store; empty if it is the store's own server."""
        place = _find_address(self.celery_url or make_celery_url(self.url))
        return self.celery_name or ("" if place == _find_address(make_celery_url(self.url)) else place)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings from variables. Empty values count as unset.

        Raises:
            UsageError: a name is unknown or a value is invalid.
        """
        _check_names(cls, env)
        given = {name.removeprefix(PREFIX).lower(): text for name, text in env.items() if name.startswith(PREFIX)}
        values = {
            one.name: _convert(cls, one, text) for one in fields(cls) if (text := given.get(one.name, "").strip())
        }
        settings = cls(**values)
        try:
            home = settings.home.expanduser()
        except RuntimeError as error:  # an unknown user, or one without a home
            raise UsageError(
                f"The directory {settings.home} cannot be found: {error}", remedy="Name a directory by DECKHANDS_HOME."
            ) from error
        url = _find_url_file(env, "URL", settings.url_file) or settings.url
        beside = url.derive(make_celery_url) if isinstance(url, UrlInFile) else make_celery_url(url)
        celery_url = _find_url_file(env, "CELERY_URL", settings.celery_url_file) or settings.celery_url or beside
        resolved: dict[str, Any] = {"home": home, "url": url, "celery_url": celery_url}
        if not env.get(f"{PREFIX}PREFER_SDK_AGENTS", "").strip():
            resolved["prefer_sdk_agents"] = _parse_flag(USE_SDK_AGENTS, env.get(USE_SDK_AGENTS, "").strip())
        return replace(settings, **resolved)


class UrlInFile(str):
    """A URL from a file, as it was when it was read. `load_current_url` reads it again.

    Attributes:
        path: the file.
    """

    __slots__ = ("_derive", "path")
    path: Path
    _derive: Callable[[str], str]

    def __new__(cls, path: Path, derive: Callable[[str], str] = str) -> Self:
        """Read the file.

        Args:
            derive: converts the URL in the file to the required form.

        Raises:
            UsageError: the file cannot be read, or holds no URL.
        """
        try:
            text = path.read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UsageError(
                f"The file {path} with a URL cannot be read: {reason}.", remedy="Make it readable."
            ) from error
        if "://" not in text or len(text.split()) != 1:
            raise UsageError(
                f"The file {path} does not hold a URL.",
                remedy="Write one line, such as redis://user:password@host:6379/0.",
            )
        made = super().__new__(cls, derive(text))
        made.path = path
        made._derive = derive
        return made

    def derive(self, derive: Callable[[str], str]) -> UrlInFile:
        """Return a URL derived from the current content of the file. Raises the same errors as the constructor."""
        return UrlInFile(self.path, lambda text: derive(self._derive(text)))

    def read(self) -> str:
        """Return the current URL. Raises the same errors as the constructor."""
        return str(UrlInFile(self.path, self._derive))


def load_current_url(url: str) -> str:
    """Return a URL of the settings, read again if it is in a file.

    Raises:
        UsageError: the file cannot be read or used.
    """
    return url.read() if isinstance(url, UrlInFile) else url


def _find_url_file(env: Mapping[str, str], name: str, file: str) -> UrlInFile | None:
    if not file:
        return None
    if env.get(f"{PREFIX}{name}", "").strip():
        raise UsageError(
            f"Both {PREFIX}{name} and {PREFIX}{name}_FILE are set.",
            remedy=f"Unset one; {PREFIX}{name}_FILE can change.",
        )
    return UrlInFile(Path(file).expanduser().absolute())


def _check_names(settings: type[BrokerSettings], env: Mapping[str, str]) -> None:
    known = WORKER_SETTINGS | {one.name for one in fields(settings)}
    for name, text in env.items():
        if name == IDEMPOTENCY_KEY_VARIABLE:
            continue
        if name.startswith(PREFIX) and text.strip() and name.removeprefix(PREFIX).lower() not in known:
            near = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), known, n=1)
            hint = f"Did you mean {PREFIX}{near[0].upper()}?" if near else "Unset it."
            raise UsageError(f"The environment variable {name} is unknown.", remedy=hint)


def _convert(owner: type[BrokerSettings], setting: DataclassField[Any], text: str) -> Any:
    """Return the value of a setting.

    Raises:
        UsageError: the text is invalid.
    """
    if str(setting.type).startswith("Annotated[str,"):
        return text.strip()
    if str(setting.type).startswith("Annotated[Path,"):
        return Path(text)
    from broker.runtime.bounds import convert_setting

    return convert_setting(owner, setting.name, text, f"{PREFIX}{setting.name.upper()}")


def _parse_flag(name: str, text: str) -> bool:
    """Return the value of a flag that is not a field of the settings; False if it is empty."""
    if not text:
        return False
    from broker.runtime.bounds import parse_flag

    return parse_flag(name, text)


def logs_json() -> bool:
    """Return whether logs are JSON. For the start of a process, before its settings are validated."""
    return os.environ.get(f"{PREFIX}LOG_FORMAT", "").strip() == "json"


def find_agent_variables(env: Mapping[str, str] = os.environ) -> frozenset[tuple[str, str]]:
    """Return the variables that define the agents of new conversations, for `from_env`."""
    return frozenset((name, text) for name in AGENT_VARIABLES if (text := env.get(name, "").strip()))


def find_otel_variables() -> dict[str, str]:
    """Return the variables for OpenTelemetry's SDK, which reads them itself. Empty ones count as unset."""
    return {name: text.strip() for name, text in os.environ.items() if name.startswith("OTEL_") and text.strip()}


def make_celery_url(url: str) -> str:
    """Return kombu's URL of database 1 of a store's server; of Sentinels, our own form with database 1.

    Empty for a cluster: it has no other database, and kombu has no support for clusters.
    """
    if url.startswith("unix://"):
        return f"redis+socket://{url.removeprefix('unix://').partition('?')[0]}?virtual_host=1"
    parts = urlsplit(url)
    if parts.scheme.endswith("+cluster"):
        return ""
    if parts.scheme.endswith("+sentinel"):
        return urlunsplit(parts._replace(path=f"/{parts.path.strip('/').partition('/')[0]}/1"))
    kept = [(name, value) for name, value in parse_qsl(parts.query) if name != "db"]
    return urlunsplit(parts._replace(path="/1", query=urlencode(kept)))


URL_PASSWORD = re.compile(r"(?<=://)([^\s/:@]*):[^\s/@]*(?=@)")


def hide_password(text: str, instead: str = "**") -> str:
    """Mask the password of each URL in a text."""
    return URL_PASSWORD.sub(lambda found: f"{found.group(1)}:{instead}", text)


def _find_address(celery_url: str) -> str:
    """Return the normalized address of a broker's URL, without user and password."""
    parts = urlsplit(celery_url)
    if parts.scheme.endswith("+socket"):
        database = dict(parse_qsl(parts.query)).get("virtual_host", "")
        return f"/{posixpath.normpath(parts.path).lstrip('/')}:{database.strip('/') or 0}"
    if parts.scheme.endswith("+sentinel"):
        return f"{','.join(sorted(parts.netloc.rpartition('@')[2].split(',')))}/{parts.path.strip('/')}"
    return f"{parts.hostname or '127.0.0.1'}:{parts.port or 6379}/{parts.path.strip('/') or 0}"


def join_paths(paths: Iterable[Path | str]) -> str:
    r"""Join paths to the value of a variable: separated by `:` as in PATH, with `\:` for a colon in a name."""
    return ":".join(str(path).replace(":", r"\:") for path in paths)


def split_paths(text: str) -> tuple[str, ...]:
    """Split the value of `join_paths`."""
    return tuple(path.replace(r"\:", ":") for path in re.split(r"(?<!\\):", text) if path)
