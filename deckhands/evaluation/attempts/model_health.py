"""Checks whether the models of an evaluation answer.

A model's first attempt is its probe, and failures in a row stop its attempts.

A separate probe call would need the keys, which only the controller workers hold; so the first attempt of each model
starts alone, and its first model call is the probe. It uses the same path as all others: worker, sandbox, key, model.

Holds: pure; the caller passes the time. A model that answers again is usable again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker.contract import Event, ModelCallFailed, ModelReply
from broker.log import ConversationProgress, WaitReason

MAX_FAILURES = 3
"""Failed calls without any reply, or later failed attempts in a row, after which a model is not called any more."""
PROBE_SECONDS = 60.0
"""How long further attempts wait for the first reply if no call fails, for example during a long `setup`."""
NEEDS_REPAIR = frozenset({"authentication", "not_found", "out_of_credits", "llm_config"})
"""Codes of failed calls that no other prompt avoids: before the first reply, one is enough."""
FAILING = frozenset(
    {
        WaitReason.SERVICE_UNAVAILABLE,
        WaitReason.INTERNAL,
        WaitReason.TIMEOUT,
        WaitReason.MALFORMED_REPLY,
        WaitReason.NO_RESPONSE,
    }
)
"""What a conversation waits for after a failed call; not its turn at a quota."""
MAX_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True)
class FailedCalls:
    """The failed calls with which a conversation ended, with the code and the provider's text of the last one."""

    code: str
    text: str
    count: int

    @classmethod
    def find(cls, events: Sequence[Event]) -> FailedCalls | None:
        """Return the failed calls since the last reply; None if the conversation did not end with one."""
        failed: list[ModelCallFailed] = []
        for event in reversed(events):
            if isinstance(event, ModelReply):
                break
            if isinstance(event, ModelCallFailed):
                failed.append(event)
        if not failed:
            return None
        last = failed[0]
        return cls(last.code, " ".join((last.content or last.last_error).split())[:MAX_TEXT_CHARS], len(failed))

    @property
    def reason(self) -> str:
        """The code and the text."""
        return f"{self.code}: {self.text}" if self.text else self.code


@dataclass(slots=True)
class ModelHealth:
    """The health of one model.

    Attributes:
        probed_at: when its first attempt started; None if none has.
        has_replied: whether it has answered since the driver started.
        failures: failed calls (before the first reply) or attempts (later) in a row.
        failed_attempts: attempts in a row that ended in failed calls.
        reason: the last failure, as text; `conversation_id` has it.
        waits_for: the code of the failed call that an attempt currently retries; empty for none.
    """

    probed_at: float | None = None
    has_replied: bool = False
    failures: int = 0
    failed_attempts: int = 0
    reason: str = ""
    conversation_id: str = ""
    waits_for: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether every call fails, so that no further attempt starts."""
        return self.failures >= MAX_FAILURES

    @property
    def problem(self) -> str:
        """The problem of its calls, as text; empty if none is known."""
        if self.is_silent:
            return f"every call fails: {self.reason}"
        if self.has_replied:
            return ""
        failing = self.waits_for or self.reason
        return f"no reply yet, {failing}" if failing else ""

    def record_start(self, now: float) -> None:
        """Record that an attempt starts."""
        self.probed_at = now if self.probed_at is None else self.probed_at

    def record_reply(self) -> None:
        """Record that it has answered."""
        self.has_replied = True
        self.failures = self.failed_attempts = 0

    def record_failure(self, calls: FailedCalls, conversation_id: str) -> None:
        """Record that an attempt ended in failed calls."""
        self.failed_attempts += 1
        if self.has_replied:
            self.failures += 1
        else:
            self.failures += MAX_FAILURES if calls.code in NEEDS_REPAIR else calls.count
        self.reason = calls.reason
        self.conversation_id = conversation_id

    def observe(self, attempts: Sequence[ConversationProgress]) -> None:
        """Take in the progress of its attempts in flight."""
        self.waits_for = next((one.wait_reason for one in attempts if one.wait_reason in FAILING), "")

    def must_wait(self, now: float, in_flight: int) -> bool:
        """Return whether a further attempt has to wait for the first reply."""
        if self.has_replied or in_flight <= self.failed_attempts:
            return False
        is_late = self.probed_at is not None and now - self.probed_at >= PROBE_SECONDS
        return not is_late or bool(self.waits_for or self.reason)
