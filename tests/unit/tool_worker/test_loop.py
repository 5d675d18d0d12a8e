"""The host's event loop: what is ready when it is stopped is not served any more."""

from __future__ import annotations

import os

from tool_worker.host.loop import Loop


def test_nothing_is_served_after_the_callback_that_stops_it() -> None:
    loop, served = Loop(), []
    pipes = [os.pipe() for _ in range(3)]
    for number, (read, write) in enumerate(pipes):
        os.write(write, b"x")
        loop.on_readable(read, lambda number=number: (served.append(number), loop.stop()))
    loop.run()
    assert len(served) == 1
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)
