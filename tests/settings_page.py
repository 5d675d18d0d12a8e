"""docs/settings.md, made of the classes that read settings. `make docs` writes it, and a test compares it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from pydantic.fields import FieldInfo

from broker.runtime.bounds import resolve_setting_types
from broker.runtime.environment import TOOL_WORKER_VARIABLES
from broker.runtime.settings import PREFIX, BrokerSettings
from controller_worker.providers.config import CONFIG_FILE_VARIABLE, ENV_FALLBACK_FIELDS, LITELLM_ENVIRONMENT, LLMConfig
from controller_worker.settings import ControllerVariables
from deckhands.configuration import TABLES
from tests.class_reference import attributes, shown_default, shown_type, table
from tool_worker.settings import (
    DEFAULT_NO_CHANGE_TIMEOUT_SECONDS,
    NO_CHANGE_TIMEOUT,
    SHELL_VARIABLE_PREFIX,
    ToolVariables,
)

HEAD = ("variable", "in a file", "value", "unit", "default", "meaning")
UNITS = {"seconds": "s", "bytes": "bytes", "tokens": "tokens", "chars": "characters", "token": "USD per token"}
"""By the last word of a setting's name."""
MODEL_UNITS = dict.fromkeys(
    ("retry_multiplier", "retry_min_wait", "retry_max_wait", "timeout", "connect_timeout", "first_byte_timeout"), "s"
) | {"read_timeout": "s"}
NOT_IN_FILES = {"config", "config_files"}

INTRODUCTION = f"""# Settings

Every setting of every process. `make docs` writes this page from the classes that read the settings, and a test compares the two.

- A command's option wins over the environment, the environment over `.env` in the working directory, `.env` over `deckhands.toml`, and that over the default. An empty variable counts as unset.
- A misspelt `{PREFIX}…` name is an error that names the nearest one; a misspelt `LLM_…` name is a warning.
- Commands read the two files and pass the values to the workers that they start. A worker under another supervisor, and the Python client, read only variables. A file that an agent or another user may have written is not read: in a repository, below a workspace root, or where other users may write. The command says so; `{PREFIX}CONFIG` names a file that is read in any case.
- Lists are texts with commas between them. `{PREFIX}WORKSPACE_ROOTS` has `:` between its directories, as `PATH` has.
- [The containers](deployment.md#settings) take some of these settings from the `.env` of `compose.yaml`, under shorter names.

In `deckhands.toml` a setting is a key without the prefix. The table `llm` holds the settings of the model, and `shell` the variables of every shell:

```toml
pools = ["bash", "ipython"]
workspace_idle_seconds = 600

[llm]
model = "anthropic/claude-sonnet-4-5"

[shell]
CI = "1"
```
"""

SECTIONS: Mapping[type[BrokerSettings], tuple[str, str]] = {
    BrokerSettings: ("All processes", "Workers, commands and the Python client read these."),
    ControllerVariables: ("Controller workers", "Only controller workers read these."),
    ToolVariables: ("Tool workers", "Only tool workers read these."),
}

MODELS = f"""## Models

Controller workers read these; tool workers never get them. [Models](models.md) explains them. `{CONFIG_FILE_VARIABLE}` names a file of [profiles](models.md#profiles), in which the keys of a table are the names after `llm.` below. Tables and lists are JSON, in a variable and in `deckhands.toml`."""

PASSED_TO_TOOL_WORKERS = (
    "A tool worker that `up`, `run` or `tools` starts gets the variables that `DECKHANDS_PASS_ENV` and the file of MCP "
    "servers name, and of all others only these:"
)
PASSED_TO_OTHERS = (
    "Ingresses, jobs workers and beats that `up`, `ingress`, `jobs` or `beat` starts get, of these, none of `SANDBOX_ENV_*`, "
    "`NO_CHANGE_TIMEOUT_SECONDS` and `PLAYWRIGHT_*`, and no variable that tool workers are passed. Jobs workers also get "
    "the variables of the cloud that `DECKHANDS_ARCHIVE` or `DECKHANDS_CHECKPOINTS` names, and tool workers those of the "
    "cloud that `DECKHANDS_CHECKPOINTS` names: `AWS_*`, `GOOGLE_*` and `GCS_*`, or `AZURE_*`, and `FSSPEC_*`. Controller workers get everything, and only they get `LLM_*` and the keys of providers."
)
OTHERS = (
    (
        f"`{CONFIG_FILE_VARIABLE}`",
        "controller workers, commands",
        "a TOML file of model profiles; empty: there are none. In a file: `llm.config`",
    ),
    (
        ", ".join(f"`LITELLM_{name.upper()}`" for name in ENV_FALLBACK_FIELDS),
        "controller workers, commands",
        "used where the variable of the same name with `LLM_` is not set",
    ),
    (
        "`LITELLM_API_BASE`",
        "`python -m deckhands.headless`",
        (
            "used where `LLM_BASE_URL` is not set; it reads OpenHands' variables, too, see "
            "[Migrating from OpenHands](parity.md#configuration)"
        ),
    ),
    (
        ", ".join(f"`{name}`" for name in LITELLM_ENVIRONMENT),
        "litellm",
        "set by controller workers, unless you have, so that litellm fetches no prices and reads no `.env`",
    ),
    (
        f"`{NO_CHANGE_TIMEOUT}`",
        "tool workers",
        f"seconds that a command may be silent before it is answered; `{DEFAULT_NO_CHANGE_TIMEOUT_SECONDS:g}`",
    ),
    (f"`{SHELL_VARIABLE_PREFIX}X`", "tool workers", "sets `X` in every shell; in a file: `shell.X`"),
    (
        "`KUBERNETES_SERVICE_HOST`, `KUBERNETES_SERVICE_PORT`",
        "tool workers",
        "the address of the API server, which Kubernetes gives to every pod, for the sandbox `kubernetes`",
    ),
    ("`PATH`", "tool workers", "the search path of shells without a sandbox"),
    ("`TMPDIR`", "workspace hosts", "where they put temporary files; `/tmp`"),
    (
        (
            "`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_SERVICE_NAME`, "
            "`OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER`, `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`"
        ),
        "all but workspace hosts",
        "where [traces](observability.md#traces) are sent, under which name, and whether; and the SDK's others",
    ),
    (
        "`ANTHROPIC_CUSTOM_HEADERS`",
        "controller workers",
        "further headers for Claude, which Anthropic's SDK adds; if it is set, requests go through the SDK",
    ),
    ("`NO_COLOR`, `TERM`", "commands", "no colours if `NO_COLOR` is set, or if `TERM` is `dumb`"),
    ("`PYDANTIC_DISABLE_PLUGINS`", "commands that read", "which plugins Pydantic does not load; by default all"),
    (
        "`DECKHANDS_HOST_ID`",
        "workspace hosts, containers",
        "set by tool workers, never by you: the host of a process",
    ),
    (
        "`DECKHANDS_IDEMPOTENCY_KEY`",
        "commands and cells of agents",
        "set by tool workers, never by you: the [key of the action](tools.md#a-key-for-each-action)",
    ),
)


def settings_page() -> str:
    parts = [INTRODUCTION]
    for owner, (title, text) in SECTIONS.items():
        parts += [f"## {title}\n\n{text}\n\n{table(HEAD, list(_rows_of(owner)))}\n"]
    parts += [f"{MODELS}\n\n{table(HEAD, list(_rows_of_models()))}\n"]
    parts += ["## Other variables\n", table(("variable", "read by", "meaning"), OTHERS), ""]
    passed = ", ".join(f"`{name}`" for name in TOOL_WORKER_VARIABLES)
    parts += [f"{PASSED_TO_TOOL_WORKERS} {passed}.\n", f"{PASSED_TO_OTHERS}\n"]
    return "\n".join(parts)


def own_fields(owner: type[BrokerSettings]) -> dict[str, FieldInfo]:
    """Return the settings that a class adds to those of all processes."""
    shared = set() if owner is BrokerSettings else {field.name for field in fields(BrokerSettings)}
    types = resolve_setting_types(owner)
    return {
        field.name: FieldInfo.from_annotated_attribute(types[field.name], field.default)
        for field in fields(owner)
        if field.name not in shared
    }


def _rows_of(owner: type[BrokerSettings]) -> Iterator[tuple[str, ...]]:
    for name, field in own_fields(owner).items():
        assert field.description, f"{owner.__name__}.{name} has no description"
        in_file = "" if name in NOT_IN_FILES else f"`{name}`"
        unit = UNITS.get(name.split("_")[-1], "")
        shown = _zero_is_a_default(field) or shown_default(field)
        yield f"`{PREFIX}{name.upper()}`", in_file, shown_type(field.annotation), unit, shown, field.description


def _rows_of_models() -> Iterator[tuple[str, ...]]:
    (name_of_table,) = (name for name, prefix in TABLES.items() if prefix == "LLM_")
    said = attributes(LLMConfig)
    for name, field in LLMConfig.model_fields.items():
        assert name in said, f"the docstring of LLMConfig does not say what {name} means"
        kind = re.sub(r"\[`\w+`\]\(#\w+\)", "table", shown_type(field.annotation))
        unit = MODEL_UNITS.get(name) or UNITS.get(name.split("_")[-1], "")
        shown = _zero_is_a_default(field) or shown_default(field)
        yield f"`LLM_{name.upper()}`", f"`{name_of_table}.{name}`", kind, unit, shown, _for_readers(said[name])


def _for_readers(text: str) -> str:
    """Return a line of a docstring without the names of modules, and with values as a variable holds them."""
    text = re.sub(r" \(see `\w+`\)|; see `\w+`", "", text)
    for python, variable in (("None", "unset"), ("True", "`1`"), ("False", "`0`")):
        text = re.sub(rf"\b{python}\b", variable, text)
    return text


def _zero_is_a_default(field: FieldInfo) -> str:
    return "`0`" if field.default == 0 and field.default is not False else ""
