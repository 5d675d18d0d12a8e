"""The prompt of a conversation, built from its log at its start or on first use, and then updated incrementally.

In a rollout, `TokenHistory` keeps the tokens recorded for the current segment, for the next call.

Holds: if `take_in` received every event since, a prompt costs only the new events and no read of the log. After a
condensation it costs one rebuild from the rest of the View. Only replies of the log count, so every worker continues
from the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from broker.contract import (
    TOKENS_BLOB,
    CondensationAction,
    Event,
    ModelReply,
    RecordedTokens,
    RolledBackObservation,
    TokenRecord,
    find_rolled_back,
)
from broker.log import EventLog, check_blobs
from controller_worker.memory import Condenser, ConversationMemory, Inquiry, PromptOptions, View, ViewFold
from controller_worker.providers import Message, PackedTokens, TokenPrefix


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


NEVER_PROMPTED_FIELDS = frozenset({"old_content", "new_content", TOKENS_BLOB})
"""Fields of observations that are in no prompt. The other fields of a shortened event are loaded for the prompt."""

MAX_FORGOTTEN_EVENTS = 500
"""A longer log takes too long to read again."""
MAX_STARTED_EVENTS = 16
"""A conversation with more events may only be restored to wait, and needs no prompt then."""

Prompt = tuple[Message, ...]


class PromptHistory:
    """The View of one conversation and the messages built from it."""

    def __init__(self, log: EventLog, conversation_id: str) -> None:
        self._log = log
        self._conversation_id = conversation_id
        self._fold: ViewFold | None = None
        self._memory: ConversationMemory | None = None
        self._options = PromptOptions()
        self._condensations = 0
        self._masked: set[int] = set()
        self._tokens = TokenHistory()

    async def start(self, events: Sequence[Event]) -> None:
        """Start with the whole log, which was just read. A long log is not kept, but read again when needed."""
        if len(events) <= MAX_STARTED_EVENTS and not any(event.blobs for event in events):
            self._fold = await self._fold_all(events)

    async def take_in(self, events: Iterable[Event]) -> None:
        """Apply the next events of the log.

        Raises:
            CorruptEntry: a blob is missing or damaged.
        """
        if self._fold is not None:
            for event in events:
                if isinstance(event, RolledBackObservation):  # the rest is read again
                    self._fold = self._memory = None
                    return
                self._add(self._fold, await self._load_whole(event))

    def forget(self) -> None:
        """Free the View and its messages, unless the log is long. The next prompt reads the log."""
        if self._fold is not None and self._fold.version <= MAX_FORGOTTEN_EVENTS:
            self._fold = self._memory = None

    async def build_prompt(
        self, version: int, condenser: Condenser, options: PromptOptions, *, overflows: int = 0
    ) -> Prompt | CondensationAction | Inquiry:
        """Return the messages built from the log up to `version`, the latest event given to `take_in`.

        Args:
            options: how the conversation is presented to the model; changed options rebuild all messages.
            overflows: how many prompts in a row exceeded the model's window.

        Returns:
            The prompt, or a request of the condenser that must be carried out first.

        Raises:
            CorruptEntry: an entry is damaged or missing.
        """
        fold = await self._fold_at(version)
        condensed = condenser.condense(fold.view(overflows=overflows))
        if not isinstance(condensed, View):
            return condensed
        if options != self._options or fold.condensations != self._condensations:
            self._options = options
            self._memory = None
        return tuple(self._build_messages(fold, condensed.events))

    async def load_tokens(self, version: int) -> TokenPrefix:
        """Return the tokens that the next prompt of a rollout continues. Raises the same errors as `prompt`."""
        await self._fold_at(version)
        return await self._tokens.load(self._log, self._conversation_id)

    async def build_view(self, version: int) -> View:
        """Return the View of the log up to `version`. Raises the same errors as `prompt`."""
        return (await self._fold_at(version)).view()

    async def list_after(self, event_id: int, version: int) -> Sequence[Event]:
        """Return the events after a given event, up to `version`. Raises the same errors as `prompt`."""
        return await self._log.read(self._conversation_id, after=event_id, until=version)

    async def _fold_at(self, version: int) -> ViewFold:
        if self._fold is None:
            self._fold = await self._fold_all(await self._log.read(self._conversation_id, until=version))
        assert self._fold.version == version, f"has events up to {self._fold.version}, not {version}"
        return self._fold

    async def _fold_all(self, events: Sequence[Event]) -> ViewFold:
        """Fold a whole log. Blobs of forgotten events are not loaded."""
        without = find_rolled_back(events)
        forgotten = {
            event_id
            for event in events
            if isinstance(event, CondensationAction) and event.id not in without
            for event_id in event.forgotten
        }
        fold = ViewFold()
        self._tokens = TokenHistory()
        for event in events:
            self._tokens.add(event)
            if event.id in without:
                fold.skip(event)
                continue
            fold.add(event if event.id in forgotten else await self._load_whole(event))
        return fold

    def _add(self, fold: ViewFold, event: Event) -> None:
        fold.add(event)
        self._tokens.add(event)
        if self._memory is not None:
            self._memory.add(event)

    def _build_messages(self, fold: ViewFold, shown: Sequence[Event]) -> list[Message]:
        """Return the messages of the condenser's part of the View."""
        kept = fold.view().events
        if len(shown) != len(kept):  # a window: small, and different at each step
            return self._remember(fold.list_events(shown)).messages()
        if self._memory is None:
            self._memory = self._remember(fold.list_events(kept))
            self._condensations = fold.condensations
            self._masked.clear()
        if shown is not kept:
            for mask, event in zip(shown, kept, strict=True):
                if mask is not event and event.id not in self._masked:
                    self._masked.add(event.id)
                    self._memory.mask(event.id, getattr(mask, "content", ""))
        return self._memory.messages()

    def _remember(self, events: Iterable[Event]) -> ConversationMemory:
        memory = ConversationMemory(self._options)
        for event in events:
            memory.add(event)
        return memory

    async def _load_whole(self, event: Event) -> Event:
        if not event.blobs or event.blobs.keys() <= NEVER_PROMPTED_FIELDS:
            return event
        return await self._log.blobs.restore_event(self._conversation_id, event)
