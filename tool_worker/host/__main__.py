"""Starts a workspace host: `python -I -S …/tool_worker/host/__main__.py <conversation id>`.

The configuration arrives on standard input. The listener, the journal and the lock that shows that the host is alive
arrive as open descriptors, so nothing in the sandbox has a path to them. The argument only labels the process in a
process list.

Holds:
    - In a process namespace the host is the first process. The kernel lets no program of the workspace kill or stop it,
      and kills all of them when it ends.
    - Nothing runs in a directory that replaced the workspace after the tool worker had checked it.
"""

from __future__ import annotations

import os
import sys

MAX_FD = 1 << 20


def main() -> None:
    """Serve until closed."""
    # In isolated mode our own folder is not on the path, and the package may be installed anywhere.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from tool_worker.host.children import OomScore
    from tool_worker.host.compiled import signal, socket
    from tool_worker.host.configuration import (
        HISTORY_FD,
        JOURNAL_FD,
        LISTENER_FD,
        PID_FD,
        HostConfiguration,
    )
    from tool_worker.host.hardening import harden, restrict_writes
    from tool_worker.host.journal import Journal
    from tool_worker.host.loop import EventLoop
    from tool_worker.host.server import HostServer

    with open(0, "rb", closefd=False) as source:
        configuration = HostConfiguration.decode(source.read())
    found = os.stat(configuration.workspace)
    if [found.st_dev, found.st_ino] != configuration.identity:
        sys.exit("the workspace was replaced by another directory")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    harden()
    if configuration.temporary:
        os.makedirs(configuration.temporary, 0o700, exist_ok=True)
    if configuration.announces_pid:
        os.write(PID_FD, b'{"child-pid": %d}' % os.getpid())
    # Programs of the workspace must not inherit any other descriptor of the tool worker.
    os.closerange(PID_FD, MAX_FD)
    os.set_inheritable(JOURNAL_FD, False)
    os.set_inheritable(HISTORY_FD, False)
    score = OomScore()
    if configuration.writable:
        restrict_writes(configuration.writable)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    listener = socket.socket(fileno=LISTENER_FD)
    listener.setblocking(False)
    os.set_inheritable(LISTENER_FD, False)
    loop = EventLoop()
    server = HostServer(loop, configuration, listener, Journal(JOURNAL_FD, boot_id), score)
    try:
        loop.run()
    finally:
        server.end()
        if configuration.temporary:
            from shutil import rmtree

            rmtree(configuration.temporary, ignore_errors=True)


if __name__ == "__main__":
    main()
