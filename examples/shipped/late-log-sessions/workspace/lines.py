"""Reading lines of the log."""

from datetime import datetime


def parse(line):
    """Return the time and the user."""
    time, user, path = line.split()
    return datetime.fromisoformat(time[:19]), user
