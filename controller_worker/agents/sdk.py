"""Agents with the Claude Agent SDK as their loop: they have the prompts and tools of the corresponding legacy agents.

Holds: a reply has the same meaning as for a legacy agent, so a conversation can change between both kinds at any step
and lose nothing.
Differs: BrowsingAgent writes its actions as text; BrowsingAgentSDK calls the tool `browser`, because the SDK acts only
by tools.
"""

from __future__ import annotations

from broker.contract import AgentFinishAction, AgentThinkAction, BrowseInteractiveAction
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.agents.read_only import OwnToolsOnly, ReadOnlyAgent


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
