"""The exceptions of Deckhands.

    DeckhandsError code, retryable, remedy ├── UsageError bad input of a user or a producer: names the input and the
    remedy │ ├── UnknownConversation │ ├── UnknownKind an event kind that this version does not know │ └── EventUnfit an
    event too large or too deep for the log ├── StoreError │ ├── StoreUnavailable cannot connect, or the store refuses
    writes (disk full, loading) [retryable] │ │ └── FunctionsTooOld the store's functions are older than this version
    needs [retryable] │ ├── OutcomeUnknown the connection was lost between command and reply [retryable] │ ├──
    StoreRefused the server refused one command: usually a key of another type │ ├── StoreTooNew written by a newer
    version of Deckhands │ │ └── DataLocked encrypted, and this process lacks the key │ │ └── DataForgotten its key was
    deleted, so it stays unreadable │ ├── FunctionsReplaced the new functions do not serve this worker: it hands back
    its work and stops │ ├── StoreMisconfigured evicts keys, lacks the functions │ │ └── StoreReplaced another store
    than before, or the same one emptied │ ├── ShardsRaised it has got more shards meanwhile; nothing was written
    [retryable] │ ├── CorruptEntry bytes that fail their checksum or their schema │ └── EventsLost the log does not hold
    an event that had been acknowledged ├── AdmissionRefused no new start now: the tenant's bound or the memory bound is
    reached [retryable] ├── ConversationBusy its agent works, and it accepts no message meanwhile [retryable] ├──
    ConversationMoved it has newer events than the caller has seen; nothing was written └── OwnershipLost this process
    no longer owns the conversation

Holds: every expected failure derives from these and has a stable `code` and `retryable`. An error of a single module
(`SecretsLocked`, `ToolFailed`, `ModelError`, …) is defined there.
Does not: contain the outcomes of an append (`Fenced`, `Duplicate`, …); those are values, see `event_log`.
"""

from __future__ import annotations


class DeckhandsError(Exception):
    """An expected failure.

    Attributes:
        code: stable, machine-readable, lower_snake_case.
        retryable: whether the same call may succeed later without any change by the caller or an operator.
        remedy: what the reader can do, one sentence, or empty.
    """

    code: str = "error"
    retryable: bool = False

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class UsageError(DeckhandsError):
    """Invalid input. The message names the input and the remedy."""

    code = "usage"


class UnknownConversation(UsageError):
    """The store has no conversation with this id."""

    code = "unknown_conversation"

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"No conversation with the id {conversation_id!r} in this store.",
            remedy="`deckhands ls` lists all conversations.",
        )


class UnknownKind(UsageError):
    """An event kind that this version does not know."""

    code = "unknown_kind"


class EventUnfit(UsageError):
    """An event that the log cannot hold: too large even without its large texts, or nested too deeply."""

    code = "event_unfit"


class AdmissionRefused(DeckhandsError):
    """A conversation may not start now; nothing of it was written. Started conversations are not affected.

    Attributes:
        reason: `open`, `pace` or `memory`: too many unsettled conversations of the tenant, too many starts in the last
            minute, or too little free memory in the store.
        retry_after_seconds: when to try again.
    """

    code = "admission_refused"
    retryable = True

    def __init__(self, reason: str, tenant: str, used: int, limit: int, retry_after_seconds: float) -> None:
        whose = f"the tenant {tenant!r}" if tenant else "no tenant"
        if tenant == "*":
            whose = "all tenants without a rule"
        text = {
            "open": f"{used} conversations of {whose} are not settled; the limit is {limit}.",
            "pace": f"No more than {limit} conversations of {whose} may start per minute.",
            "memory": f"The store uses {used:,} bytes; conversations may start while it uses less than {limit:,}.",
        }
        super().__init__(
            text.get(reason, "No conversation may start now."),
            remedy=f"Try again in {retry_after_seconds:.3g} s, or ask the operator for more.",
        )
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class StoreError(DeckhandsError):
    """The store cannot serve the call."""

    code = "store"


class StoreUnavailable(StoreError):
    """Nothing was written: no connection, or the store refuses writes at the moment."""

    code = "store_unavailable"
    retryable = True


class FunctionsTooOld(StoreUnavailable):
    """The functions in the store are older than this version needs. A worker waits until newer ones are deployed."""

    code = "functions_too_old"


class OutcomeUnknown(StoreError):
    """The connection was lost after the command was sent: it may have been executed or not.

    Repeat the same idempotent call; its answer shows which.
    """

    code = "outcome_unknown"
    retryable = True


class StoreRefused(StoreError):
    """The server refused a command because of a key's content. The store as a whole works."""

    code = "store_refused"


class StoreTooNew(StoreError):
    """The store or an entry was written by a newer version."""

    code = "store_too_new"


class DataLocked(StoreTooNew):
    """Data in the store or the archive is encrypted, and this process lacks the key, or the key was deleted.

    A worker leaves such a conversation to a worker with the key.
    """

    code = "data_locked"


class DataForgotten(DataLocked):
    """The data in the store or the archive is encrypted with a deleted key: no process can read it again."""

    code = "data_forgotten"


class FunctionsReplaced(StoreError):
    """The functions in the store were or will soon be replaced by functions that do not serve this worker."""

    code = "functions_replaced"


class StoreMisconfigured(StoreError):
    """The store works but would lose or falsify data; refused at start."""

    code = "store_misconfigured"


class StoreReplaced(StoreMisconfigured):
    """The store is no longer the one that was opened, or it was emptied.

    A worker stops; do not restart it automatically.
    """

    code = "store_replaced"


class ShardsRaised(StoreError):
    """The store's number of shards was raised meanwhile; nothing of the refused call was written."""

    code = "shards_raised"
    retryable = True

    def __init__(self) -> None:
        super().__init__(
            "Shards were added to the store after this process read their number.", remedy="Repeat the call."
        )


class CorruptEntry(StoreError):
    """Bytes that fail their checksum, their bounds or their schema."""

    code = "corrupt_entry"


class EventsLost(StoreError):
    """The log does not hold an event that was acknowledged: the store was restored from an older state.

    Attributes:
        last_id: the last id of the log now.
        known_id: the id of the lost event; another event may have it by now.
        checksum: checksum of the lost event, see `codec.checksum_of`; empty if only its id is known.
    """

    code = "events_lost"

    def __init__(self, conversation_id: str, last_id: int, known_id: int, checksum: str = "") -> None:
        what = f"ends at event {last_id}" if last_id < known_id else f"holds another event {known_id}"
        super().__init__(
            f"The log of {conversation_id!r} {what}, but event {known_id} had been acknowledged.",
            remedy="The store was restored from an older state. Follow the conversation again from its beginning.",
        )
        self.conversation_id = conversation_id
        self.last_id = last_id
        self.known_id = known_id
        self.checksum = checksum


class ConversationBusy(DeckhandsError):
    """The agent works, and the conversation accepts no message meanwhile; nothing was written."""

    code = "busy"
    retryable = True

    def __init__(self, conversation_id: str) -> None:
        super().__init__(
            f"The agent of the conversation {conversation_id} is working and accepts no message now.",
            remedy="Send it again when the conversation has settled, or let it interrupt the agent.",
        )


class ConversationMoved(DeckhandsError):
    """The conversation has newer events than the caller has seen; nothing was written."""

    code = "precondition_failed"

    def __init__(self, conversation_id: str, last_id: int) -> None:
        super().__init__(
            f"The conversation {conversation_id} is at event {last_id}; it has new events since you read it.",
            remedy="Read the conversation again.",
        )


class OwnershipLost(DeckhandsError):
    """Another worker has taken over; nothing of the refused call was written."""

    code = "ownership_lost"
