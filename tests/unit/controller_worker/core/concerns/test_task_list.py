"""The task list: the effect of a plan; a view shows the latest one."""

import json
from typing import Any

import pytest

from broker.contract.events import AgentSpec, ModelReply
from broker.contract.observations import ErrorObservation
from broker.contract.task_list import TaskItem, TaskTrackingAction, TaskTrackingObservation
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.core.controller import fold
from controller_worker.core.state import State
from tests.controller_parts import call, started

LIST = (TaskItem(id="1", title="Look", status="done"), TaskItem(id="2", title="Fix", notes="carefully"))


def tracked(*calls: dict[str, Any], task_list: tuple[TaskItem, ...] = ()) -> list[Any]:
    written = tuple(call("task_tracker", json.dumps(each), f"c{n}") for n, each in enumerate(calls))
    return CodeActAgent(AgentSpec()).events_of(ModelReply(id=7, tool_calls=written), task_list)


def test_a_plan_is_noted_and_answered_at_once() -> None:
    action, answer = tracked({"command": "plan", "task_list": [item.model_dump() for item in LIST]})
    assert isinstance(action, TaskTrackingAction)
    assert isinstance(answer, TaskTrackingObservation)
    assert action.task_list == answer.task_list == LIST
    assert answer.content == "Task list has been updated with 2 items."
    assert (answer.cause, answer.tool_call_metadata) == (8, action.tool_call_metadata)


NEW = {"command": "plan", "task_list": [{"title": "New"}]}


@pytest.mark.parametrize(
    ("before", "task_list", "text"),
    [
        ([], LIST, "# Task List\n\n1. ✅ Look\n\n2. ⏳ Fix\ncarefully\n"),
        ([], (), 'No task list found. Use the "plan" command to create one.'),
        ([NEW], LIST, "# Task List\n\n1. ⏳ New\n\n"),
    ],
    ids=["the list", "no list", "the plan beside it"],
)
def test_a_view_shows_the_list(before: list[dict[str, Any]], task_list: tuple[TaskItem, ...], text: str) -> None:
    *_, answer = tracked(*before, {"command": "view"}, task_list=task_list)
    assert isinstance(answer, TaskTrackingObservation)
    assert answer.content == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, 'Missing required argument "command" in tool call task_tracker'),
        ({"command": "erase"}, "Unknown command 'erase' in tool call task_tracker. Use `view` or `plan`."),
        ({"command": "plan"}, 'Missing required argument "task_list" for "plan" command in tool call task_tracker'),
        (
            {"command": "plan", "task_list": ["x"]},
            "Invalid format for 'task_list' in tool call task_tracker: use a list of objects.",
        ),
        ({"command": "plan", "task_list": [{}] * 201}, "A task list may have 200 items. Put several steps into one."),
        *(
            (
                {"command": "plan", "task_list": [{name: ["x"]}]},
                f"Invalid argument '{name}' in tool call task_tracker: ",
            )
            for name in ("id", "title", "status", "notes")
        ),
    ],
)
def test_a_call_that_cannot_be_understood_is_told_why(arguments: dict[str, Any], text: str) -> None:
    (error,) = tracked(arguments)
    assert isinstance(error, ErrorObservation)
    assert error.content.startswith(text)


def test_items_may_be_typed_loosely() -> None:
    items = [
        {"id": 1, "title": "Look", "status": "completed", "notes": None},
        {"id": 2.5, "title": None, "status": None, "notes": 7},
        {"id": None, "title": True, "status": "", "notes": "n", "surplus": [1]},
        {},
        {"status": "in_progress"},
    ]
    action, _ = tracked({"command": "plan", "task_list": items})
    assert [tuple(item.model_dump().values()) for item in action.task_list] == [
        ("1", "Look", "completed", ""),
        ("2.5", "Untitled task", "todo", "7"),
        ("task-3", "true", "", "n"),
        ("task-4", "Untitled task", "todo", ""),
        ("task-5", "Untitled task", "in_progress", ""),
    ]
    _, view = tracked({"command": "view"}, task_list=action.task_list[:3])
    assert view.content == "# Task List\n\n1. ⏳ Look\n\n2. ⏳ Untitled task\n7\n3. ⏳ true\nn\n"
    assert TaskItem.model_validate(items[0]) == action.task_list[0]  # as an imported trajectory has it


def test_the_state_keeps_the_latest_plan() -> None:
    core = started()
    events = [
        TaskTrackingAction(id=core.state.version + 1, command="plan", task_list=LIST),
        TaskTrackingAction(id=core.state.version + 2, command="view"),
    ]
    assert core.state.tasks.items == State().tasks.items == ()
    assert fold(core.state, events).tasks.items == LIST
