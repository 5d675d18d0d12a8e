"""The agent's task list, as it planned it last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.contract.task_list import TaskItem, TaskTrackingAction
from controller_worker.core.concern import Concern

if TYPE_CHECKING:
    from controller_worker.core.state import State


@dataclass(frozen=True)
class TaskList:
    """The items, in the agent's order."""

    items: tuple[TaskItem, ...] = ()


def _after_action(tasks: TaskList, action: TaskTrackingAction, state: State) -> TaskList:
    return TaskList(action.task_list) if action.command == "plan" else tasks


TASK_LIST = Concern("tasks", {TaskTrackingAction: _after_action})
