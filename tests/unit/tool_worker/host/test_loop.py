"""The host's event loop: what is ready when it is stopped is not served any more."""

from __future__ import annotations

import os

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
