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
        self.pending = None
        if os.path.exists(path):
            with open(path, "rb") as file:
                data = file.read()
            try:
                changes, good = read(data)
            except ValueError as error:
                raise Damaged(str(error)) from None
            for change in changes:
                self.apply(change)
            if good < len(data):
                os.truncate(path, good)
        if os.path.exists(path + ".new"):
            os.remove(path + ".new")
        self.file = open(path, "ab")

    def apply(self, change):
        if "set" in change:
            key, value = change["set"]
            self.values[key] = value
        elif "delete" in change:
            self.values.pop(change["delete"], None)
        else:
            for part in change["batch"]:
                self.apply(part)

    def write(self, change):
        if self.pending is None:
            self.file.write(line(change))
            self.file.flush()
        else:
            self.pending.append(change)
        self.apply(change)

    def get(self, key, default=None):
        return self.values.get(key, default)

    def keys(self):
        return sorted(self.values)

    def set(self, key, value):
        self.write({"set": [key, value]})

    def delete(self, key):
        """Remove a key; an unknown one is a KeyError."""
        if key not in self.values:
            raise KeyError(key)
        self.write({"delete": key})

    @contextmanager
    def batch(self):
        """Group changes: all of them or none."""
        if self.pending is not None:
            raise RuntimeError("a batch within a batch")
        before = dict(self.values)
        self.pending = []
        try:
            yield self
        except BaseException:
            self.values = before
            self.pending = None
            raise
        changes, self.pending = self.pending, None
        if changes:
            self.write({"batch": changes})

    def compact(self):
        """Rewrite the log with the live keys only."""
        with open(self.path + ".new", "wb") as file:
            for key, value in self.values.items():
                file.write(line({"set": [key, value]}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path + ".new", self.path)
        self.file.close()
        self.file = open(self.path, "ab")

    def close(self):
        self.file.close()
