"""The facts about a conversation that explain why it makes no progress, as values; `reader` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from broker.limits import BudgetAccount
from broker.log import ConversationRow, Takeover
from deckhands.client.reasons.history import History
from deckhands.client.reasons.link import Why


@dataclass(frozen=True, slots=True)
class WorkerFact:
    """A worker.

    Attributes:
        left_seconds: time until its heartbeat expires; negative: time since it has expired.
        held: the number of conversations or actions it has; None: not reported.
        lag_seconds: how late its event loop was; None: not reported.
    """

    worker_id: str
    left_seconds: float
    held: int | None = None
    lag_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A place in a queue.

    Attributes:
        stream: the name of the stream, without that of the shard.
        before: the number of entries ahead; None: not known.
        taken_by: the worker that received it and has not started it; empty: none.
    """

    stream: str
    before: int | None = None
    taken_by: str = ""


@dataclass(frozen=True, slots=True)
class ActionFact:
    """The progress of an action.

    Attributes:
        worker: the worker that runs it; None: none has started it.
        began: when that worker received it; None: not known.
        place: its place in the queue; None: it is in no queue.
    """

    id: int
    worker: WorkerFact | None = None
    started: datetime | None = None
    place: QueuePosition | None = None


@dataclass(frozen=True, slots=True)
class NodeFact:
    """The node of a workspace.

    Attributes:
        is_alive: it has a tool worker with a valid heartbeat.
        given_up_at: when its workspaces move elsewhere; None: it was never seen.
        is_fixed: the workspace is a named directory on it, and cannot move.
    """

    node: str
    is_alive: bool
    seen: datetime | None = None
    given_up_at: datetime | None = None
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class QuotaFact:
    """The queue of a quota; `before` is None if the conversation is not in it: its turn may have come."""

    models: str
    waiting: int
    before: int | None


@dataclass(frozen=True, slots=True)
class BudgetFact:
    """A budget account; `before` is the number of conversations ahead, or None if it does not wait here."""

    account: BudgetAccount
    before: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFacts:
    """All facts about a conversation.

    Attributes:
        now: the store's time.
        row: its row in the index; None: the conversation is in no store.
        is_run: it belongs to a run of this machine, which is not in progress if it is in no store.
        history: the relevant part of its log.
        owner: the controller worker that owns it; None: none.
        place: its place in the queue for a controller worker; None: in no queue.
        parked_until: when a worker checks it again; None: it is not parked.
        expires: the latest time at which it may start.
        died: when it was found to have crashed three workers; None: it was not.
        deaths: the workers that died with it, the latest last.
        controllers: the number of running controller workers.
        actions: the actions in `history.pending`, by id.
        pool: the pool of its workspace.
        unserved: the reason why no running tool worker takes its actions; empty: one does.
        delegates: the explanations of the delegates that it waits for, by action; None: too many, or too deep.
        worker_lines: lines about it in the logs of workers on this machine, the latest last.
        shows_workers: the reader may know the names of workers and nodes.
    """

    conversation_id: str
    now: datetime
    row: ConversationRow | None
    history: History
    is_run: bool = False
    owner: WorkerFact | None = None
    place: QueuePosition | None = None
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
        """Its wait reason in the index."""
        return self.row.wait_reason if self.row is not None else ""
