"""Removes checkpoints that are no longer needed: `python -m tool_worker.workspace.checkpoints.removal`, for a job.

It reads one JSON object from standard input: `url`, and optionally the ids to `forget`. It writes one to standard
output: the `conversations` with checkpoints, the number of `forgotten` ones, and the number of `dropped` pieces.

Holds: a piece is dropped only if no manifest names it and it is older than `UNUSED_SECONDS`. A checkpoint being saved
rewrites pieces that are half as old.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import UTC, timedelta

from broker.runtime import SYSTEM_CLOCK, is_conversation_id
from tool_worker.workspace.checkpoints.checkpoint_store import (
    BASES,
    CHECKPOINTS,
    ENCRYPTED_VERSION,
    HISTORY,
    RENEWED_SECONDS,
    Checkpoints,
    iter_pieces,
)

UNUSED_SECONDS = 2 * RENEWED_SECONDS
FOLDERS = (CHECKPOINTS, BASES, HISTORY)


class CheckpointRemoval(Checkpoints):
    """The checkpoints in one storage, with operations to remove them."""

    def list_conversations(self) -> list[str]:
        """Return the conversations with any files in this storage."""
        found = {
            path.removeprefix(f"{folder}/").partition("/")[0] for folder in self._folders() for path in self._in(folder)
        }
        return sorted(name for name in found if is_conversation_id(name))

    def forget_all(self, conversation_id: str) -> None:
        """Drop the checkpoints and the original state of a conversation's workspace. Idempotent."""
        self.forget(conversation_id)
        base = f"{self._root}/{BASES}/{conversation_id}"
        if self._exists(base):
            self._files.rm_file(base)

    def drop_unused(self, *, older_than_seconds: float = 0.0) -> int:
        """Drop the pieces that no checkpoint uses, and return how many.

        Args:
            older_than_seconds: Minimum age of a dropped piece; with 0, no checkpoint may be saved at the same time.
        """
        pieces = self._in(f"{self._root}/objects")
        used: set[str] = set()
        for folder in self._folders():
            for path in self._in(folder):
                used.update(self._list_pieces(path))
        unused = [path for path in pieces if path.rpartition("/")[2] not in used]
        doomed = [path for path in unused if not older_than_seconds or self._is_older(path, older_than_seconds)]
        for path in doomed:
            self._files.rm_file(path)
        return len(doomed)

    def _list_pieces(self, path: str) -> Iterable[str]:
        """Return the names of the pieces of a manifest, which need no key."""
        manifest = self._read_manifest(path, is_decrypted=False)
        return manifest["pieces"] if manifest["version"] == ENCRYPTED_VERSION else iter_pieces(manifest["entries"])

    def _folders(self) -> list[str]:
        return [f"{self._root}/{name}" for name in FOLDERS]

    def _in(self, folder: str) -> list[str]:
        with self._translate_errors():
            self._files.invalidate_cache()
            return list(self._files.find(folder)) if self._files.exists(folder) else []

    def _is_older(self, path: str, seconds: float) -> bool:
        try:
            written = self._files.modified(path)
        except (OSError, RuntimeError):  # the piece was removed, or the storage reports no time
            return False
        age = self._clock.now() - (written if written.tzinfo else written.replace(tzinfo=UTC))
        return bool(age > timedelta(seconds=seconds))


def main() -> None:
    """Run the removals requested on standard input."""
    request = json.load(sys.stdin)
    checkpoints = CheckpointRemoval(request["url"], SYSTEM_CLOCK)
    doomed = request.get("forget")
    for conversation_id in doomed or ():
        checkpoints.forget_all(conversation_id)
    dropped = 0 if doomed is None else checkpoints.drop_unused(older_than_seconds=UNUSED_SECONDS)
    found = {"conversations": checkpoints.list_conversations(), "forgotten": len(doomed or ()), "dropped": dropped}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
