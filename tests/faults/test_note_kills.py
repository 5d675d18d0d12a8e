"""Notes, and a critic, while the controller worker dies: one note in the notebook, one verdict in the log."""

from __future__ import annotations

import pytest

from broker.contract.notes import NotebookKey, NoteObservation
from broker.contract.observations import FinishVerdictObservation
from broker.contract.specs import CriticSpec, GoalSpec, MemorySpec
from broker.coordination.notebooks import Notebooks
from tests.faults.harness import FaultCluster

WRITE = {"tool_calls": [{"name": "note", "arguments": {"command": "write", "text": "Use make."}}]}
FINISH = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}


@pytest.mark.parametrize(
    "boundary", ["controller.after_append@3", pytest.param("controller.before_append@4", marks=pytest.mark.slow)]
)
async def test_a_worker_dies_before_and_after_the_notebook_is_written(cluster: FaultCluster, boundary: str) -> None:
    """Its appends are the greeting, the recall, the turn with the note, and the result of the note."""
    name, _, hit = boundary.partition("@")
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS=f"{name}:kill@{hit}")
    (cid,) = await cluster.submit(
        [WRITE, FINISH], memory=MemorySpec(project="engine"), goal=GoalSpec(critic=CriticSpec())
    )
    assert await cluster.until_ended("victim") == -9
    notebooks, book = Notebooks(cluster.client.store), NotebookKey("", "", "engine")
    assert len(await notebooks.read(book)) == (1 if name == "controller.before_append" else 0)
    cluster.start_controller("survivor")
    await cluster.settle([cid])
    await cluster.check([cid], commands=0)
    events = await cluster.client.events(cid)
    (told,) = (event for event in events if isinstance(event, NoteObservation))
    assert await notebooks.read(book) == (told.written,)
    assert len([event for event in events if isinstance(event, FinishVerdictObservation)]) == 1
