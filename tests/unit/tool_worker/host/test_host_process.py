"""Parts of the host's process: its event loop, the processes below it, and its end of the egress proxy."""

from __future__ import annotations

import os
import subprocess

from tool_worker.host.descendants import current_tick, find_children, find_started_since
from tool_worker.host.egress import KEPT_REFUSALS, HostEgress
from tool_worker.host.loop import EventLoop


def test_nothing_is_served_after_the_callback_that_stops_it() -> None:
    loop, served = EventLoop(), []
    pipes = [os.pipe() for _ in range(3)]
    for number, (read, write) in enumerate(pipes):
        os.write(write, b"x")
        loop.on_readable(read, lambda number=number: (served.append(number), loop.stop()))
    loop.run()
    assert len(served) == 1
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)


def test_timer_fires_once_on_time_and_can_be_moved() -> None:
    times, fired = iter(range(1000)), []
    loop = EventLoop(clock=lambda: float(next(times)))
    late, early, never = (loop.timer(lambda name=name: fired.append(name)) for name in ("late", "early", "never"))
    end = loop.timer(loop.stop)
    late.set(0.0)
    late.set(40.0)
    early.set(3.0)
    never.set(3.0)
    never.set(None)
    end.set(60.0)
    # Something is always ready, so that nothing waits for real time to pass.
    read, write = os.pipe()
    os.write(write, b"x")
    loop.on_readable(read, lambda: None)
    loop.run()
    assert fired == ["early", "late"]
    for descriptor in (read, write):
        os.close(descriptor)


def test_spared_processes_and_their_children_do_not_count() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "sleep 100 & echo; read x; kill $!"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        shell.stdout.readline()
        (below,) = find_children(shell.pid)
        family = {shell.pid, below}
        assert family <= set(find_started_since(os.getpid(), 0, frozenset()))
        assert family & set(find_started_since(os.getpid(), 0, frozenset({shell.pid}))) == set()
        assert family & set(find_started_since(os.getpid(), 0, frozenset({below}))) == {shell.pid}
        assert family & set(find_started_since(os.getpid(), current_tick() + 1000, frozenset())) == set()
        shell.communicate("\n")


def test_only_the_proxys_end_makes_room_for_another() -> None:
    egress, proxy, client = HostEgress(0), object(), object()
    egress.proxy = proxy
    egress.forget(client)
    assert egress.proxy is proxy
    egress.forget(proxy)
    assert egress.proxy is None


def test_refusals_are_kept_once_and_bounded() -> None:
    egress = HostEgress(0)
    for number in (*range(KEPT_REFUSALS + 5), 0):
        egress.note({"why": f"no {number}"})
    assert egress.take_refusals() == [f"no {number}" for number in range(KEPT_REFUSALS)]
    assert egress.take_refusals() == []
    egress.note({"why": "no 0"})
    assert egress.take_refusals() == ["no 0"]


def test_without_a_port_there_is_no_socket_to_lend() -> None:
    egress = HostEgress(0)
    assert not egress.lend(object(), None, b"")  # type: ignore[arg-type]
    assert egress.proxy is None
