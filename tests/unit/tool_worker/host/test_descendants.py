"""Processes below a process: which of them began since a moment, and which do not count."""

from __future__ import annotations

import os
import subprocess

from tool_worker.host.descendants import current_tick, find_children, find_started_since


def test_spared_processes_and_their_children_do_not_count() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "sleep 100 & echo; read x; kill $!"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        (below,) = find_children(shell.pid)
        family = {shell.pid, below}
        assert family <= set(find_started_since(os.getpid(), 0, frozenset()))
        assert family & set(find_started_since(os.getpid(), 0, frozenset({shell.pid}))) == set()
        assert family & set(find_started_since(os.getpid(), 0, frozenset({below}))) == {shell.pid}
        assert family & set(find_started_since(os.getpid(), current_tick() + 1000, frozenset())) == set()
        shell.communicate("\n")
