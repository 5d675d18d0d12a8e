"""Merging two versions of a text."""

from diff import changes


def merge(base, mine, theirs):
    """Return the merged lines and the number of conflicts."""
    mine_at = {start: lines for start, _, lines in changes(base, mine)}
    theirs_at = {start: lines for start, _, lines in changes(base, theirs)}
    result = []
    conflicts = 0
    for at in range(max(len(base), len(mine), len(theirs))):
        if at in mine_at and at in theirs_at:
            conflicts += 1
            result += ["<<<<<<< mine", *mine_at[at], "=======", *theirs_at[at], ">>>>>>> theirs"]
        elif at in mine_at:
            result += mine_at[at]
        elif at in theirs_at:
            result += theirs_at[at]
        else:
            result += base[at : at + 1]
    return result, conflicts
