"""What is known of a conversation when somebody asks why it does not get on, as values; `reader` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from broker.conversations.conversations import ConversationRow, Takeover
from broker.limits.ledger import Account
from deckhands.reasons.history import History
from deckhands.reasons.link import Why


@dataclass(frozen=True, slots=True)
class WorkerFact:
    """A worker.

    Attributes:
        left_seconds: how long its heartbeat still holds; negative: since when it has lapsed.
        held: conversations or actions that it has; None: it has not said so.
        lag_seconds: by how much its loop was late; None: it has not said so.
    """

    worker_id: str
    left_seconds: float
    held: int | None = None
    lag_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PlaceInLine:
    """A place in a queue.

    Attributes:
        stream: its name, without that of the shard.
        before: how many go first; None: not known.
        taken_by: the worker that was handed it and has not begun; empty: nobody was.
    """

    stream: str
    before: int | None = None
    taken_by: str = ""


@dataclass(frozen=True, slots=True)
class ActionFact:
    """Where an action is.

    Attributes:
        worker: who carries it out; None: nobody has begun.
        began: when it was handed to that worker; None: not known.
        place: in the queue; None: it stands in none.
    """

    id: int
    worker: WorkerFact | None = None
    began: datetime | None = None
    place: PlaceInLine | None = None


@dataclass(frozen=True, slots=True)
class NodeFact:
    """The node of a workspace.

    Attributes:
        is_alive: a tool worker of it beats.
        given_up_at: when its workspaces move elsewhere; None: it was never seen.
        is_fixed: the workspace is a named directory of it, and cannot move.
    """

    node: str
    is_alive: bool
    seen: datetime | None = None
    given_up_at: datetime | None = None
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class QuotaFact:
    """The queue of a quota; `before` is None if the conversation does not stand in it: its turn may have come."""

    models: str
    waiting: int
    before: int | None


@dataclass(frozen=True, slots=True)
class BudgetFact:
    """An account; `before` of those who wait for it go first, None: the conversation is not among them."""

    account: Account
    before: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known.

    Attributes:
        now: the time in the store.
        row: of the index; None: the conversation is in no store.
        is_run: it belongs to a run of this machine, which is not in progress if it is in no store.
        history: of the log.
        owner: the controller worker that has it; None: nobody.
        place: where it waits for a controller worker; None: in no queue.
        parked_until: when somebody looks again by themselves; None: it is not parked.
        expires: by when it has to have begun.
        died: when it was found to have crashed three workers; None: it was not.
        deaths: the workers that died with it, the latest last.
        controllers: how many controller workers beat.
        actions: of `history.pending`, by id.
        pool: of the workspace.
        unserved: why no running tool worker takes its actions; empty: one does.
        delegates: why those that it waits for are where they are, by the action; None: too many, or too deep.
        worker_lines: what the logs of workers on this machine say about it, the latest last.
        shows_workers: the one who asks may know the names of workers and nodes.
    """

    conversation_id: str
    now: datetime
    row: ConversationRow | None
    history: History
    is_run: bool = False
    owner: WorkerFact | None = None
    place: PlaceInLine | None = None
    parked_until: datetime | None = None
    expires: datetime | None = None
    died: datetime | None = None
    deaths: tuple[Takeover, ...] = ()
    controllers: int = 0
    actions: Mapping[int, ActionFact] = field(default_factory=dict)
    pool: str = ""
    unserved: str = ""
    node: NodeFact | None = None
    quota: QuotaFact | None = None
    budget: BudgetFact | None = None
    delegates: Mapping[int, Why | None] = field(default_factory=dict)
    worker_lines: tuple[str, ...] = ()
    shows_workers: bool = True

    @property
    def wait_reason(self) -> str:
        """What the index says that it waits for."""
        return self.row.wait_reason if self.row is not None else ""
