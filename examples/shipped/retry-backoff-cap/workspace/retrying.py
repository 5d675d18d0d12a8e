"""Calling again what failed."""

import time

from policy import Policy


def call(function, policy=Policy(), sleep=time.sleep):
    """Call the function until it returns."""
    for wait in policy.waits():
        try:
            return function()
        except BaseException:
            sleep(wait)
    raise RuntimeError("gave up")
