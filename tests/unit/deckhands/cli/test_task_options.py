"""Options of a task: the resulting agent and workspace."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from broker.contract.events import AgentSpec, LLMSpec, WorkspaceSpec
from broker.contract.specs import GoalSpec
from broker.runtime.errors import UsageError
from deckhands.cli.command_group import with_options
from deckhands.cli.delegate_options import with_delegates
from deckhands.cli.task_options import TaskOptions, WorkspaceInput, agent_of, task_options, workspace_of
from deckhands.client.known_agents import list_local_agents


def made_of(*arguments: str) -> tuple[AgentSpec, WorkspaceSpec]:
    made = []

    @click.command()
    @task_options
    @with_options(TaskOptions)
    def command(options: TaskOptions) -> None:
        made.append((agent_of(options, None), workspace_of(options, WorkspaceInput(), "auto")))

    done = CliRunner().invoke(command, arguments)
    if isinstance(done.exception, UsageError):
        raise done.exception
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
def test_browser_agents_use_the_browser_pool(
    arguments: tuple[str, ...], pool: str, browses: bool, delegates: bool
) -> None:
    agent, workspace = made_of(*arguments, "-t", "task")
    assert (workspace.pool, agent.enable_browsing, agent.enable_browsing_delegate) == (pool, browses, delegates)


def test_agents_with_cells_use_the_ipython_pool() -> None:
    agent, workspace = made_of("--ipython", "-t", "task")
    assert (agent.enable_jupyter, workspace.pool) == (True, "ipython")
    agent, workspace = made_of("--ipython", "--browser", "-t", "task")
    assert (agent.enable_jupyter, agent.enable_browsing, workspace.pool) == (True, True, "browser")


def test_the_patch_tool_is_offered_on_request() -> None:
    assert made_of("--patch", "-t", "task")[0].enable_patch
    assert not made_of("-t", "task")[0].enable_patch


def test_delegates_are_named_or_described_in_files(tmp_path: Path) -> None:
    (tmp_path / "scout.json").write_text('{"name": "ReadOnlyAgent", "llm": {"model": "small"}}')
    (tmp_path / "clerk.json").write_text('{"enable_search": false}')
    given = [f"scout={tmp_path}/scout.json", f"clerk={tmp_path}/clerk.json", "LocAgent"]
    parent = AgentSpec(llm=LLMSpec(model="large"), goal=GoalSpec(check="true"), enable_workspace_skills=True)
    agent = with_delegates(parent, given)
    assert agent.enable_delegation
    assert agent.delegates == {
        "scout": AgentSpec(name="ReadOnlyAgent", llm=LLMSpec(model="small")),
        "clerk": AgentSpec(llm=LLMSpec(model="large"), enable_search=False),
        "LocAgent": AgentSpec(name="LocAgent", llm=LLMSpec(model="large"), enable_workspace_skills=True),
    }
    assert agent.system_prompt_suffix == (
        "With the tool `delegate` you can hand tasks to these agents: scout, clerk, LocAgent."
    )
    assert with_delegates(parent, []) is parent


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "does not hold an object"),
        ('{"lm": {}}', "has the field 'lm', which does not exist. Did you mean 'llm'?"),
        ('{"llm": {"modl": "x"}}', "llm has the field 'modl', which does not exist. Did you mean 'model'?"),
        ('{"delegates": {"a": {"nam": "x"}}}', "delegates.a has the field 'nam'"),
        ('{"tool_concurrency": 99}', "cannot be used: tool_concurrency: Input should be less than or equal to 16"),
        (" " * 2**20 + "{}", "has more than 1,048,576 bytes"),
    ],
)
def test_unusable_delegate_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (file := tmp_path / "scout.json").write_text(content)
    with pytest.raises(UsageError) as refused:
        with_delegates(AgentSpec(), [f"scout={file}"])
    assert f"The file {file} of --delegate scout" in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a=/nowhere/x.json"], "cannot be read: No such file or directory"),
        (["a="], "--delegate is 'a='"),
        (["=x"], "--delegate is '=x'"),
        (["a b"], "--delegate is 'a b'"),
        (["LocAgent", "LocAgent"], "Two delegates have the name LocAgent"),
        ([f"a{number}" for number in range(33)], "--delegate is given 33 times; the limit is 32"),
    ],
)
def test_a_delegate_that_cannot_be_used_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        with_delegates(AgentSpec(), given)
    assert said in str(refused.value)


@pytest.mark.parametrize("agent", sorted(list_local_agents() - {"CodeActAgent", "CodeActAgentSDK", "LongWorkAgent"}))
@pytest.mark.parametrize("option", ["--ipython", "--patch", "--delegate=LocAgent"])
def test_an_agent_with_tools_of_its_own_takes_no_others(agent: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option.partition('=')[0]} has no effect on {agent}, whose tools are fixed"):
        made_of(option, "--agent", agent, "-t", "task")
