"""Joining requests to sessions."""

from datetime import timedelta

from lines import parse

PAUSE = timedelta(minutes=30)


def sessions(lines):
    """Return (user, start, end, count) of all sessions."""
    current = {}
    done = []
    for line in lines:
        time, user = parse(line)
        if user in current and (time - current[user][2]).seconds < PAUSE.seconds:
            current[user][2] = time
            current[user][3] += 1
        else:
            if user in current:
                done.append(tuple(current[user]))
            current[user] = [user, time, time, 1]
    done += [tuple(session) for session in current.values()]
    return sorted(done)


def summary(lines):
    """Return a line for each session."""
    return [f"{user} {(end - start).seconds}s {count}" for user, start, end, count in sessions(lines)]
