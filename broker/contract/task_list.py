"""An agent's task list (OpenHands 3.2, 9.1, 10.1), and plans that must be accepted before work starts.

Holds: the list is the latest plan in the log, so it is identical after a takeover, in a replay and in a fork.
Differs: no file is written. The original keeps the list in `TASKS.md` beside its log and loses it with that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from broker.contract.actions import RiskyAction
from broker.contract.events import Action, EventSource, EventValue, Observation
from broker.contract.kinds import Paragraph
from broker.contract.tool_arguments import ToolCallError, parse_loose_text, require_text
from broker.contract.tool_specs import ToolSpec

MAX_ITEMS = 200
NO_LIST = 'No task list found. Use the "plan" command to create one.'
STATUS_ICONS = {"todo": "⏳", "in_progress": "🔄", "done": "✅"}

MAX_SHOWN_LINES = 1_000

PROPOSE_PLAN = ToolSpec(
    name="propose_plan",
    description=(
        "Propose the plan, when you have looked at all that it touches. Once it is accepted it is carried out as it "
        "stands, so it has to be complete."
    ),
    parameters={
        "type": "object",
        "properties": {"plan": {"type": "string", "description": "The whole plan, in Markdown."}},
        "required": ["plan"],
    },
)

TASK_TRACKER = ToolSpec(
    name="task_tracker",
    description=(
        "Keep a list of the steps of a larger task. `plan` replaces the whole list, `view` shows it. Use it when the "
        "task has several steps: write the steps down before you begin, mark one as in_progress while you work on it "
        "and as done when it is checked. Leave it out for a task of one or two steps."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "plan"], "description": "What to do."},
            "task_list": {
                "type": "array",
                "description": "For `plan`: the whole list, in order.",
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string", "description": "A name for the step."},
                        "title": {"type": "string", "description": "What is to be done."},
                        "status": {
                            "type": "string",
                            "enum": ["todo", "in_progress", "done"],
                            "description": "How far it is.",
                        },
                        "notes": {"type": "string", "description": "What you want to remember of it."},
                    },
                    "required": ["title", "status", "id"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    },
)


LooseText = Annotated[str, BeforeValidator(parse_loose_text)]


class TaskItem(EventValue):
    """An item of the agent's task list, with the original's loose types.

    Attributes:
        status: `todo`, `in_progress`, `done` or another word of the model, which is shown like `todo`.
    """

    id: LooseText
    title: LooseText
    status: LooseText = "todo"
    notes: LooseText = ""

    @property
    def icon(self) -> str:
        """The icon before the item in a list."""
        return STATUS_ICONS.get(self.status, STATUS_ICONS["todo"])


class TaskTrackingObservation(Observation):
    """The agent's task list."""

    kind: Literal["observation.task_tracking"] = "observation.task_tracking"
    is_decided: ClassVar[bool] = True
    command: str
    task_list: tuple[TaskItem, ...] = ()


class TaskTrackingAction(Action):
    """View or replace the agent's task list."""

    kind: Literal["action.task_tracking"] = "action.task_tracking"
    is_decided: ClassVar[bool] = True
    tool_spec: ClassVar[ToolSpec] = TASK_TRACKER
    enabled_by: ClassVar[str] = "enable_plan_mode"
    source: EventSource = EventSource.AGENT
    command: str = "view"
    task_list: tuple[TaskItem, ...] = ()

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        lines = [f"{item.icon} {item.title}" for item in self.task_list]
        what = "\n".join(["Task list:", *lines]) if self.command == "plan" else "Reading the task list"
        return (Paragraph(self.thought), Paragraph(what, "action"))

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`; missing fields of an item get the original's defaults."""
        command = require_text(arguments, "command", TASK_TRACKER.name)
        if command not in ("view", "plan"):
            raise ToolCallError(f"Unknown command {command[:100]!r} in tool call task_tracker. Use `view` or `plan`.")
        if command == "view":
            return cls(command=command)
        if "task_list" not in arguments:
            raise ToolCallError('Missing required argument "task_list" for "plan" command in tool call task_tracker')
        items = arguments["task_list"]
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ToolCallError("Invalid format for 'task_list' in tool call task_tracker: use a list of objects.")
        if len(items) > MAX_ITEMS:
            raise ToolCallError(f"A task list may have {MAX_ITEMS} items. Put several steps into one.")
        return cls(command=command, task_list=tuple(_parse_item(item, n) for n, item in enumerate(items, 1)))

    def answer(self, task_list: Sequence[TaskItem]) -> Observation:
        """See `Action.answer`."""
        if self.command == "plan":
            content = f"Task list has been updated with {len(self.task_list)} items."
            return TaskTrackingObservation(content=content, command="plan", task_list=self.task_list)
        content = render_task_list(task_list) if task_list else NO_LIST
        return TaskTrackingObservation(content=content, command=self.command, task_list=tuple(task_list))


def render_task_list(items: Sequence[TaskItem]) -> str:
    """Return a task list as text for the model."""
    lines = [f"{n}. {item.icon} {item.title}\n{item.notes}\n" for n, item in enumerate(items, 1)]
    return "# Task List\n\n" + "".join(lines)


def _parse_item(given: Mapping[str, Any], number: int) -> TaskItem:
    defaults = {"id": f"task-{number}", "title": "Untitled task", "status": "todo", "notes": ""}
    return TaskItem.model_validate(
        {name: default if given.get(name) is None else given[name] for name, default in defaults.items()}
    )


class PlanAction(RiskyAction):
    """Propose a plan. No tool worker runs it; it is accepted at once or when a user confirms it.

    Attributes:
        plan: Markdown.
    """

    answered_by: ClassVar[tuple[str, ...]] = ("observation.plan_accepted",)

    kind: Literal["action.plan"] = "action.plan"
    argument: ClassVar[tuple[str, str]] = ("plan", "plan")
    sentence_template: ClassVar[str] = "The plan:\n{plan}"
    tool_spec: ClassVar[ToolSpec] = PROPOSE_PLAN
    plan: str

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`; a plan is shown whole, because a user must decide on it."""
        return (Paragraph(self.thought), Paragraph(self.sentence, max_lines=MAX_SHOWN_LINES))


class PlanAcceptedObservation(Observation):
    """A plan was accepted; the executing agent takes over the conversation."""

    kind: Literal["observation.plan_accepted"] = "observation.plan_accepted"
    is_decided: ClassVar[bool] = True
    sentence_template: ClassVar[str] = "The plan is accepted; {agent} executes it."
    agent: str
