"""`--delegate`: the agents that an agent can hand tasks to, by name or from files with their specifications."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from broker.contract import (
    ACP_AGENT,
    ACP_PREFIX,
    AgentFile,
    AgentSpec,
    LLMSpec,
    load_agent_files,
    parse_agent_file,
    render_delegates,
)
from broker.runtime import UsageError

MAX_FILE_BYTES = 2**20
MAX_DELEGATES = 32
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
OF_OWN_TOOLS = frozenset(
    {
        *("BrowsingAgent", "ChaosAgent", "CheckAgent", "DummyAgent", "LocAgent", "PlanningAgent", "ReadOnlyAgent"),
        *("BrowsingAgentSDK", "ReadOnlyAgentSDK", "VisualBrowsingAgent", ACP_AGENT),
    }
)
"""Agents with a fixed set of tools: options that add a tool have no effect on them."""
REMEDY = "docs/agents.md#delegates shows what a delegate's file holds."


def check_takes_tools(agent: str, option: str) -> None:
    """Refuse an option that gives an agent a tool it does not take.

    Raises:
        UsageError: names both.
    """
    if agent in OF_OWN_TOOLS or agent.startswith(ACP_PREFIX):
        raise UsageError(
            f"{option} has no effect on {agent}, whose tools are fixed.", remedy="Use it with CodeActAgent."
        )


def with_delegates(agent: AgentSpec, given: Sequence[str], *, has_delegation: bool = False) -> AgentSpec:
    """Return the agent with its delegates, each given as NAME, a known agent, or as NAME=FILE.

    A delegate without a file is the agent itself under the other name, as in `controller_worker`; without a model in
    its file, it has the agent's model.

    Args:
        has_delegation: also add the agents defined by files in the home directory, and let the agent delegate to agents
            of its workspace and control its delegates.

    Raises:
        UsageError: a name or a file is invalid; the text names it.
    """
    if not given and not has_delegation:
        return agent
    files = {file.name: file for file in _load_files_of_user()} if has_delegation else {}
    # The first event of a conversation holds all specifications, so the user's skills are not repeated in each.
    delegates = {name: _make_spec(file, agent).model_copy(update={"skills": ()}) for name, file in files.items()}
    if len(given) > MAX_DELEGATES:
        raise UsageError(f"--delegate is given {len(given)} times; the limit is {MAX_DELEGATES}.", remedy="Give fewer.")
    named: set[str] = set()
    for text in given:
        name, separator, file = text.partition("=")
        if not NAME.fullmatch(name) or (separator and not file):
            raise UsageError(f"--delegate is {ascii(text)[:200]}.", remedy="Write NAME or NAME=FILE.")
        if name in named:
            raise UsageError(f"Two delegates have the name {name}.", remedy="Give each its own name.")
        named.add(name)
        files.pop(name, None)
        if separator and file.lower().endswith(".md"):
            files[name] = _load_agent_file(Path(file), text)
            delegates[name] = _make_spec(files[name], agent)
        elif separator:
            spec = _spec_in(Path(file), text)
            is_same = spec.llm == LLMSpec()
            delegates[name] = spec.model_copy(update={"llm": agent.llm}) if is_same else spec
        else:
            check = {"goal": None, "output": None, "memory": None, "plan": None}
            delegates[name] = agent.model_copy(update={"name": name, **check})
    prompt = render_delegates({name: files[name].description if name in files else "" for name in delegates})
    suffix = "\n".join(filter(None, (agent.system_prompt_suffix, prompt)))
    changes = {"delegates": delegates, "system_prompt_suffix": suffix, "enable_delegate_control": has_delegation}
    return agent.model_copy(update={"enable_delegation": True, **changes})


def _spec_in(file: Path, option: str) -> AgentSpec:
    what = _describe_file(file, option)
    content = _read_file(file, what)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} is not JSON: {error}.", remedy=REMEDY) from error
    _check_names(fields, what)
    try:
        return AgentSpec.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{what} cannot be used: {where}: {first['msg']}.", remedy=REMEDY) from error


def _load_agent_file(file: Path, option: str) -> AgentFile:
    what = _describe_file(file, option)
    try:
        return parse_agent_file(file.name, _read_file(file, what).decode())
    except ValueError as error:
        raise UsageError(f"{what} cannot be used: {error}.", remedy=REMEDY) from error


def _load_files_of_user() -> tuple[AgentFile, ...]:
    try:
        return load_agent_files(Path.home())
    except RuntimeError:  # the user has no home directory
        return ()


def _make_spec(file: AgentFile, parent: AgentSpec) -> AgentSpec:
    return file.make_spec(parent, model=file.model or None)


def _describe_file(file: Path, option: str) -> str:
    return f"The file {file} of --delegate {option.partition('=')[0]}"


def _read_file(file: Path, what: str) -> bytes:
    try:
        with file.expanduser().open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{what} cannot be read: {why}.", remedy="Name another.") from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{what} has more than {MAX_FILE_BYTES:,} bytes.", remedy="Shorten it.")
    return content


def _check_names(fields: Any, what: str) -> None:
    """Refuse unknown fields, which would otherwise be ignored silently."""
    if not isinstance(fields, dict):
        raise UsageError(f"{what} does not hold an object.", remedy=REMEDY)
    _check_known(fields, AgentSpec.model_fields, what)
    if isinstance(fields.get("llm"), dict):
        _check_known(fields["llm"], LLMSpec.model_fields, f"{what}: llm")
    inner = fields.get("delegates")
    for name, spec in inner.items() if isinstance(inner, dict) else ():
        _check_names(spec, f"{what}: delegates.{ascii(name)[1:-1][:100]}")


def _check_known(fields: Mapping[str, Any], known: Collection[str], what: str) -> None:
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else REMEDY
            raise UsageError(f"{what} has the field {ascii(name)[:100]}, which does not exist.", remedy=hint)
