"""CodeActAgent: acts through a shell, a file editor, thinking and finishing (OpenHands 9.1).

This module also chooses the names under which the model sees offered tools.

Holds: the names of one conversation are distinct, and depend on its tools and not on their order. A tool without a
namesake keeps its name. Every name is valid for providers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from broker.contract import (
    GLOB,
    GREP,
    AgentFinishAction,
    AgentSpec,
    Event,
    ModelReply,
    TaskItem,
    ToolOffer,
    ToolSpec,
    WorkspaceSpec,
    action_kinds,
)
from controller_worker.agents.agent import render_prompt
from controller_worker.agents.browsing import DELEGATE_TO_BROWSING_AGENT
from controller_worker.agents.finish_tool import make_finish_tool
from controller_worker.agents.tool_calls import make_offered_tool, parse_reply

MAX_NAME_CHARS = 64
"""The providers' limit for a name of letters, digits, `_` and `-`."""
_HASH_CHARS = 8
_WITHOUT_SERVER = "tool"


def make_visible_names(offers: Iterable[ToolOffer], own: AbstractSet[str]) -> dict[str, str]:
    """Return the name of each offer for the model, by its key.

    A tool of an MCP server is `<server>__<tool>` if another tool has its name. Any other tool is `tool__<name>` if it
    has the name of one of the agent's own tools. A name that is then too long, or still taken, ends with a hash of its
    key.

    Args:
        own: the names of the agent's tools.
    """
    by_key = {offer.key: offer for offer in offers}
    counts = Counter(offer.name for offer in by_key.values())
    names = dict[str, str]()
    prefixed = dict[str, str]()
    for key, offer in by_key.items():
        is_of_server = offer.runner == "mcp"
        if offer.name not in own and (counts[offer.name] == 1 or not is_of_server):
            names[key] = offer.name
            continue
        server = key.partition("/")[0] if is_of_server else _WITHOUT_SERVER
        prefixed[key] = f"{server}__{offer.name}"
    taken = {*own, *names.values()}
    again = Counter(prefixed.values())
    for key, name in sorted(prefixed.items()):
        fits = len(name) <= MAX_NAME_CHARS and again[name] == 1 and name not in taken
        names[key] = name if fits else _make_hashed_name(name, key, taken)
        taken.add(names[key])
    return names


def _make_hashed_name(name: str, key: str, taken: AbstractSet[str]) -> str:
    found = ""
    text = key
    while not found or found in taken:
        text = hashlib.sha256(text.encode()).hexdigest()
        found = f"{name[: MAX_NAME_CHARS - _HASH_CHARS - 1]}_{text[:_HASH_CHARS]}"
    return found


ORDER = (
    "execute_bash",
    "think",
    "finish",
    "delegate",
    "delegate_to_browsing_agent",
    "request_condensation",
    "browser",
    "execute_ipython_cell",
    "task_tracker",
    "note",
    "str_replace_editor",
)
"""OpenHands' order of tools, so that prompts are the same; other tools follow."""


class CodeActAgent:
    """The general agent. It offers the tool of every kind of action with `Action.is_offered`."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        offered = [kind.tool_spec for kind in action_kinds() if kind.is_offered(spec)]
        if spec.enable_search:
            offered += (GREP, GLOB)
        if spec.enable_browsing_delegate:
            offered.append(DELEGATE_TO_BROWSING_AGENT)
        offered.sort(key=lambda tool: ORDER.index(tool.name) if tool.name in ORDER else len(ORDER))
        own = [make_finish_tool(spec.output) if tool is AgentFinishAction.tool_spec else tool for tool in offered]
        names = {tool.name for tool in own}
        visible = make_visible_names(spec.tools, names)
        offers = {offer.key: make_offered_tool(offer, visible[offer.key]) for offer in spec.tools}
        self._tools = (*own, *offers.values())

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools offered to the model, in OpenHands' order."""
        return self._tools

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """Return the system prompt."""
        return render_prompt(
            "codeact.j2",
            workspace=workspace,
            has_finish=self._spec.enable_finish,
            suffix=self._spec.system_prompt_suffix,
        )

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """See `Agent.events_of`."""
        return parse_reply(reply, self._tools, task_list)
