"""What tells one action from another that got its number after the store had lost the first.

Holds: the same for the same content, whatever hands the action over and however often. So the same command under the
same number in the same conversation is the same action: its result is collected, and it is not run a second time.
"""

from __future__ import annotations

import json
from hashlib import sha256

from broker.contract import Action

NOT_CONTENT = frozenset({"timestamp", "source", "thought", "tool_call_metadata", "traceparent"})
"""When it was decided, by whom and in which words."""
DIGITS = 16


def fingerprint_of(action: Action) -> str:
    """Return sixteen hex digits for the kind and the arguments of an action."""
    content = {name: value for name, value in action.wire().items() if name not in NOT_CONTENT}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGITS]
