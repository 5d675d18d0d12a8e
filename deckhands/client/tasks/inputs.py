"""Convert arguments of the client into specifications: names, paths and whole specifications are accepted.

Holds: an argument of a wrong type, or one that cannot be used, raises a `UsageError` with the name of the argument and
its valid forms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, Unpack, get_args

from pydantic import BaseModel

from broker.contract import (
    BUILT_IN_ANALYZERS,
    PLUGIN_NAME,
    WAYS_OUT,
    AgentSpec,
    ConfirmationPolicy,
    DoubleTexting,
    Limits,
    MessagePolicy,
    Tenancy,
    WorkspaceSpec,
    validate_labels,
)
from broker.runtime import UsageError, check_conversation_id, new_conversation_id, parse_traceparent
from broker.secrets import SecretValue
from broker.tools import check_output_schema
from deckhands.client.tasks.spec import MAX_TITLE, TaskFields, TaskSpec
from deckhands.client.tasks.tasks import (
    Directory,
    check_task,
    derive_conversation_id,
    parse_workspace,
    to_image_urls,
    to_output_spec,
)

SCRIPTED = "scripted/"
T = TypeVar("T")


def check_type(kind: type[T], value: object, name: str, remedy: str) -> T:
    """Return a value, checked to have a type.

    Raises:
        UsageError: the value has another type; the text names the argument.
    """
    if not isinstance(value, kind):
        raise UsageError(f"The argument {name} is {ascii(value)[:200]}.", remedy=remedy)
    return value


def check_text(value: object, name: str) -> str:
    """Return a required text.

    Raises:
        UsageError: it is not a text.
    """
    return check_type(str, value, name, "Pass a string.")


def check_title(title: object) -> str:
    """Return a new title for a conversation.

    Raises:
        UsageError: the title is not a text, is empty or is too long.
    """
    found = check_text(title, "title").strip()
    if not 0 < len(found) <= MAX_TITLE:
        raise UsageError(f"The title has {len(found):,} characters.", remedy=f"Pass 1 to {MAX_TITLE}.")
    return found


def to_agent_spec(agent: AgentSpec | str | None, model: str | None) -> AgentSpec:
    """Return the agent as a specification, with another model if one is named.

    Raises:
        UsageError: the agent is neither a name nor an `AgentSpec`, the model is not a name, or the output schema is
            invalid.
    """
    if isinstance(agent, str):
        agent = AgentSpec(name=agent)
    found = AgentSpec() if agent is None else agent
    check_type(AgentSpec, found, "agent", "Pass the name of an agent, such as 'CodeActAgent', or an AgentSpec.")
    if found.output is not None:
        check_output_schema(found.output.json_schema)
    if model is None:
        return found
    check_type(str, model, "model", "Pass the name of a model, such as 'anthropic/claude-sonnet-4-5'.")
    if not model.strip():
        raise UsageError("The argument model is empty.", remedy="Pass the name of a model, or leave it out.")
    return found.model_copy(update={"llm": found.llm.model_copy(update={"model": model})})


def to_output_schema(output: type[BaseModel] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of an output.

    Raises:
        UsageError: it is neither a Pydantic model nor a JSON Schema, or the schema is invalid.
    """
    if not isinstance(output, Mapping) and not (isinstance(output, type) and issubclass(output, BaseModel)):
        raise UsageError(
            f"The argument output is {ascii(output)[:200]}.", remedy="Pass a Pydantic model or a JSON Schema."
        )
    return to_output_spec(output).json_schema


def to_workspace(workspace: Directory | None, upload: bytes | None) -> tuple[WorkspaceSpec, bytes | None]:
    """Return the workspace as a specification, and the file to put into it.

    Raises:
        UsageError: it is neither a path, an address nor a `WorkspaceSpec`, or it cannot be used.
    """
    if workspace is None or isinstance(workspace, WorkspaceSpec):
        return workspace or WorkspaceSpec(), upload
    remedy = "Pass a path, 'git+https://…#REF', the name of an archive or bundle, or a WorkspaceSpec."
    try:
        name = os.fspath(workspace)
    except TypeError:
        name = None
    place = parse_workspace(check_type(str, workspace if name is None else name, "workspace", remedy))
    if place.source is not None:
        if upload is not None:
            raise UsageError("The arguments workspace and upload both name files.", remedy="Pass one of them.")
        return WorkspaceSpec(source=place.source), place.content
    assert place.path is not None
    return WorkspaceSpec(path=str(Path(place.path).expanduser().absolute())), upload


def to_directory(workspace: Directory) -> WorkspaceSpec:
    """Return a directory to work in, for a conversation that already has files.

    Raises:
        UsageError: it is not a path or a `WorkspaceSpec`.
    """
    if isinstance(workspace, WorkspaceSpec):
        return workspace
    check_type(str | os.PathLike, workspace, "workspace", "Pass a path or a WorkspaceSpec.")  # type: ignore[arg-type]
    return WorkspaceSpec(path=str(Path(workspace).expanduser().absolute()))


def to_limits(limits: Limits | None) -> Limits:
    """Return the limits as a specification.

    Raises:
        UsageError: they have another type.
    """
    found = Limits() if limits is None else limits
    return check_type(Limits, found, "limits", "Pass Limits(max_iterations=…, max_budget_usd=…, …).")


def to_tool_keys(names: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of several tools.

    Raises:
        UsageError: the argument is a single text, or one of the keys is not a text.
    """
    is_several = isinstance(names, Iterable) and not isinstance(names, str)
    found = tuple(names) if is_several else ()
    if not is_several or not all(isinstance(name, str) for name in found):
        raise UsageError(f"The argument tools is {ascii(names)[:200]}.", remedy="Pass a list of strings.")
    return found


def to_secrets(secrets: Mapping[str, SecretValue] | None) -> Mapping[str, SecretValue]:
    """Return secrets by name; an error never contains a value.

    Raises:
        UsageError: they have another type.
    """
    found = {} if secrets is None else secrets
    is_fit = isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(value, SecretValue) for name, value in found.items()
    )
    if not is_fit:
        raise UsageError(
            "The argument secrets is not a mapping of names to strings or SecretReference objects.",
            remedy="Pass {'NAME': 'value'} or {'NAME': SecretReference(source='vault', path='…')}.",
        )
    return found


def to_labels(labels: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return labels.

    Raises:
        UsageError: the argument is not a mapping of labels; the text names the invalid part.
    """
    found = {} if labels is None else labels
    is_fit = isinstance(found, Mapping) and all(isinstance(part, str) for item in found.items() for part in item)
    try:
        if not is_fit:
            raise ValueError("they are not a mapping of strings")  # noqa: TRY301  (answered here)
        return validate_labels(dict(found))
    except ValueError as error:
        raise UsageError(
            f"The labels cannot be used: {error}.",
            remedy="Pass {'team': 'billing', …}: letters, digits, '-', '_', '.', '/', at most 32 labels.",
        ) from None


def to_tenancy_fields(tenancy: Tenancy) -> dict[str, Any]:
    """Return the tenancy of a conversation, as fields of a task.

    Raises:
        UsageError: it has another type.
    """
    return dict(check_type(Tenancy, tenancy, "tenancy", "Pass Tenancy(tenant=…, experiment=…, priority=…)."))


def to_seconds(moment: datetime | timedelta | float) -> datetime | float:
    """Return a duration in seconds; a time is returned unchanged."""
    return moment.total_seconds() if isinstance(moment, timedelta) else moment


def to_double_texting(policy: DoubleTexting | None) -> DoubleTexting | None:
    """Return the policy for messages that arrive while the agent works.

    Raises:
        UsageError: there is no such policy.
    """
    if policy is not None and policy not in get_args(DoubleTexting):
        raise UsageError(
            f"The argument double_texting is {ascii(policy)[:100]}.",
            remedy=f"Pass one of: {', '.join(get_args(DoubleTexting))}.",
        )
    return policy


def to_message_policy(policy: MessagePolicy | None) -> MessagePolicy | None:
    """Return the policy for one message that arrives while the agent works.

    Raises:
        UsageError: there is no such policy for a single message.
    """
    if policy is not None and policy not in get_args(MessagePolicy):
        raise UsageError(
            f"A message cannot have double_texting {ascii(policy)[:100]}.",
            remedy=f"Use {', '.join(get_args(MessagePolicy))}; for rollback, submit the conversation with it.",
        )
    return policy


def to_confirmation_policy(policy: ConfirmationPolicy | str) -> ConfirmationPolicy:
    """Return the confirmation policy as a specification.

    Raises:
        UsageError: the argument is not a confirmation policy.
    """
    if isinstance(policy, ConfirmationPolicy):
        return policy
    try:
        return ConfirmationPolicy(mode=policy)
    except ValueError as error:
        raise UsageError(
            f"The confirmation policy {ascii(policy)[:100]} cannot be used.",
            remedy="Pass 'never', 'always', 'risky', the name of a plug-in, or a ConfirmationPolicy.",
        ) from error


def to_analyzer(analyzer: str) -> str:
    """Return the name of a risk analyzer.

    Raises:
        UsageError: the name is invalid.
    """
    if re.fullmatch(PLUGIN_NAME, analyzer) is None:
        raise UsageError(
            f"There is no risk analyzer named {ascii(analyzer)[:100]}.",
            remedy=f"Pass one of: {', '.join(BUILT_IN_ANALYZERS)}; or the name of a plug-in.",
        )
    return analyzer


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "agent": lambda agent: to_agent_spec(agent, None),
    "output": to_output_schema,
    "limits": to_limits,
    "tools": to_tool_keys,
    "images": lambda images: to_image_urls(images) or (),
    "secrets": to_secrets,
    "title": lambda title: check_text(title, "title"),
    "labels": to_labels,
    "delay": to_seconds,
    "expires": to_seconds,
    "double_texting": to_double_texting,
    "traceparent": parse_traceparent,
}
"""Arguments for which Python accepts more forms than JSON, or has other error messages."""


def to_task_spec(
    task: str,
    *,
    agent: AgentSpec | str | None = None,
    tools: Sequence[str] = (),
    output: type[BaseModel] | Mapping[str, Any] | None = None,
    upload: bytes | None = None,
    **fields: Unpack[TaskFields],
) -> tuple[TaskSpec, bytes | None]:
    """Return the task for the keywords of a Python call, and the file to put into its workspace. Reads files.

    Raises:
        UsageError: a keyword has an invalid value; the text names it.
        TypeError: there is no such keyword.
    """
    check_task(check_text(task, "task"))
    given: dict[str, Any] = {"agent": agent, "tools": tools, "output": output, **fields}
    if unknown := given.keys() - TaskSpec.model_fields - {"tenancy"}:
        raise TypeError(f"A task has no {min(unknown)}; it has {', '.join(TaskSpec.model_fields)}.")
    given["workspace"], upload = to_workspace(given.get("workspace"), upload)
    if given.get("model") is not None:
        given["agent"] = to_agent_spec(agent, given.pop("model"))
    if (tenancy := given.pop("tenancy", None)) is not None:
        given |= to_tenancy_fields(tenancy)
    found = {
        name: _CONVERSIONS[name](value) if name in _CONVERSIONS else value
        for name, value in given.items()
        if value is not None
    }
    return TaskSpec.parse({"task": task, **found}), upload


def to_conversation_id(conversation_id: str | None, idempotency_key: str | None) -> str:
    """Return the id of a new conversation: the given one, one derived from the key, or a new one.

    Raises:
        UsageError: the id or the key cannot be used.
    """
    if conversation_id is not None:
        return check_conversation_id(check_text(conversation_id, "conversation_id"))
    if idempotency_key is not None:
        return derive_conversation_id(check_text(idempotency_key, "idempotency_key"))
    return new_conversation_id()


def to_recovery_option(option: int) -> int:
    """Return an option for recovering from a loop.

    Raises:
        UsageError: there is no such option.
    """
    if option not in WAYS_OUT:
        ways = "; ".join(f"{number}: {what}" for number, what in WAYS_OUT.items())
        raise UsageError(f"{ascii(option)[:100]} is not a way out of a loop.", remedy=f"Ways: {ways}.")
    return option


def resolve_script_path(agent: AgentSpec) -> AgentSpec:
    """Return the agent for workers of this machine: the path of a scripted model's script is made absolute.

    Raises:
        UsageError: the script cannot be read.
    """
    delegates = {name: resolve_script_path(delegate) for name, delegate in agent.delegates.items()}
    agent = agent.model_copy(update={"delegates": delegates}) if delegates else agent
    model = agent.llm.model
    if model is None or not model.startswith(SCRIPTED):
        return agent
    path = Path(model.removeprefix(SCRIPTED)).expanduser()
    try:
        with path.open("rb"):
            found = f"{SCRIPTED}{path.absolute()}"
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"The script of the model {ascii(model)[1:-1][:300]} cannot be read: {why}.",
            remedy="Name a file: scripted/FILE. docs/models.md#scripted-models describes it.",
        ) from None
    return agent.model_copy(update={"llm": agent.llm.model_copy(update={"model": found})})
