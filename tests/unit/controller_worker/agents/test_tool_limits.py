"""The tools of every built-in agent, and of the models' side questions, within the limits of the providers' APIs."""

import re

import pytest

from broker.contract import action_kinds
from broker.contract.events import AgentSpec
from broker.contract.specs import OutputSpec
from broker.contract.tool_specs import ToolSpec
from controller_worker.agents.registry import AGENTS
from controller_worker.memory.condensers.llm_attention import RANK_EVENTS
from controller_worker.memory.condensers.structured_summary import CREATE_STATE_SUMMARY
from controller_worker.model.critic import VERDICT

DESCRIPTION_LIMIT_CHARS = 1024
"""The limit of OpenAI's and Azure's APIs; Anthropic's and Google's are higher."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
TOOLS_LIMIT = 128
EVERYTHING = {name: True for name in AgentSpec.model_fields if name.startswith("enable_")}
OUTPUT = OutputSpec(json_schema={"type": "object", "properties": {"n": {"type": "integer"}}})
ACP = {"command": "agent"}
OTHERS = [RANK_EVENTS, CREATE_STATE_SUMMARY, VERDICT]
OF_ACTIONS = {tool.name: tool for kind in action_kinds() if (tool := getattr(kind, "tool_spec", None)) is not None}


def tools_of(name: str) -> list[ToolSpec]:
    specs = [
        AgentSpec.model_validate({"name": name, "output": output, "acp": ACP, **EVERYTHING})
        for output in (None, OUTPUT)
    ]
    return [tool for spec in specs for tool in AGENTS[name](spec).tools]


def assert_within_limits(tool: ToolSpec) -> None:
    assert len(tool.description) <= DESCRIPTION_LIMIT_CHARS, f"{tool.name}: {len(tool.description)} characters"
    assert NAME.fullmatch(tool.name), tool.name
    for parameter in tool.parameters["properties"]:
        assert NAME.fullmatch(parameter), f"{tool.name}: {parameter}"


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_tools_of_an_agent_fit_every_provider(name: str) -> None:
    tools = tools_of(name)
    assert len(tools) <= TOOLS_LIMIT
    for tool in tools:
        assert_within_limits(tool)


@pytest.mark.parametrize("tool", [*OF_ACTIONS.values(), *OTHERS], ids=lambda tool: tool.name)
def test_every_tool_fits_every_provider(tool: ToolSpec) -> None:
    assert_within_limits(tool)
