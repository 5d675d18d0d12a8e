"""Merging two versions of a text."""

from diff import changes


def overlap(one, start, end):
    """Whether a change touches the same lines as a region, or inserts at the same place."""
    if one[0] == one[1] and start == end:
        return one[0] == start
    return one[0] < end and start < one[1]


def version(base, region, start, end):
    """Return the lines of one side, from start to end of the base."""
    result = []
    at = start
    for first, last, lines in region:
        result += base[at:first] + lines
        at = last
    return result + base[at:end]


def merge(base, mine, theirs):
    """Return the merged lines and the number of conflicts."""
    sides = [changes(base, mine), changes(base, theirs)]
    result = []
    conflicts = 0
    at = 0
    while sides[0] or sides[1]:
        side = min((0, 1), key=lambda n: sides[n][0][:2] if sides[n] else (len(base) + 1,))
        first = sides[side].pop(0)
        start, end = first[:2]
        region = [[], []]
        region[side].append(first)
        grown = True
        while grown:
            grown = False
            for n in (0, 1):
                if sides[n] and overlap(sides[n][0], start, end):
                    taken = sides[n].pop(0)
                    region[n].append(taken)
                    start, end = min(start, taken[0]), max(end, taken[1])
                    grown = True
        result += base[at:start]
        at = end
        versions = [version(base, part, start, end) for part in region]
        if not region[0] or not region[1] or versions[0] == versions[1]:
            result += versions[0] if region[0] else versions[1]
        else:
            conflicts += 1
            result += ["<<<<<<< mine", *versions[0], "=======", *versions[1], ">>>>>>> theirs"]
    return result + base[at:], conflicts
