"""When home and /tmp of a workspace are directories, and not memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.sandbox import Enclosure


@pytest.mark.parametrize(
    ("mount_at", "read_only", "keeps"),
    [
        ("/workspace", (), True),
        ("/tmp/a/project", (), False),
        ("/home/agent/project", (), False),
        ("/workspace", ("/tmp/a/tools",), False),
        ("/srv/project", ("/opt/tools",), True),
    ],
)
def test_nothing_is_mounted_below_what_an_agent_has_left(
    tmp_path: Path, mount_at: str, read_only: tuple[str, ...], keeps: bool
) -> None:
    """A link in the place of a directory on the way to the mount point would lead bwrap out of the sandbox."""
    enclosure = Enclosure(tmp_path, mount_at, is_own=True, read_only=tuple(map(Path, read_only)))
    assert BubblewrapSandbox(tmp_path).keeps_home(enclosure) is keeps
