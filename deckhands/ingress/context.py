"""Shared parts of an ingress worker: access to the store, callers, and the start and outcome of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from broker.contract import AgentState, AgentStateChangedObservation, Event, UploadedSource
from broker.coordination import make_content_name
from broker.log import EXPIRED_CODE, Appended, EventLog
from broker.runtime import DataForgotten, DataLocked, OutcomeUnknown, StoreMisconfigured, StoreUnavailable, to_millis
from broker.store import Argument, Store, decode_fields
from deckhands.client import (
    Client,
    RecentOffers,
    Summary,
    Tally,
    TaskSpec,
    Until,
    derive_task_conversation_id,
    find_quoted_texts,
    load_quoted_texts,
    start_conversation,
    summarize,
)
from deckhands.ingress.callers import CELERY, STREAM, Caller, Callers
from deckhands.ingress.earlier_results import ARCHIVE
from deckhands.ingress.failures import failure_of
from deckhands.ingress.ingress_results import TaskResults
from deckhands.ingress.revocations import Revocations

__all__ = ["IngressContext", "derive_task_conversation_id"]

REVOKED = {"status": "REVOKED", "reason": "terminated"}
EXPIRED = {"status": "REVOKED", "reason": "expired"}
FAILURE, SUCCESS = "FAILURE", "SUCCESS"
MAX_CHARS = {CELERY: 1 << 18, STREAM: 1 << 16}
"""How many characters of an agent's last message the caller gets; longer outputs have their texts cut."""
STORE_ERRORS = (StoreUnavailable, OutcomeUnknown, StoreMisconfigured)
"""Errors of the store, as opposed to errors of one task or entry."""
LOCKED_SECONDS = 5.0
"""How long a task waits before it is tried again: a master key may be on its way."""
OFFERS_LIMIT_SECONDS = 2.0
"""Shorter than the time after which another worker takes over a task or an entry."""


def is_temporary(error: Exception) -> bool:
    """Return whether an error is not the fault of the task or entry: the store is unavailable, or a key is missing."""
    is_locked = isinstance(error, DataLocked) and not isinstance(error, DataForgotten)
    return is_locked or isinstance(error, STORE_ERRORS)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a caller, not yet delivered.

    Attributes:
        outcome: the outcome as JSON; a different one may have been decided before.
        started_ms: when the agent started, in Unix milliseconds; 0 if it never did.
    """

    caller: Caller
    outcome: str
    started_ms: int


@dataclass(frozen=True, slots=True)
class IngressContext:
    """Shared parts of an ingress worker.

    Attributes:
        broker: see `BrokerSettings.broker_name`.
        offers_limit_seconds: how long the start of a conversation may wait until a tool is offered.
        log: masks secrets.
    """

    store: Store
    results: TaskResults
    broker: str = ""
    offers_limit_seconds: float = OFFERS_LIMIT_SECONDS
    client: Client = field(init=False)
    log: EventLog = field(init=False)
    callers: Callers = field(init=False)
    revocations: Revocations = field(init=False)
    _offers: RecentOffers = field(init=False)

    def __post_init__(self) -> None:
        client = Client(self.store)
        object.__setattr__(self, "client", client)
        object.__setattr__(self, "log", EventLog(self.store, client.secrets))
        object.__setattr__(self, "callers", Callers(self.store, client.secrets))
        object.__setattr__(self, "revocations", Revocations(self.store))
        object.__setattr__(self, "_offers", RecentOffers(self.store))

    def may_answer(self, caller: Caller) -> bool:
        """Return whether this worker may answer a caller, because it cannot reach callers at another Celery broker."""
        return caller.kind != CELERY or caller.broker in (None, self.broker)

    async def start_conversation(
        self,
        spec: TaskSpec,
        conversation_id: str,
        key: str,
        *,
        caller: Caller | None = None,
        archive: bytes | None = None,
    ) -> bool:
        """Create a conversation, and return whether it is new. Idempotent.

        Args:
            caller: stored in the same step; None if the conversation has none.
            archive: a tar file to fill its workspace with, which must otherwise start empty.

        Raises:
            UsageError: the task names a resource that does not exist here.
        """
        if archive is not None:
            source = UploadedSource(name=ARCHIVE, format="tar", parcel=make_content_name(archive))
            spec = spec.model_copy(update={"workspace": spec.workspace_spec().model_copy(update={"source": source})})
        outcome = await start_conversation(
            self.log,
            self.client.secrets,
            spec,
            conversation_id,
            key=key,
            upload=archive,
            awaited=caller.awaited if caller is not None else "",
            caller=self.callers.to_fields(caller) if caller is not None else None,
            offers_limit_seconds=self.offers_limit_seconds,
            recent=self._offers,
            role="ingress",
        )
        return isinstance(outcome, Appended)

    async def meta(self, conversation_id: str) -> dict[str, str]:
        """Return the meta hash of a conversation; empty if there is no such conversation."""
        key = (await self.store.locate(conversation_id)).meta
        found = decode_fields(await self.store.call("HGETALL", key))
        return found if "last_id" in found else {}

    def has_expired(self, expires: datetime | None) -> bool:
        """Return whether a message has expired; None if it never does."""
        return expires is not None and expires <= self.store.clock.now()

    async def load(
        self, conversation_id: str, *further: Sequence[Argument]
    ) -> tuple[Caller | None, dict[str, str], list[Any]]:
        """Return the caller and the meta hash of a conversation, or None and an empty hash.

        Args:
            further: commands to send before, in the same round trip.

        Returns:
            Also the replies of these commands.
        """
        names = await self.store.locate(conversation_id)
        commands = [*further, ("HGETALL", names.caller), ("HGETALL", names.meta)]
        *replies, caller, flat = await self.store.call_many(commands)
        meta = decode_fields(flat)
        return self.callers.parse(conversation_id, caller), meta if "last_id" in meta else {}, replies

    async def find_answer(self, caller: Caller, meta: Mapping[str, str]) -> Answer | None:
        """Return the answer to a caller; None if there is none yet.

        If users can answer, a conversation whose agent asks a question has not ended; see `Until`.
        """
        if caller.outcome and (not meta or caller.started_ms is not None):
            return Answer(caller, caller.outcome, caller.started_ms or 0)
        condition = Until.RESULT if caller.is_headless else Until.OVER
        if not meta or not (caller.outcome or condition.may_be_met(meta.get("state", ""))):
            return None
        events = await self.client.log.read(caller.conversation_id)
        started_ms = find_start_ms(events)
        if caller.outcome:
            return Answer(caller, caller.outcome, started_ms)
        tally = Tally.of(events)
        if not condition.is_met(tally.status):
            return None
        summary = await self._with_full_texts(tally.summary(), events, MAX_CHARS[caller.kind])
        outcome: Mapping[str, Any] = answer_of(summary, str((caller.kept or {}).get("time_limit", "")))
        if caller.kind == CELERY and summary.error_code == EXPIRED_CODE:
            outcome = EXPIRED
        if caller.kind == CELERY and summary.state == AgentState.STOPPED:
            outcome = REVOKED if await self.revocations.is_revoked(caller.name) else outcome
        return Answer(caller, json.dumps(outcome), started_ms)

    async def _with_full_texts(self, summary: Summary, events: Sequence[Event], limit: int) -> Summary:
        """Return a summary with full texts, up to a limit of characters; the log has only their head and tail."""
        if not any(events[place].blobs for place in find_quoted_texts(events)):
            return summary
        whole = summarize(await load_quoted_texts(self.client, summary.conversation_id, events))
        message, outputs = whole.message, whole.outputs
        if len(message) > limit:
            how = f"`deckhands show {summary.conversation_id} --json` prints the whole"
            marker = f"\n[... {len(message) - limit:,} characters left out; {how} ...]\n"
            message = message[: limit // 2] + marker + message[-limit // 2 :]
        if len(json.dumps(outputs)) > limit:
            outputs = summary.outputs
        return replace(summary, message=message, outputs=outputs)


def find_start_ms(events: Iterable[Event]) -> int:
    """Return when an agent started, in Unix milliseconds; 0 if it never did."""
    for event in events:
        if isinstance(event, AgentStateChangedObservation) and event.agent_state is AgentState.RUNNING:
            return to_millis(event.timestamp) if event.timestamp is not None else 0
    return 0


def answer_of(summary: Summary, time_limit: str = "") -> dict[str, Any]:
    """Return the answer for a conversation that has ended, as plain JSON values; see `failure_of`."""
    failure = failure_of(summary, time_limit)
    found: dict[str, Any] = {"status": FAILURE if failure else SUCCESS, "summary": summary.as_json()}
    return found | {"failure": failure} if failure else found
