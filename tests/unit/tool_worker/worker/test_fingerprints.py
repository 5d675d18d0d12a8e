"""What tells an action from another with its number: its content, and nothing else of it."""

from __future__ import annotations

from broker.contract.actions import CmdRunAction
from broker.contract.events import EventSource, ToolCallMetadata
from broker.contract.file_events import FileReadAction
from broker.runtime.clock import SystemClock
from broker.tools.custom_tools import ToolContext
from tool_worker.worker.steps.action_run import compute_fingerprint


def test_the_same_content_has_the_same_fingerprint() -> None:
    call = ToolCallMetadata(function_name="execute_bash", tool_call_id="call-2", reply_id=6)
    again = {"thought": "again", "timestamp": SystemClock().now(), "tool_call_metadata": call}
    action = CmdRunAction(command="ls", source=EventSource.AGENT)
    assert compute_fingerprint(action) == compute_fingerprint(action.model_copy(update=again))


def test_other_content_has_another() -> None:
    found = [CmdRunAction(command="ls"), CmdRunAction(command="ls", timeout=3), CmdRunAction(command="ls\ud800")]
    fingerprints = {compute_fingerprint(action) for action in (*found, FileReadAction(path="ls"))}
    assert len(fingerprints) == 4
    assert all(len(one) == 16 and one.isalnum() for one in fingerprints)


def test_a_call_with_other_arguments_has_another_idempotency_key() -> None:
    one, other = (ToolContext("conversation", 7, fingerprint=fingerprint) for fingerprint in ("abc", "def"))
    assert one.idempotency_key == "conversation-7-abc"
    assert other.idempotency_key != one.idempotency_key
