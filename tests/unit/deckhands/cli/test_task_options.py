"""Options of a task: what the agent and its workspace become by them."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from broker.contract.events import AgentSpec, WorkspaceSpec
from deckhands.cli.task_options import Place, TaskOptions, agent_of, task_options, workspace_of
from deckhands.cli.verbs import options_as


def made_of(*arguments: str) -> tuple[AgentSpec, WorkspaceSpec]:
    made = []

    @click.command()
    @task_options
    @options_as(TaskOptions)
    def command(options: TaskOptions) -> None:
        made.append((agent_of(options, None), workspace_of(options, Place(), "auto")))

    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    return made[0]


@pytest.mark.parametrize(
    ("arguments", "pool", "browses", "delegates"),
    [
        ((), "bash", False, False),
        (("--browser",), "browser", True, False),
        (("--browser-delegate",), "browser", False, True),
        (("--agent", "BrowsingAgent"), "browser", False, False),
        (("--agent", "VisualBrowsingAgent"), "browser", False, False),
    ],
)
def test_whoever_needs_a_browser_is_where_there_is_one(
    arguments: tuple[str, ...], pool: str, browses: bool, delegates: bool
) -> None:
    agent, workspace = made_of(*arguments, "-t", "task")
    assert (workspace.pool, agent.enable_browsing, agent.enable_browsing_delegate) == (pool, browses, delegates)
