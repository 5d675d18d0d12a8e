"""Removes checkpoints: `python -m tool_worker.checkpoints ID…`, with DECKHANDS_CHECKPOINTS as tool workers have it.

Nothing else removes them: forks and other nodes may begin with a checkpoint long after its conversation was deleted.

Holds: if an id is wrong, nothing is removed; after an interruption, a call without ids removes what is left of it.
Does not: look out for tool workers. Stop them first: what they save meanwhile could lose a piece of a file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from broker.runtime.clock import SystemClock
from broker.runtime.counting import counted
from broker.runtime.errors import DeckhandsError, UsageError
from broker.runtime.ids import check_conversation_id
from tool_worker.checkpoints.checkpoint_store import BASES, CHECKPOINTS, Checkpoints
from tool_worker.settings import tool_settings

USAGE_STATUS = 2


def remove(place: str, conversation_ids: Sequence[str]) -> str:
    """Remove the checkpoints of conversations, and the pieces of files that no other one names; report it.  Idempotent.

    Args:
        place: as DECKHANDS_CHECKPOINTS has it.
        conversation_ids: without any, only pieces are removed.

    Raises:
        UsageError: there is no place, or no checkpoint of one of them.
        CheckpointsUnavailable: the place cannot be used now.
    """
    if not place:
        raise UsageError(
            "No place of checkpoints is named.", remedy="Set DECKHANDS_CHECKPOINTS as the tool workers do."
        )
    folders = [Checkpoints(place, SystemClock(), folder=folder) for folder in (CHECKPOINTS, BASES)]
    wanted = {check_conversation_id(conversation_id) for conversation_id in conversation_ids}
    for conversation_id in sorted(wanted):
        if not any(folder.has(conversation_id) for folder in folders):
            raise UsageError(
                f"There is no checkpoint of the conversation {conversation_id}.",
                remedy="Leave it out. Without ids, only pieces of files that no checkpoint names are removed.",
            )
    for conversation_id in sorted(wanted):
        for folder in folders:
            folder.forget(conversation_id)
    pieces = folders[0].drop_unused()
    return f"The checkpoints of {counted(len(wanted), 'conversation')} and {_pieces(pieces)} are removed."


def _pieces(count: int) -> str:
    return f"{count:,} {'piece of a file' if count == 1 else 'pieces of files'}"


def main(arguments: Sequence[str]) -> int:
    """Remove what the arguments name, report it on standard output, and return the exit status."""
    try:
        sys.stdout.write(remove(tool_settings().checkpoints, arguments) + "\n")
    except DeckhandsError as error:
        sys.stderr.write(f"{error}\n")
        return USAGE_STATUS if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
