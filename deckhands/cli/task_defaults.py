"""Command-line options as defaults for the tasks of a file.

Holds: each field of a task overrides its default; limits, labels and secrets are merged one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from broker.contract import AgentSpec, WorkspaceSpec, parse_git_source
from broker.runtime import UsageError
from broker.secrets import SecretValue
from deckhands.cli.task_options import (
    TaskOptions,
    agent_of,
    limits_of,
    place_of,
    workspace_of,
)
from deckhands.client import TaskSpec, WorkspaceInput, check_task, resolve_script_path

AGENTS_REMEMBERED = 64


@dataclass(slots=True, kw_only=True)
class TaskDefaults:
    """The options of the command line, for all tasks of a file.

    Attributes:
        place: the workspace of -w.
        secrets: values by name.
        own: the options that are fields of `TaskSpec` in the same form, computed once for all tasks; see `fields_of`.
        is_here: whether the cluster is on this machine, and so finds its scripts of scripted models.
    """

    options: TaskOptions
    place: WorkspaceInput
    labels: Mapping[str, str]
    secrets: Mapping[str, SecretValue] = field(repr=False)
    own: Mapping[str, Any]
    is_here: bool
    _agents: dict[str, AgentSpec] = field(default_factory=dict)

    def complete(self, request: TaskSpec) -> TaskSpec:
        """Return the task with defaults for its missing fields.

        Raises:
            UsageError: the result cannot be submitted.
        """
        given = request.model_fields_set
        check_task(request.task)
        limits = limits_of(self.options)
        update: dict[str, Any] = {name: value for name, value in self.own.items() if name not in given}
        update["limits"] = limits.model_copy(
            update={name: getattr(request.limits, name) for name in request.limits.model_fields_set}
        )
        update["labels"] = {**self.labels, **request.labels}
        update["secrets"] = {**self.secrets, **request.secrets}
        if "tools" not in given:
            update["tools"] = self.options.tools
        options = self.options
        if isinstance(request.agent, str):
            options = replace(options, agent=request.agent if "agent" in given else options.agent)
            update["agent"] = self._agent(options)
        if not isinstance(request.workspace, WorkspaceSpec):
            update["workspace"] = workspace_of(options, self._place(request.workspace), "auto")
        completed = request.model_copy(update=update)
        timing = {name: getattr(completed, name) for name in ("not_before", "delay", "expires")}
        TaskSpec.parse({"task": "x", "labels": completed.labels, "secrets": completed.secrets, **timing})
        completed.agent_spec()
        return completed

    def _agent(self, options: TaskOptions) -> AgentSpec:
        if options.agent not in self._agents:
            if len(self._agents) >= AGENTS_REMEMBERED:
                self._agents.clear()
            found = agent_of(options, options.model)
            self._agents[options.agent] = resolve_script_path(found) if self.is_here else found
        return self._agents[options.agent]

    def _place(self, named: str | None) -> WorkspaceInput:
        if named is None:
            return self.place
        source = parse_git_source(named, depth=self.options.clone_depth, secret=self.options.clone_secret)
        return WorkspaceInput(source=source) if source is not None else WorkspaceInput(path=Path(named))


def place_for_all(options: TaskOptions, workspace: str | None) -> WorkspaceInput:
    """Return the workspace of -w for all tasks of a file.

    Raises:
        UsageError: it is a file to upload, or invalid.
    """
    place = place_of(workspace, options)
    if place.content is not None:
        raise UsageError(
            "An archive cannot be the workspace of many tasks.",
            remedy="Name a directory or git+https://…#REF with -w, or submit the tasks one by one.",
        )
    return place
