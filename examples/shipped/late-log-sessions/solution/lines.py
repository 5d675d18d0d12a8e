"""Reading lines of the log."""

from datetime import datetime, timezone


def parse(line):
    """Return the time and the user, or None if the line is broken."""
    words = line.split(None, 2)
    if len(words) < 3:
        return None
    try:
        time = datetime.fromisoformat(words[0].replace("Z", "+00:00"))
    except ValueError:
        return None
    if time.tzinfo is None:
        return None
    return time.astimezone(timezone.utc), words[1]
