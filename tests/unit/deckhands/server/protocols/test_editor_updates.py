"""The events of a conversation as an editor shows them."""

from __future__ import annotations

from broker.contract.actions import CmdRunAction
from broker.contract.events import with_id
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from deckhands.server.protocols.editor_updates import SessionUpdates


def test_editor_reads_why_a_command_has_no_end() -> None:
    updates = SessionUpdates()
    updates.of(with_id(CmdRunAction(command="sleep 9"), 3))
    suffix = "\n[The command timed out after 5 seconds. You may wait longer to see more.]"
    metadata = CmdOutputMetadata(suffix=suffix)
    (update,) = updates.of(CmdOutputObservation(command="sleep 9", content="1", metadata=metadata, cause=3))
    assert update.content[0].content.text == "1\nThe command timed out after 5 seconds."
