"""What tests leave mounted is unmounted: pytest could not remove their folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.checkpoint_nodes import node_with_overlays

LEAVES_A_MOUNT = """
from tool_worker.workspace.files.overlay_mounts import is_mounted, mount_overlay

def test_leaves_a_mount(tmp_path):
    places = [tmp_path / name for name in ("below", "above", "work", "merged")]
    for place in places:
        place.mkdir()
    mount_overlay(*places)
    assert is_mounted(tmp_path / "merged")
"""


def test_overlays_that_a_test_leaves_mounted_are_unmounted(tmp_path: Path) -> None:
    with node_with_overlays(tmp_path):
        (tmp_path / "test_it.py").write_text(LEAVES_A_MOUNT)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
        places = [f"--rootdir={tmp_path}", f"--basetemp={tmp_path}/kept", str(tmp_path / "test_it.py")]
        done = subprocess.run([*command, *places], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert list(tmp_path.glob("kept/*/merged"))
        assert f"{tmp_path}/kept" not in Path("/proc/self/mountinfo").read_text()
