"""What a function will return."""

import threading


class Cancelled(Exception):
    """The function will not run."""


class Result:
    """The result of a function that runs elsewhere."""

    def __init__(self, drop):
        self.drop = drop
        self.done = threading.Event()
        self.value = None
        self.error = None

    def run(self, function, args):
        try:
            self.value = function(*args)
        except BaseException as error:
            self.error = error
        self.done.set()

    def get(self, timeout=None):
        """Wait for the function and return what it returned."""
        if not self.done.wait(timeout):
            raise TimeoutError("the function has not finished")
        if self.error is not None:
            raise self.error
        return self.value

    def cancel(self):
        """Do not run the function, if it has not started."""
        if not self.drop(self):
            return False
        self.error = Cancelled("the function was cancelled")
        self.done.set()
        return True
