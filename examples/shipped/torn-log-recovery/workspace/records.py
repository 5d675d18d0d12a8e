"""The lines of the log."""

import json
import zlib


def line(change):
    """Return the line for a change."""
    data = json.dumps(change).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def read(data):
    """Return all changes of a log."""
    changes = []
    for row in data.split(b"\n"):
        if not row:
            continue
        checksum, text = row.split(b" ", 1)
        if int(checksum, 16) != zlib.crc32(text):
            raise ValueError("wrong checksum")
        changes.append(json.loads(text))
    return changes
