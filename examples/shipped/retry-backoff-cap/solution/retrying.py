"""Calling again what failed."""

import time

from policy import Policy


def call(function, policy=Policy(), sleep=time.sleep):
    """Call the function until it returns."""
    for wait in policy.waits():
        try:
            return function()
        except policy.on as error:
            asked = getattr(error, "retry_after", None)
            pause = wait if asked is None else max(wait, asked)
        sleep(pause)
    return function()
