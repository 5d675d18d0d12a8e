"""Tool workers that are killed at any moment while they start, use and end workspaces leave no program running.

The worker here is the part that manages workspaces, forked from a process that has everything imported, so that a
thousand kills take minutes. It is killed at a random moment of its work. Then either another worker closes the
conversation, or none does and the host has to end by itself; in both cases, nothing is left of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.workspace_hosts import ROOT
from tests.polling import until
from tool_worker.sandbox.none import find_temporary_directory
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.workspaces import Workspaces

DAEMONS = "sleep {0}.1 & setsid sleep {0}.2 & (setsid sh -c 'trap \"\" HUP TERM INT; sleep {0}.3; :' &) ; mktemp"
TYPICAL_SECONDS = 0.6
ALONE_SECONDS = 0.2


@pytest.mark.parametrize(
    ("sandbox", "kills"),
    [
        ("bwrap", 12),
        ("none", 8),
        *(pytest.param(name, 500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]) for name in ("bwrap", "none")),
    ],
)
def test_killed_workers_leave_no_program(tmp_path: Path, sandbox: str, kills: int) -> None:
    seed = os.environ.get("FAULT_SEED", "2026")
    nursery = [sys.executable, "-m", __name__, str(tmp_path / "node"), sandbox, str(kills), seed]
    done = subprocess.run(nursery, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=1700)
    told = json.loads(done.stdout)
    print(f"\nseed {seed}, {sandbox}: {told}")
    assert told["killed"] == kills
    assert told["hosts found alive"] > 0


class Nursery:
    """Starts workers, kills them, and looks for leftovers.

    Args:
        node: where the workspaces are.
    """

    def __init__(self, node: Path, sandbox: str, seed: int) -> None:
        self._node = node
        self._sandbox = sandbox
        self._seeded = random.Random(seed)
        self.told = dict.fromkeys(("killed", "hosts found alive", "left alone", "closed"), 0)

    def run(self, kills: int) -> None:
        tried = self._workspaces(3600.0)
        asyncio.run(_try(tried))
        for number in range(kills):
            conversation_id = f"orphan-{os.getpid()}-{number}"
            is_left_alone = number % 2 == 0
            workspaces = self._workspaces(ALONE_SECONDS if is_left_alone else 3600.0)
            workspaces._sandboxes = tried._sandboxes  # tried once: the trial is not what is killed here
            mark = f"{os.getpid()}{number:05}"
            self._bear_and_kill(workspaces, conversation_id, mark)
            self.told["hosts found alive"] += HostFolder(self._node, conversation_id).is_alive
            self.told["left alone" if is_left_alone else "closed"] += 1
            asyncio.run(self._end(conversation_id, mark, is_left_alone=is_left_alone))

    def _workspaces(self, ttl_seconds: float) -> Workspaces:
        return Workspaces(self._node, sandbox=self._sandbox, ttl_seconds=ttl_seconds)

    def _bear_and_kill(self, workspaces: Workspaces, conversation_id: str, mark: str) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(_work(workspaces, conversation_id, mark))
            finally:
                os._exit(0)
        descriptor = os.pidfd_open(pid)
        select.select([descriptor], [], [], self._seeded.uniform(0, TYPICAL_SECONDS))
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(descriptor)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        self.told["killed"] += 1

    async def _end(self, conversation_id: str, mark: str, *, is_left_alone: bool) -> None:
        folder = HostFolder(self._node, conversation_id)
        if is_left_alone:
            await until(lambda: not folder.is_alive, what=f"end of the host of {conversation_id}")
            # Without a sandbox, only the process table tells killed processes from ended ones.
            await until(lambda: not _marked(conversation_id, mark), what="end of its programs")
        else:
            await self._workspaces(3600.0).close(conversation_id)
            assert not folder.is_alive
            assert _marked(conversation_id, mark) == []
        binding = folder.read_binding()
        if binding is not None and self._sandbox == "none":
            assert not find_temporary_directory(binding.host_id).exists()


async def _try(workspaces: Workspaces) -> None:
    await workspaces.get_demanded_sandbox()


async def _work(workspaces: Workspaces, conversation_id: str, mark: str) -> None:
    """Do what a tool worker does for a conversation, over and over, until killed."""
    for action_id in itertools.count(1):
        workspace = await workspaces.open(conversation_id)
        await workspace.run(action_id, "bash", {"command": DAEMONS.format(mark)})
        if action_id % 3 == 0:
            await workspaces.close(conversation_id)


def _marked(conversation_id: str, mark: str) -> list[list[bytes]]:
    """Return the command lines of a conversation's live programs: its host, and those that `_work` starts."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  (a glob fails when one of them ends)
        with suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")[:-1]
            if conversation_id.encode() in words or any(mark.encode() in word for word in words):
                found.append(words)
    return found


def main() -> None:
    nursery = Nursery(Path(sys.argv[1]), sys.argv[2], int(sys.argv[4]))
    nursery.run(int(sys.argv[3]))
    print(json.dumps(nursery.told))


if __name__ == "__main__":
    main()
