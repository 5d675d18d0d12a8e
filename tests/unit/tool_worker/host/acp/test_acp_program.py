"""The program beside the shell between two calls."""

from __future__ import annotations

import json
import socket
import threading
import time

from tool_worker.host.acp.acp_program import AcpProgram


def test_where_no_agent_runs_nothing_is_done_between_two_calls() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = threading.Thread(target=AcpProgram(theirs, rest_seconds=0.01).run)
        program.start()
        ours.sendall(json.dumps({"call": 1, "arguments": {"permission": 3}}).encode() + b"\n")
        assert json.loads(ours.recv(65536))["result"]["report"]["state"] == "lost"
        assert program.ident is not None
        used = time.pthread_getcpuclockid(program.ident)
        before = time.clock_gettime(used)
        program.join(0.5)
        after = time.clock_gettime(used)
        ours.shutdown(socket.SHUT_WR)
        program.join()
    assert after - before < 0.02
