"""What callers of the client pass, as specifications: names and paths are enough, whole specifications are taken too.

Holds: what is of another type or cannot be used is a `UsageError` that names the argument and what it may be.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from broker.contract.actions import WAYS_OUT
from broker.contract.events import AgentSpec, Limits, WorkspaceSpec
from broker.contract.labels import checked_labels
from broker.contract.policies import BUILT_IN_ANALYZERS, PLUGIN_NAME
from broker.contract.specs import Tenancy
from broker.contract.timing import DoubleTexting, MessagePolicy, Timing
from broker.runtime.errors import UsageError
from broker.runtime.ids import check_conversation_id, new_conversation_id
from broker.tools.output_schema import check_output_schema
from deckhands.client.tasks.places import place_in
from deckhands.client.tasks.requests import timing_of
from deckhands.client.tasks.tasks import conversation_id_of, output_of

SCRIPTED = "scripted/"
T = TypeVar("T")
Directory = WorkspaceSpec | str | os.PathLike[str]


def instance_of(kind: type[T], value: object, name: str, remedy: str) -> T:
    """Return a value of a kind.

    Raises:
        UsageError: it is of another one; names the argument.
    """
    if not isinstance(value, kind):
        raise UsageError(f"The argument {name} is {ascii(value)[:200]}.", remedy=remedy)
    return value


def text_in(value: object, name: str) -> str:
    """Return a text that has to be one.

    Raises:
        UsageError: it is something else.
    """
    return instance_of(str, value, name, "Pass a string.")


def agent_in(agent: AgentSpec | str | None, model: str | None) -> AgentSpec:
    """Return the agent that is meant, with another model if one is named.

    Raises:
        UsageError: it is neither a name nor an `AgentSpec`, or the model is not a name.
    """
    if isinstance(agent, str):
        agent = AgentSpec(name=agent)
    found = AgentSpec() if agent is None else agent
    instance_of(AgentSpec, found, "agent", "Pass the name of an agent, such as 'CodeActAgent', or an AgentSpec.")
    if model is None:
        return found
    instance_of(str, model, "model", "Pass the name of a model, such as 'anthropic/claude-sonnet-4-5'.")
    if not model.strip():
        raise UsageError("The argument model is empty.", remedy="Pass the name of a model, or leave it out.")
    return found.model_copy(update={"llm": found.llm.model_copy(update={"model": model})})


def with_output(agent: AgentSpec, output: type[BaseModel] | Mapping[str, Any] | None) -> AgentSpec:
    """Return the agent with the form of its output, which is checked.

    Raises:
        UsageError: the form is neither a Pydantic model nor a JSON Schema, or the schema cannot be used.
    """
    if output is None:
        if agent.output is not None:
            check_output_schema(agent.output.json_schema)
        return agent
    if not isinstance(output, Mapping) and not (isinstance(output, type) and issubclass(output, BaseModel)):
        raise UsageError(
            f"The argument output is {ascii(output)[:200]}.", remedy="Pass a Pydantic model or a JSON Schema."
        )
    return agent.model_copy(update={"output": output_of(output)})


def workspace_in(workspace: Directory | None, upload: bytes | None) -> tuple[WorkspaceSpec, bytes | None]:
    """Return the workspace that is meant, and the file to put into it.

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
    place = place_in(instance_of(str, workspace if name is None else name, "workspace", remedy))
    if place.source is not None:
        if upload is not None:
            raise UsageError("The arguments workspace and upload both name files.", remedy="Pass one of them.")
        return WorkspaceSpec(source=place.source), place.content
    assert place.path is not None
    return WorkspaceSpec(path=str(Path(place.path).expanduser().absolute())), upload


def directory_in(workspace: Directory) -> WorkspaceSpec:
    """Return another directory to work in, for a conversation that has files already.

    Raises:
        UsageError: it is not a path or a `WorkspaceSpec`.
    """
    if isinstance(workspace, WorkspaceSpec):
        return workspace
    instance_of(str | os.PathLike, workspace, "workspace", "Pass a path or a WorkspaceSpec.")  # type: ignore[arg-type]
    return WorkspaceSpec(path=str(Path(workspace).expanduser().absolute()))


def limits_in(limits: Limits | None) -> Limits:
    """Return the limits that are meant.

    Raises:
        UsageError: they are something else.
    """
    found = Limits() if limits is None else limits
    return instance_of(Limits, found, "limits", "Pass Limits(max_iterations=…, max_budget_usd=…, …).")


def tools_in(names: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of several tools.

    Raises:
        UsageError: it is one text, or not all of them are texts.
    """
    is_several = isinstance(names, Iterable) and not isinstance(names, str)
    found = tuple(names) if is_several else ()
    if not is_several or not all(isinstance(name, str) for name in found):
        raise UsageError(f"The argument tools is {ascii(names)[:200]}.", remedy="Pass a list of strings.")
    return found


def secrets_in(secrets: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return secrets by name; no value gets into an error.

    Raises:
        UsageError: they are something else.
    """
    found = {} if secrets is None else secrets
    is_fit = isinstance(found, Mapping) and all(isinstance(part, str) for item in found.items() for part in item)
    if not is_fit:
        raise UsageError("The argument secrets is not a mapping of strings.", remedy="Pass {'NAME': 'value'}.")
    return found


def labels_in(labels: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return labels.

    Raises:
        UsageError: they are not a mapping of labels; names what is wrong.
    """
    found = {} if labels is None else labels
    is_fit = isinstance(found, Mapping) and all(isinstance(part, str) for item in found.items() for part in item)
    try:
        if not is_fit:
            raise ValueError("they are not a mapping of strings")  # noqa: TRY301  (answered here)
        return checked_labels(dict(found))
    except ValueError as error:
        raise UsageError(
            f"The labels cannot be used: {error}.",
            remedy="Pass {'team': 'billing', …}: letters, digits, '-', '_', '.', '/', at most 32 labels.",
        ) from None


def tenancy_in(tenancy: Tenancy | None) -> Tenancy | None:
    """Return who a conversation is for.

    Raises:
        UsageError: it is something else.
    """
    return tenancy and instance_of(Tenancy, tenancy, "tenancy", "Pass Tenancy(tenant=…, experiment=…, priority=…).")


def timing_in(
    not_before: datetime | None, delay: timedelta | float | None, expires: datetime | timedelta | float | None
) -> Timing:
    """Return when a conversation may begin.

    Raises:
        UsageError: one of them is something else, is too far away, or has no zone; or it would expire before it begins.
    """
    delay = delay.total_seconds() if isinstance(delay, timedelta) else delay
    expires = expires.total_seconds() if isinstance(expires, timedelta) else expires
    return timing_of({"not_before": not_before, "delay": delay, "expires": expires})


def policy_in(policy: DoubleTexting | None) -> DoubleTexting | None:
    """Return what a message does that comes while the agent works.

    Raises:
        UsageError: there is no such policy.
    """
    if policy is not None and policy not in get_args(DoubleTexting):
        raise UsageError(
            f"The argument double_texting is {ascii(policy)[:100]}.",
            remedy=f"Pass one of: {', '.join(get_args(DoubleTexting))}.",
        )
    return policy


def message_policy_in(policy: MessagePolicy | None) -> MessagePolicy | None:
    """Return what one message does if the agent works.

    Raises:
        UsageError: there is no such policy for one message.
    """
    if policy is not None and policy not in get_args(MessagePolicy):
        raise UsageError(
            f"A message cannot have double_texting {ascii(policy)[:100]}.",
            remedy=f"Use {', '.join(get_args(MessagePolicy))}; for rollback, submit the conversation with it.",
        )
    return policy


def analyzer_in(analyzer: str) -> str:
    """Return the name of a risk analyzer.

    Raises:
        UsageError: it cannot be one.
    """
    if re.fullmatch(PLUGIN_NAME, analyzer) is None:
        raise UsageError(
            f"There is no risk analyzer named {ascii(analyzer)[:100]}.",
            remedy=f"Pass one of: {', '.join(BUILT_IN_ANALYZERS)}; or the name of a plug-in.",
        )
    return analyzer


def id_in(conversation_id: str | None, idempotency_key: str | None) -> str:
    """Return the id of a new conversation: the given one, the one that belongs to the key, or a new one.

    Raises:
        UsageError: the id or the key cannot be used.
    """
    if conversation_id is not None:
        return check_conversation_id(text_in(conversation_id, "conversation_id"))
    if idempotency_key is not None:
        return conversation_id_of(text_in(idempotency_key, "idempotency_key"))
    return new_conversation_id()


def way_in(option: int) -> int:
    """Return a way out of a loop.

    Raises:
        UsageError: there is no such way.
    """
    if option not in WAYS_OUT:
        ways = "; ".join(f"{number}: {what}" for number, what in WAYS_OUT.items())
        raise UsageError(f"{ascii(option)[:100]} is not a way out of a loop.", remedy=f"Ways: {ways}.")
    return option


def with_script_here(agent: AgentSpec) -> AgentSpec:
    """Return the agent as workers of this machine find it: the script of a scripted model by its absolute path.

    Raises:
        UsageError: the script cannot be read.
    """
    delegates = {name: with_script_here(delegate) for name, delegate in agent.delegates.items()}
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
            remedy="Name a file: scripted/FILE. docs/scripted-models.md describes it.",
        ) from None
    return agent.model_copy(update={"llm": agent.llm.model_copy(update={"model": found})})
