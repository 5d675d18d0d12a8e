"""The lines of the log."""

import json
import zlib


def line(change):
    """Return the line for a change."""
    data = json.dumps(change).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def one(row):
    """Return the change of a line, or None if it is damaged."""
    checksum, _, text = row.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        change = json.loads(text)
    except ValueError:
        return None
    return change if isinstance(change, dict) else None


def read(data):
    """Return the changes of a log, and how many of its bytes are good."""
    *rows, _ = data.split(b"\n")
    changes = [one(row) for row in rows]
    if changes and changes[-1] is None:
        changes.pop()
    if None in changes:
        raise ValueError("a record in the middle is damaged")
    return changes, sum(len(row) + 1 for row in rows[: len(changes)])
