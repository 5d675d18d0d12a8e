"""Settings in layers."""

import copy


def merge(target, patch):
    """Return the target with the patch applied."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def effective(documents):
    """Return all documents merged, later ones over earlier ones."""
    result = copy.deepcopy(documents[0])
    for document in documents[1:]:
        result = merge(result, document)
    return result


def same(one, other):
    """Whether two values are the same JSON."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def difference(old, new):
    """Return the patch that turns old into new."""
    patch = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key in old and same(old[key], value):
            continue
        if key in old and isinstance(old[key], dict) and isinstance(value, dict):
            patch[key] = difference(old[key], value)
        else:
            patch[key] = copy.deepcopy(value)
    return patch
