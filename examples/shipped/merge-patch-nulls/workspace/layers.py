"""Settings in layers."""


def merge(target, patch):
    """Return the target with the patch applied."""
    if not isinstance(patch, dict):
        return patch
    if not patch:
        return {}
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and key in target:
            target[key] = merge(target[key], value)
        else:
            target[key] = value
    return target


def effective(documents):
    """Return all documents merged, later ones over earlier ones."""
    result = documents[0]
    for document in documents[1:]:
        result = merge(result, document)
    return result


def difference(old, new):
    """Return the patch that turns old into new."""
    return {key: value for key, value in new.items() if key not in old or old[key] != value}
