"""A key-value store in a log file."""

import os
from contextlib import contextmanager

from records import line, read


class Damaged(Exception):
    """The log is broken in its middle."""


class Store:
    """Texts by key."""

    def __init__(self, path):
        self.path = path
        self.values = {}
        if os.path.exists(path):
            with open(path, "rb") as file:
                for change in read(file.read()):
                    self.apply(change)
        self.file = open(path, "ab")

    def apply(self, change):
        if "set" in change:
            key, value = change["set"]
            self.values[key] = value

    def write(self, change):
        self.file.write(line(change))
        self.file.flush()
        self.apply(change)

    def get(self, key, default=None):
        return self.values.get(key, default)

    def keys(self):
        return sorted(self.values)

    def set(self, key, value):
        self.write({"set": [key, value]})

    def delete(self, key):
        """Remove a key; an unknown one is a KeyError."""
        del self.values[key]
        self.write({"delete": key})

    @contextmanager
    def batch(self):
        """Group changes."""
        yield self

    def compact(self):
        """Rewrite the log with the live keys only."""
        self.file.close()
        self.file = open(self.path, "wb")
        for key, value in self.values.items():
            self.write({"set": [key, value]})

    def close(self):
        self.file.close()
