"""Joining requests to sessions."""

from datetime import timedelta

from lines import parse

PAUSE = timedelta(minutes=30)


def sessions(lines):
    """Return (user, start, end, count) of all sessions."""
    current = {}
    done = []
    for time, user in sorted(filter(None, map(parse, lines))):
        if user in current and time - current[user][2] <= PAUSE:
            current[user][2] = time
            current[user][3] += 1
        else:
            if user in current:
                done.append(tuple(current[user]))
            current[user] = [user, time, time, 1]
    done += [tuple(session) for session in current.values()]
    return sorted(done, key=lambda session: (session[1], session[0]))


def summary(lines):
    """Return a line for each session."""
    return [
        f"{user} {int((end - start).total_seconds())}s {count}" for user, start, end, count in sessions(lines)
    ]
