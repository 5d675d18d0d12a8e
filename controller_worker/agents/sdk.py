"""Agents whose loop is the Claude Agent SDK: they read and are offered what the legacy agents behind them are.

Holds: what a reply means is what it means for a legacy agent, so a conversation may change from one kind to the other
at any step and lose nothing.
Differs: BrowsingAgent writes its actions as text; BrowsingAgentSDK calls the tool `browser`, because the SDK acts by
tools alone.
"""

from __future__ import annotations

from broker.contract import AgentFinishAction, AgentThinkAction, BrowseInteractiveAction
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.agents.looking import OwnToolsOnly, ReadOnlyAgent


class CodeActAgentSDK(CodeActAgent):
    """The general agent, in the loop of the SDK."""

    is_sdk = True


class ReadOnlyAgentSDK(ReadOnlyAgent):
    """The agent that only reads, in the loop of the SDK."""

    is_sdk = True


class BrowsingAgentSDK(OwnToolsOnly):
    """The agent that acts in a browser, in the loop of the SDK."""

    is_sdk = True
    prompt = "browsing_sdk.j2"
    own_tools = (AgentThinkAction.tool_spec, AgentFinishAction.tool_spec, BrowseInteractiveAction.tool_spec)
