"""When home and /tmp of a workspace are directories, and not memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.sandbox import Enclosure


@pytest.mark.parametrize(
    ("mount_at", "read_only", "home", "temporary"),
    [
        ("/workspace", (), True, True),
        ("/tmp/a/project", (), True, False),
        ("/home/agent/project", (), False, True),
        ("/workspace", ("/tmp/a/tools",), True, False),
        ("/srv/project", ("/opt/tools",), True, True),
    ],
)
def test_nothing_is_mounted_below_what_an_agent_has_left(
    tmp_path: Path, mount_at: str, read_only: tuple[str, ...], home: bool, temporary: bool
) -> None:
    """A link in the place of a directory on the way to the mount point would lead bwrap out of the sandbox."""
    enclosure = Enclosure(tmp_path, mount_at, is_own=True, read_only=tuple(map(Path, read_only)))
    sandbox = BubblewrapSandbox(tmp_path)
    assert (sandbox.keeps_home(enclosure), sandbox.keeps_temporary(enclosure)) == (home, temporary)
