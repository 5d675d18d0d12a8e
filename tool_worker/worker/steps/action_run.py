"""The context of one claimed action, passed through the steps.

Holds: a step uses only fields that an earlier step has set: `read_action` sets `action`, `make_request` sets `tool` and
`request`, `open_workspace` sets `host`, `observe` sets `result`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from broker.contract import Action, Event, Observation, OutcomePolicy, codec
from broker.coordination import ActionClaimed, ActionDelivery, ActionReclaimed, CrashAttribution
from broker.runtime import DeckhandsError, Rest
from tool_worker.tools import HostRequest, Tool
from tool_worker.worker.fingerprints import fingerprint_of
from tool_worker.workspace import HostResult, OpenWorkspace


@dataclass
class ActionRun:
    """A claimed action.

    Attributes:
        attribution: Counts the worker deaths during this action.
        refusal: If given, the answer to the action; the action does not run.
        traceparent: Span of the action; None without tracing.
        action: The action with its long texts in full.
        request: The request to the workspace host.
        result: The reply of the workspace host.
    """

    delivery: ActionDelivery
    claim: ActionClaimed | ActionReclaimed
    attribution: CrashAttribution
    refusal: DeckhandsError | None = None
    traceparent: str | None = None
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
        return codec.decode(self.delivery.entry, self.delivery.action_id)

    @cached_property
    def fingerprint(self) -> str:
        """Tells this action apart from a lost one that had the same number."""
        return fingerprint_of(self.action)

    @property
    def may_repeat(self) -> bool:
        """Whether the action may run a second time."""
        return self.action.outcome is OutcomePolicy.IDEMPOTENT


RestOfAction = Rest[ActionRun, Observation]
RestOfHostCall = Rest[ActionRun, HostResult]
