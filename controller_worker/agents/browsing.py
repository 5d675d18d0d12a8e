"""BrowsingAgent and VisualBrowsingAgent: agents that act only in a web browser (OpenHands 9.4, 9.5).

They act without tools: a reply is a thought and an action between triple backticks. Backticks may be missing around an
action at the end of a reply. `send_msg_to_user`, and any other reply without backticks, is a message to the user and
ends the task. If the task asks for structured output, a call of `finish` ends it, because JSON between backticks could
not contain backticks.

Holds: every reply leads to a message, an action in the browser, or the end.
Differs: a message goes to the user at once, without the browser. The prompt shows all pages of a conversation in
sequence, like results, and not only the last one, so that a provider's cache works. The agent does not start with an
empty page, and errors are not counted: loop detection and limits end a task without progress, as for every agent.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from broker.contract import (
    AgentDelegateAction,
    AgentFinishAction,
    AgentRejectAction,
    AgentSpec,
    BrowseInteractiveAction,
    Event,
    EventSource,
    MessageAction,
    ModelReply,
    TaskItem,
    ToolSpec,
    WorkspaceSpec,
    require_text,
)
from controller_worker.agents.agent import render_prompt
from controller_worker.agents.finish_tool import make_finish_tool
from controller_worker.agents.tool_calls import parse_reply

FENCE = "```"
SPOKEN = ("send_msg_to_user", "report_infeasible")
BROWSER_ACTIONS = (
    "noop",
    "goto",
    "go_back",
    "go_forward",
    "scroll",
    "fill",
    "select_option",
    "click",
    "dblclick",
    "hover",
    "press",
    "focus",
    "clear",
    "drag_and_drop",
    "upload_file",
    "new_tab",
    "tab_close",
    "tab_focus",
    "answer_dialogs",
    "console",
    *SPOKEN,
)
MAX_ACTION_CHARS = 200_000
MAX_UNFENCED_CHARS = 10_000
MAX_UNFENCED_CALLS = 50
"""Bounds of the search for an action without backticks at the end of a reply."""

_LANGUAGE = re.compile(r"^(?:python|py|text|plaintext)?[ \t]*\n", re.IGNORECASE)
_CALL = re.compile(rf"(?<![\w.])({'|'.join(BROWSER_ACTIONS)})\(")
_SPOKEN = re.compile(rf"\b({'|'.join(SPOKEN)})\(\s*(?:text=|reason=)?(.*)\)\s*$", re.DOTALL)


def _make_delegate_action(arguments: Mapping[str, Any]) -> AgentDelegateAction:
    task = require_text(arguments, "task", "delegate_to_browsing_agent")
    return AgentDelegateAction(agent="BrowsingAgent", inputs={**arguments, "task": task})


DELEGATE_TO_BROWSING_AGENT = ToolSpec(
    name="delegate_to_browsing_agent",
    description=(
        "Hand a task to an agent that acts in a web browser, and get its answer. It has its own browser and cannot see "
        "this conversation: the task must say everything it needs, addresses included."
    ),
    parameters={
        "type": "object",
        "properties": {
            "task": {"type": "string", "description": "What is to be done or found out, in plain words."},
        },
        "required": ["task"],
    },
    convert=_make_delegate_action,
)


class BrowsingAgent:
    """The agent that reads pages by their accessibility tree."""

    sees_pages = False

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """No tools, because actions are written in the text; only structured output needs a call."""
        return (make_finish_tool(self._spec.output),) if self._spec.output is not None else ()

    def system_prompt(self, workspace: WorkspaceSpec) -> str:
        """Return the system prompt."""
        return render_prompt(
            "browsing.j2",
            workspace=workspace,
            sees_pages=self.sees_pages,
            hands_in=self._spec.output is not None,
            suffix=self._spec.system_prompt_suffix,
        )

    def events_of(self, reply: ModelReply, task_list: Sequence[TaskItem] = ()) -> list[Event]:
        """See `Agent.events_of`."""
        if reply.tool_calls:
            return parse_reply(reply, self.tools, task_list)
        thought, action = _split_reply(reply.content)
        if not action:
            return _end_with_message(reply.content.strip())
        left, name, words = _split_message(action)
        if name == "report_infeasible":
            return [AgentRejectAction(thought=thought, outputs={"reason": words})]
        if name and not left:
            return _end_with_message(words)
        doing = BrowseInteractiveAction(
            browser_actions=left or action, thought=thought, browsergym_send_msg_to_user=words
        )
        return [doing, *_end_with_message(words)] if name else [doing]


class VisualBrowsingAgent(BrowsingAgent):
    """The agent that also sees pages as pictures with a mark at each element, and works in several tabs."""

    sees_pages = True


def _end_with_message(text: str) -> list[Event]:
    """Send the user a message that ends the task."""
    message = MessageAction(content=text, source=EventSource.AGENT)
    return [message, AgentFinishAction(outputs={"content": text})]


def _split_reply(text: str) -> tuple[str, str]:
    """Return the thought and the action of a reply; no action if it has no backticks and does not end with one."""
    parts = text.split(FENCE)
    if len(parts) < 2:
        return _split_unfenced(text)
    action = _LANGUAGE.sub("", parts[1], count=1).strip()
    is_cut = len(parts) == 2 and action and not action.endswith(")")
    return parts[0].strip(), _drop_surplus(f"{action})" if is_cut else action)


def _split_unfenced(text: str) -> tuple[str, str]:
    """Return the thought and the action of a reply without backticks: the calls at its end."""
    last = text.rstrip("`. \n")[-MAX_UNFENCED_CHARS:]
    for call in list(_CALL.finditer(last))[-MAX_UNFENCED_CALLS:] if last.endswith(")") else ():
        action = _drop_surplus(last[call.start() :])
        statements = _parse(action) or ()
        has_calls_only = all(isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) for one in statements)
        if call[1] in SPOKEN or (statements and has_calls_only):
            return text[: text.rindex(last) + call.start()].rstrip("` \n").lstrip(), action
    return text.strip(), ""


def _drop_surplus(action: str) -> str:
    """Return an action without a surplus closing parenthesis."""
    is_surplus = action.endswith("))") and _parse(action) is None and _parse(action[:-1]) is not None
    return action[:-1] if is_surplus else action


def _parse(action: str) -> list[ast.stmt] | None:
    """Return the statements of an action; None if it cannot be parsed."""
    try:
        return ast.parse(action[:MAX_ACTION_CHARS]).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _split_message(action: str) -> tuple[str, str, str]:
    """Return the actions before a message to the user, the action that sends the message, and the message."""
    statements = _parse(action)
    if statements is None:
        # A message that contains quotes, or that was cut off, is still a message.
        found = _SPOKEN.search(action if action.endswith(")") else f"{action})")
        if found is None:
            return action, "", ""
        words = found[2].strip()
        if words.rstrip(")").endswith(("'", '"')):
            words = words.rstrip(")")  # the message was closed before these
        return action[: found.start()].strip(), found[1], words.strip("'\"")
    for statement in statements:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in SPOKEN:
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            words = given[0].value if given and isinstance(given[0], ast.Constant) else ""
            return _cut_before(action, statement), call.func.id, str(words)
    return action, "", ""


def _cut_before(action: str, statement: ast.stmt) -> str:
    """Return the text before a statement, as written."""
    lines = action.encode().splitlines(keepends=True)[: statement.lineno]
    lines[-1] = lines[-1][: statement.col_offset]
    return b"".join(lines).decode().strip().rstrip(";").rstrip()
