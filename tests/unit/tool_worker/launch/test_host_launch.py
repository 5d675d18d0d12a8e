"""Processes of hosts, whose numbers may be those of others by now."""

from __future__ import annotations

import os
import threading

from tool_worker.launch.host_launch import _watched


def test_a_number_that_is_no_process_any_more_is_not_watched() -> None:
    with _watched(os.getpid()) as descriptor:
        assert descriptor is not None
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        for gone in (thread.native_id, 2**22 - 1, None):
            with _watched(gone) as descriptor:
                assert descriptor is None
    finally:
        ended.set()
        thread.join()
