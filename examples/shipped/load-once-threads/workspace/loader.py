"""Loading values once, for many threads."""

import threading


class Circular(Exception):
    """A key needs itself."""


class Loader:
    """Remember what was loaded."""

    def __init__(self, load):
        self.load = load
        self.lock = threading.RLock()
        self.values = {}

    def get(self, key, timeout=None):
        """Return the value of the key; load it if nobody has."""
        if key in self.values:
            return self.values[key]
        value = self.load(key)
        with self.lock:
            self.values[key] = value
        return value

    def forget(self, key):
        """Load the key again when it is wanted next."""
        with self.lock:
            self.values.pop(key, None)
