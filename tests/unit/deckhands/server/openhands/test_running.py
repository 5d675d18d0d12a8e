"""Agents that only answer questions."""

from __future__ import annotations

from broker.contract import AgentSpec, GoalSpec, LLMSummarizingCondenserSpec, MemorySpec, action_kinds
from controller_worker.agents.codeact import CodeActAgent
from deckhands.server.openhands.running import make_silent


def test_silent_agent_offers_no_tool_and_runs_nothing() -> None:
    flags = {name: True for name, field in AgentSpec.model_fields.items() if field.annotation is bool}
    condenser = LLMSummarizingCondenserSpec()
    agent = AgentSpec(**flags, goal=GoalSpec(check="true"), memory=MemorySpec(), condenser=condenser)
    assert any(kind.is_offered(agent) for kind in action_kinds())
    silent = make_silent(agent)
    assert [kind for kind in action_kinds() if kind.is_offered(silent)] == []
    assert CodeActAgent(silent).tools == ()
    assert (silent.goal, silent.memory, silent.tools) == (None, None, ())
