"""Loading values once, for many threads."""

import threading


class Circular(Exception):
    """A key needs itself."""


class Attempt:
    """One run of the load function."""

    def __init__(self):
        self.thread = threading.get_ident()
        self.done = threading.Event()
        self.value = None
        self.error = None


class Loader:
    """Remember what was loaded."""

    def __init__(self, load):
        self.load = load
        self.lock = threading.Lock()
        self.attempts = {}  # by key, those that succeeded stay
        self.waits = {}  # thread -> the attempt for which it waits

    def get(self, key, timeout=None):
        """Return the value of the key; load it if nobody has."""
        me = threading.get_ident()
        with self.lock:
            attempt = self.attempts.get(key)
            mine = attempt is None
            if mine:
                attempt = self.attempts[key] = Attempt()
            elif not attempt.done.is_set():
                other = attempt
                while other is not None and not other.done.is_set():
                    if other.thread == me:
                        raise Circular(f"{key!r} needs itself")
                    other = self.waits.get(other.thread)
                self.waits[me] = attempt
        if mine:
            self.run(key, attempt)
        elif not attempt.done.is_set() or me in self.waits:
            in_time = attempt.done.wait(timeout)
            with self.lock:
                self.waits.pop(me, None)
            if not in_time:
                raise TimeoutError(f"{key!r} is still being loaded")
        if attempt.error is not None:
            raise attempt.error
        return attempt.value

    def run(self, key, attempt):
        try:
            attempt.value = self.load(key)
        except BaseException as error:
            attempt.error = error
        with self.lock:
            if attempt.error is not None and self.attempts.get(key) is attempt:
                del self.attempts[key]
            attempt.done.set()

    def forget(self, key):
        """Load the key again when it is wanted next."""
        with self.lock:
            self.attempts.pop(key, None)
