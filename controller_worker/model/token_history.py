"""The tokens recorded for the current segment of a rollout, for the next call.

Holds: only replies of the log count, so every worker continues from the same tokens.
"""

from __future__ import annotations

from broker.contract import (
    TOKENS_BLOB,
    CondensationAction,
    Event,
    ModelReply,
    RecordedTokens,
    RolledBackObservation,
    TokenRecord,
)
from broker.log import EventLog, check_blobs
from controller_worker.providers import PackedTokens, TokenPrefix


class TokenHistory:
    """Collects the replies of the current segment; their tokens are loaded when a call needs them."""

    def __init__(self) -> None:
        self._addresses: list[str] = []
        self._latest: RecordedTokens | None = None
        self._hint = ""
        self._tokens = PackedTokens()
        self._loaded = 0

    def add(self, event: Event) -> None:
        """Take in the next event of the log."""
        if isinstance(event, ModelReply) and event.service == "agent":
            ref = (event.blobs or {}).get(TOKENS_BLOB)
            if event.tokens is None or ref is None:
                self._restart("not_recorded")
                return
            if event.tokens.start == 0:
                self._restart("")
            self._addresses.append(ref.sha256)
            self._latest, self._hint = event.tokens, ""
        elif isinstance(event, CondensationAction) and self._latest is not None:
            self._hint = "condensation"
        elif isinstance(event, RolledBackObservation):
            self._restart("rollback" if self._latest is not None else "")

    async def load(self, log: EventLog, conversation_id: str) -> TokenPrefix:
        """Return the tokens so far.

        Raises:
            CorruptEntry: a record is missing or damaged.
        """
        missing = self._addresses[self._loaded :]
        if missing:
            found = check_blobs(await log.blobs.fetch(conversation_id, missing), missing)
            for address in missing:
                record = TokenRecord.from_bytes(found[address])
                self._tokens.add(record.prompt + record.sampled)
            self._loaded = len(self._addresses)
        latest = self._latest
        if latest is None:
            return TokenPrefix(hint=self._hint)
        return TokenPrefix(self._tokens, latest.messages, latest.digest, latest.model, self._hint)

    def _restart(self, hint: str) -> None:
        self._addresses, self._tokens, self._loaded = [], PackedTokens(), 0
        self._latest, self._hint = None, hint
