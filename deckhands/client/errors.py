"""The client's own errors; `broker.runtime.errors` has the tree that they belong to."""

from __future__ import annotations

from broker.runtime import DeckhandsError, StoreUnavailable, UnknownConversation


class NoCluster(StoreUnavailable):
    """No cluster is named, and none is running from the home directory."""

    code = "no_cluster"
    retryable = False

    def __init__(self) -> None:
        super().__init__("No cluster is running here.", remedy="Start one with `deckhands up`, or set DECKHANDS_URL.")


class NotSettled(DeckhandsError, TimeoutError):
    """A conversation has not settled within the caller's time limit."""

    code = "not_settled"
    retryable = True

    def __init__(self, conversation_id: str, timeout_seconds: float | None) -> None:
        super().__init__(
            f"The conversation {conversation_id} has not settled within {timeout_seconds or 0:g} s.",
            remedy="Wait for it again, or cancel it.",
        )


class NotStopped(StoreUnavailable):
    """A conversation that was cancelled has not stopped yet."""

    code = "not_stopped"

    def __init__(self, conversation_id: str, wait_seconds: float) -> None:
        super().__init__(
            f"The conversation {conversation_id} has not stopped within {wait_seconds:g} s.",
            remedy="It stops as soon as a controller worker claims it. Check that one is running.",
        )


class IsArchived(UnknownConversation):
    """The conversation is in the archive and not in the store: it can be read, but not continued."""

    code = "archived"

    def __init__(self, conversation_id: str) -> None:
        super().__init__(conversation_id)
        self.message = f"The conversation {conversation_id} is archived."
        self.remedy = f"`deckhands restore {conversation_id}` brings it back."


class IsBeingDeleted(DeckhandsError):
    """The conversation is half deleted; repeat the deletion to complete it."""

    code = "being_deleted"
    retryable = True

    def __init__(self, conversation_id: str) -> None:
        super().__init__(f"The conversation {conversation_id} is being deleted.", remedy="Try again in a minute.")
