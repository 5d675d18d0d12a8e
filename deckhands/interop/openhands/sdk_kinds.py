"""The tools of OpenHands' SDK (V1) that match ours, and the fields of their actions and observations.

Holds: every result is accepted by the SDK's classes, which allow no other fields. Actions and observations without a
counterpart become `MCPToolAction` and `MCPToolObservation`, which hold any arguments and any content. Every client
knows these two, because they belong to the SDK itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from broker.contract import (
    Action,
    AgentDelegateAction,
    AgentFinishAction,
    AgentThinkAction,
    ApplyPatchAction,
    CmdOutputObservation,
    CmdRunAction,
    Event,
    FileEditAction,
    FileEditObservation,
    FileReadAction,
    FileReadObservation,
    FileWriteAction,
    Observation,
    OfferedToolAction,
    RiskyAction,
    TaskItem,
    TaskTrackingAction,
    TaskTrackingObservation,
    parse_json,
)
from deckhands.interop.openhands.v0_kinds import HEAD

Fields = dict[str, Any]

EDITOR_COMMANDS = ("view", "create", "str_replace", "insert", "undo_edit")
STATUSES = ("todo", "in_progress", "done")
FAILED_EDIT = "ERROR:"
"""The first word of an editor's report of a failure."""


@dataclass(frozen=True, slots=True)
class SdkTool:
    """A tool of the SDK.

    Attributes:
        name: its name in events.
        kind: its definition's class.
        action, observation: the classes of its events.
        module: the module that defines them; empty for the SDK itself.
    """

    name: str
    kind: str
    action: str
    observation: str
    module: str = ""


TERMINAL = SdkTool(
    "terminal", "TerminalTool", "TerminalAction", "TerminalObservation", "openhands.tools.terminal.definition"
)
FILE_EDITOR = SdkTool(
    "file_editor",
    "FileEditorTool",
    "FileEditorAction",
    "FileEditorObservation",
    "openhands.tools.file_editor.definition",
)
TASK_TRACKER = SdkTool(
    "task_tracker",
    "TaskTrackerTool",
    "TaskTrackerAction",
    "TaskTrackerObservation",
    "openhands.tools.task_tracker.definition",
)
APPLY_PATCH = SdkTool(
    "apply_patch",
    "ApplyPatchTool",
    "ApplyPatchAction",
    "ApplyPatchObservation",
    "openhands.tools.apply_patch.definition",
)
TASK = SdkTool("task", "TaskTool", "TaskAction", "TaskObservation", "openhands.tools.task.definition")
FINISH = SdkTool("finish", "FinishTool", "FinishAction", "FinishObservation")
THINK = SdkTool("think", "ThinkTool", "ThinkAction", "ThinkObservation")

TOOLS: Mapping[str, SdkTool] = {
    "execute_bash": TERMINAL,
    "terminal": TERMINAL,
    "str_replace_editor": FILE_EDITOR,
    "file_editor": FILE_EDITOR,
    "task_tracker": TASK_TRACKER,
    "apply_patch": APPLY_PATCH,
    "delegate": TASK,
    "finish": FINISH,
    "think": THINK,
}
"""The SDK's tools by the names of ours."""
TOOL_MODULES: Mapping[str, str] = {tool.name: tool.module for tool in TOOLS.values() if tool.module}
"""The modules that a client imports to read the events of a conversation, by tool."""


def to_sdk_tool_name(name: str) -> str:
    """Return the name of a tool in the SDK; its own name if it has no counterpart."""
    return TOOLS[name].name if name in TOOLS else name


def to_sdk_tool(name: str) -> Fields:
    """Return the definition of a tool in a system prompt's event.

    Only the name is known, because the log keeps no schemas.
    """
    if name in TOOLS:
        tool = TOOLS[name]
        known = {"kind": tool.kind, "action_type": tool.action, "observation_type": tool.observation}
        return known | {"title": tool.name, "description": f"The tool {name}."}
    return {
        "kind": "MCPToolDefinition",
        "title": name,
        "description": f"The tool {name}.",
        "action_type": "MCPToolAction",
        "observation_type": "MCPToolObservation",
        "mcp_tool": {"name": name, "inputSchema": {"type": "object"}},
    }


def to_sdk_text(text: str) -> list[Fields]:
    """Return a text as the parts of a message; none for an empty text."""
    return [{"type": "text", "text": text}] if text else []


def to_sdk_images(event: Event) -> list[Fields]:
    """Return the images of an event as parts of a message."""
    urls = [*(getattr(event, "image_urls", None) or ()), *filter(None, [getattr(event, "screenshot", "")])]
    return [{"type": "image", "image_urls": urls}] if urls else []


def read_arguments(action: Action, arguments: str | None) -> Fields:
    """Return the arguments of a call as the model wrote them, or made from the action without such."""
    try:
        given = parse_json(arguments or "{}") if arguments is not None else None
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, dict):
        return given
    if isinstance(action, OfferedToolAction):
        return dict(action.arguments)
    own = HEAD | RiskyAction.model_fields.keys()
    return {key: value for key, value in action.wire().items() if key not in own and value is not None}


def to_sdk_action(action: Action, arguments: Fields) -> Fields:
    """Return the fields of an action of the SDK."""
    found = _convert_action(action, arguments)
    return found or {"kind": "MCPToolAction", "data": arguments}


def _convert_action(action: Action, arguments: Fields) -> Fields | None:
    match action:
        case CmdRunAction(terminal=None, is_background=None, control=None):
            own: Fields = {"command": action.command, "is_input": action.is_input}
            if action.timeout is not None:
                own["timeout"] = action.timeout
            return {"kind": TERMINAL.action, **own}
        case FileReadAction():
            if action.view_range is not None:
                lines = {"view_range": list(action.view_range)}
            elif (action.start, action.end) != (0, -1):
                lines = {"view_range": [action.start + 1, action.end]}
            else:
                lines = {}
            return {"kind": FILE_EDITOR.action, "command": "view", "path": action.path, **lines}
        case FileWriteAction(start=0, end=-1):
            return {
                "kind": FILE_EDITOR.action,
                "command": "create",
                "path": action.path,
                "file_text": action.content,
            }
        case FileEditAction() if _is_plain_edit(action):
            texts = {name: getattr(action, name) for name in ("file_text", "old_str", "new_str", "insert_line")}
            return {
                "kind": FILE_EDITOR.action,
                "command": action.command,
                "path": action.path,
                **{name: value for name, value in texts.items() if value is not None},
            }
        case ApplyPatchAction():
            return {"kind": APPLY_PATCH.action, "patch": action.patch}
        case TaskTrackingAction() if action.command in ("view", "plan"):
            return {
                "kind": TASK_TRACKER.action,
                "command": action.command,
                "task_list": [*map(_to_task, action.task_list)],
            }
        case AgentThinkAction():
            thought = arguments.get("thought")
            return {"kind": THINK.action, "thought": thought if isinstance(thought, str) else action.thought}
        case AgentFinishAction():
            return {"kind": FINISH.action, "message": action.final_thought}
        case AgentDelegateAction():
            return {
                "kind": TASK.action,
                "prompt": str(action.inputs.get("task", "")),
                "subagent_type": action.agent,
            }
    return None


def _is_plain_edit(action: FileEditAction) -> bool:
    """Return whether the SDK's editor knows the edit."""
    line = action.insert_line
    further = (action.edits, action.replace_all, action.overwrite, action.cell, action.cell_type)
    return (
        action.command in EDITOR_COMMANDS
        and all(value is None for value in further)
        and (line is None or (type(line) is int and line >= 0))
    )


def _to_task(item: TaskItem) -> Fields:
    status = item.status if item.status in STATUSES else "todo"
    return {"title": item.title, "notes": item.notes, "status": status}


def to_sdk_observation(observation: Observation, action: Fields, tool_name: str) -> Fields:
    """Return the fields of an observation of the SDK.

    Args:
        action: the fields of the action that it answers.
        tool_name: the tool of the call.
    """
    match observation, action.get("kind"):
        case CmdOutputObservation(), TERMINAL.action:
            return {
                "kind": TERMINAL.observation,
                "content": [{"type": "text", "text": observation.content}],
                "command": observation.command,
                "exit_code": observation.exit_code,
                "timeout": observation.exit_code == -1,
                "metadata": observation.metadata.model_dump(exclude_none=True),
            }
        case FileReadObservation() | FileEditObservation(), FILE_EDITOR.action:
            edited: Fields = {}
            if isinstance(observation, FileEditObservation):
                names = ("prev_exist", "old_content", "new_content")
                edited = {name: getattr(observation, name) for name in names}
            return {
                "kind": FILE_EDITOR.observation,
                "content": to_sdk_text(observation.agent_text) + to_sdk_images(observation),
                "is_error": observation.agent_text.startswith(FAILED_EDIT),
                "command": action["command"],
                "path": observation.path or action["path"],
                **{name: value for name, value in edited.items() if value is not None},
            }
        case TaskTrackingObservation(), TASK_TRACKER.action:
            return {
                "kind": TASK_TRACKER.observation,
                "content": to_sdk_text(observation.content),
                "command": action["command"],
                "task_list": [*map(_to_task, observation.task_list)],
            }
        case _, THINK.action | FINISH.action | APPLY_PATCH.action as kind:
            content = to_sdk_text(observation.agent_text)
            return {"kind": kind.replace("Action", "Observation"), "content": content}
        case _, TASK.action:
            return {
                "kind": TASK.observation,
                "content": to_sdk_text(observation.agent_text or "The delegate works in the background."),
                "task_id": getattr(observation, "conversation_id", "") or str(observation.cause or ""),
                "subagent": action["subagent_type"],
                "status": "completed" if getattr(observation, "conversation_id", "") else "running",
            }
    return {
        "kind": "MCPToolObservation",
        "content": to_sdk_text(observation.agent_text) + to_sdk_images(observation),
        "tool_name": tool_name,
    }
