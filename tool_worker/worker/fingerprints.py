"""Fingerprints tell apart two actions with the same number, of which the store lost the first.

Holds: the fingerprint depends on the action's content only, not on its delivery. The same command under the same
number in the same conversation is the same action: its result is collected, and it does not run a second time.
"""

from __future__ import annotations

import json
from hashlib import sha256

from broker.contract import Action

NOT_CONTENT = frozenset({"timestamp", "source", "thought", "tool_call_metadata", "traceparent"})
"""Fields that do not count as content: time, source and wording of the decision."""
DIGITS = 16


def fingerprint_of(action: Action) -> str:
    """Return sixteen hex digits for the kind and the arguments of an action."""
    content = {name: value for name, value in action.wire().items() if name not in NOT_CONTENT}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGITS]
