"""The context of one claimed action, passed through the steps.

Holds: a step uses only fields that an earlier step has set: `read_action` sets `action`, `make_request` sets `tool` and
`request`, `open_workspace` sets `host`, `observe` sets `result`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

from broker.contract import Action, Event, Observation, OutcomePolicy, codec
from broker.coordination import ActionClaimed, ActionDelivery, ActionReclaimed, CrashAttribution
from broker.runtime import DeckhandsError, Rest
from broker.tools import make_idempotency_key
from tool_worker.tools import HostRequest, RemoteWork, Tool
from tool_worker.workspace import HostResult, OpenWorkspace

NOT_CONTENT = frozenset({"timestamp", "source", "thought", "tool_call_metadata", "traceparent"})
"""Fields that do not count as content: time, source and wording of the decision."""
FINGERPRINT_DIGITS = 16


@dataclass
class ActionRun:
    """A claimed action.

    Attributes:
        attribution: Counts the worker deaths during this action.
        entry: The bytes of the event, without their encryption; empty if they were changed.
        refusal: If given, the answer to the action; the action does not run.
        work: Record of the work that the action has started elsewhere; None if nothing is recorded.
        traceparent: Span of the action; None without tracing.
        is_recorded: Our observation is in the log; False also if another worker's observation is.
        is_abandoned: The action was stopped, but still runs here.
        action: The action with its long texts in full.
        request: The request to the workspace host.
        result: The reply of the workspace host.
    """

    delivery: ActionDelivery
    claim: ActionClaimed | ActionReclaimed
    attribution: CrashAttribution
    entry: bytes
    refusal: DeckhandsError | None = None
    work: RemoteWork | None = None
    traceparent: str | None = None
    is_recorded: bool = False
    is_stopped: bool = False
    is_abandoned: bool = False
    stop_ordered_ms: int | None = None
    action: Action = field(init=False)
    tool: Tool = field(init=False)
    request: HostRequest = field(init=False)
    host: OpenWorkspace = field(init=False)
    result: HostResult = field(init=False)

    @property
    def conversation_id(self) -> str:
        """The conversation of the action."""
        return self.delivery.conversation_id

    @cached_property
    def event(self) -> Event:
        """The action as delivered; raises if it cannot be decoded."""
        return codec.decode(self.entry, self.delivery.action_id)

    @cached_property
    def fingerprint(self) -> str:
        """Distinguishes this action from a lost one with the same number."""
        return compute_fingerprint(self.action)

    @property
    def idempotency_key(self) -> str:
        """The key with which a tool can avoid a second effect."""
        return make_idempotency_key(self.conversation_id, self.action.id, self.fingerprint)

    @property
    def may_repeat(self) -> bool:
        """Whether the action may run a second time."""
        return self.action.outcome is OutcomePolicy.IDEMPOTENT


RestOfAction = Rest[ActionRun, Observation]
RestOfHostCall = Rest[ActionRun, HostResult]


def compute_fingerprint(action: Action) -> str:
    """Return sixteen hex digits for the kind and the arguments of an action.

    The fingerprint distinguishes two actions with the same number if the store lost the first. It depends only on the
    content: the same command with the same number in the same conversation is the same action, so it does not run again
    and its result is used.
    """
    content = {name: value for name, value in action.wire().items() if name not in NOT_CONTENT}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:FINGERPRINT_DIGITS]
