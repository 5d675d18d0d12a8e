"""The model's names for the tools offered to a conversation, whatever names their authors gave them.

Holds: the names of one conversation are distinct, and depend on its tools and not on their order. A tool without a
namesake keeps its name. Every name is valid for providers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from broker.contract import ToolOffer

MAX_NAME_CHARS = 64
"""The providers' limit for a name of letters, digits, `_` and `-`."""
_HASH_CHARS = 8
_WITHOUT_SERVER = "tool"


def make_visible_names(offers: Iterable[ToolOffer], own: AbstractSet[str]) -> dict[str, str]:
    """Return the name of each offer for the model, by its key.

    A tool of an MCP server is `<server>__<tool>` if another tool has its name. Any other tool is `tool__<name>` if the
    agent itself has a tool of that name. A name that is then too long, or still taken, ends with a hash of its key.

    Args:
        own: the names of the agent's tools.
    """
    by_key = {offer.key: offer for offer in offers}
    counts = Counter(offer.name for offer in by_key.values())
    names = dict[str, str]()
    prefixed = dict[str, str]()
    for key, offer in by_key.items():
        is_of_server = offer.runner == "mcp"
        if offer.name not in own and (counts[offer.name] == 1 or not is_of_server):
            names[key] = offer.name
            continue
        server = key.partition("/")[0] if is_of_server else _WITHOUT_SERVER
        prefixed[key] = f"{server}__{offer.name}"
    taken = {*own, *names.values()}
    again = Counter(prefixed.values())
    for key, name in sorted(prefixed.items()):
        fits = len(name) <= MAX_NAME_CHARS and again[name] == 1 and name not in taken
        names[key] = name if fits else _make_hashed_name(name, key, taken)
        taken.add(names[key])
    return names


def _make_hashed_name(name: str, key: str, taken: AbstractSet[str]) -> str:
    found = ""
    text = key
    while not found or found in taken:
        text = hashlib.sha256(text.encode()).hexdigest()
        found = f"{name[: MAX_NAME_CHARS - _HASH_CHARS - 1]}_{text[:_HASH_CHARS]}"
    return found
