"""The task list: what a plan means, and that a view shows the latest one."""

import json
from typing import Any

import pytest

from broker.contract.events import AgentSpec, Event, ModelReply, ModelToolCall
from broker.contract.observations import ErrorObservation
from broker.contract.task_list import TaskItem, TaskTrackingAction, TaskTrackingObservation
from controller_worker.agents.codeact import CodeActAgent
from controller_worker.core.controller import fold
from controller_worker.core.state import State
from tests.controller_parts import started

LIST = (TaskItem(id="1", title="Look", status="done"), TaskItem(id="2", title="Fix", notes="carefully"))


def tracked(*calls: dict[str, Any], task_list: tuple[TaskItem, ...] = ()) -> list[Event]:
    written = tuple(
        ModelToolCall(id=f"c{n}", name="task_tracker", arguments=json.dumps(call)) for n, call in enumerate(calls)
    )
    return CodeActAgent(AgentSpec()).events_of(ModelReply(id=7, tool_calls=written), task_list)


def test_a_plan_is_noted_and_answered_at_once() -> None:
    action, answer = tracked({"command": "plan", "task_list": [item.model_dump() for item in LIST]})
    assert isinstance(action, TaskTrackingAction)
    assert isinstance(answer, TaskTrackingObservation)
    assert action.task_list == answer.task_list == LIST
    assert answer.content == "Task list has been updated with 2 items."
    assert (answer.cause, answer.tool_call_metadata) == (8, action.tool_call_metadata)


def test_a_view_shows_the_list() -> None:
    _, answer = tracked({"command": "view"}, task_list=LIST)
    assert isinstance(answer, TaskTrackingObservation)
    assert answer.content == "# Task List\n\n1. ✅ Look\n\n2. ⏳ Fix\ncarefully\n"
    _, nothing = tracked({"command": "view"})
    assert isinstance(nothing, TaskTrackingObservation)
    assert nothing.content == 'No task list found. Use the "plan" command to create one.'


def test_a_view_beside_a_plan_shows_that_plan() -> None:
    *_, answer = tracked({"command": "plan", "task_list": [{"title": "New"}]}, {"command": "view"}, task_list=LIST)
    assert isinstance(answer, TaskTrackingObservation)
    assert answer.content == "# Task List\n\n1. ⏳ New\n\n"


def test_what_an_item_leaves_out_has_a_default() -> None:
    action, _ = tracked({"command": "plan", "task_list": [{}, {"status": "in_progress"}]})
    assert isinstance(action, TaskTrackingAction)
    assert action.task_list == (
        TaskItem(id="task-1", title="Untitled task", status="todo", notes=""),
        TaskItem(id="task-2", title="Untitled task", status="in_progress", notes=""),
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({}, 'Missing required argument "command" in tool call task_tracker'),
        ({"command": "erase"}, "Unknown command 'erase' in tool call task_tracker. Use `view` or `plan`."),
        ({"command": "plan"}, 'Missing required argument "task_list" for "plan" command in tool call task_tracker'),
        (
            {"command": "plan", "task_list": ["x"]},
            "Invalid format for 'task_list' in tool call task_tracker: use a list of objects.",
        ),
        ({"command": "plan", "task_list": [{}] * 201}, "A task list may have 200 items. Put several steps into one."),
    ],
)
def test_a_call_that_cannot_be_understood_is_told_why(call: dict[str, Any], text: str) -> None:
    (error,) = tracked(call)
    assert isinstance(error, ErrorObservation)
    assert error.content == text


def test_items_may_be_typed_loosely() -> None:
    items = [
        {"id": 1, "title": "Look", "status": "completed", "notes": None},
        {"id": 2.5, "title": None, "status": None, "notes": 7},
        {"id": None, "title": True, "status": "", "notes": "n", "surplus": [1]},
    ]
    action, answer = tracked({"command": "plan", "task_list": items})
    assert isinstance(action, TaskTrackingAction)
    assert isinstance(answer, TaskTrackingObservation)
    assert [tuple(item.model_dump().values()) for item in action.task_list] == [
        ("1", "Look", "completed", ""),
        ("2.5", "Untitled task", "todo", "7"),
        ("task-3", "true", "", "n"),
    ]
    _, view = tracked({"command": "view"}, task_list=action.task_list)
    assert isinstance(view, TaskTrackingObservation)
    assert view.content == "# Task List\n\n1. ⏳ Look\n\n2. ⏳ Untitled task\n7\n3. ⏳ true\nn\n"
    assert TaskItem.model_validate(items[0]) == action.task_list[0]  # as an imported trajectory has it


@pytest.mark.parametrize("name", ["id", "title", "status", "notes"])
def test_task_item_with_a_list_for_text_is_refused(name: str) -> None:
    (error,) = tracked({"command": "plan", "task_list": [{name: ["x"]}]})
    assert isinstance(error, ErrorObservation)
    assert error.content.startswith(f"Invalid argument '{name}' in tool call task_tracker: ")


def test_the_state_keeps_the_latest_plan() -> None:
    core = started()
    events = [
        TaskTrackingAction(id=core.state.version + 1, command="plan", task_list=LIST),
        TaskTrackingAction(id=core.state.version + 2, command="view"),
    ]
    assert core.state.tasks.items == State().tasks.items == ()
    assert fold(core.state, events).tasks.items == LIST
