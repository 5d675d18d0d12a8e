"""What a function will return."""

import threading


class Cancelled(Exception):
    """The function will not run."""


class Result:
    """The result of a function that runs elsewhere."""

    def __init__(self):
        self.done = threading.Event()
        self.value = None

    def set(self, value):
        self.value = value
        self.done.set()

    def get(self, timeout=None):
        """Wait for the function and return what it returned."""
        self.done.wait(timeout)
        return self.value

    def cancel(self):
        """Do not run the function, if it has not started."""
        return False
