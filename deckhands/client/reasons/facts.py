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
        left_seconds: time until its heartbeat expires; negative after that.
        held: the number of its conversations or actions; None if not reported.
        lag_seconds: the delay of its event loop; None if not reported.
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
        before: the number of entries ahead; None if unknown.
        taken_by: the worker that received the entry but has not started it; empty if there is none.
    """

    stream: str
    before: int | None = None
    taken_by: str = ""


@dataclass(frozen=True, slots=True)
class ActionFact:
    """The progress of an action.

    Attributes:
        worker: the worker that runs it; None if no worker has started it.
        began: the time when that worker received it; None if unknown.
        place: its place in the queue; None if it is in no queue.
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
        given_up_at: the time when its workspaces move to other nodes; None if the node was never seen.
        is_fixed: the workspace is a named directory on this node, and cannot move.
    """

    node: str
    is_alive: bool
    seen: datetime | None = None
    given_up_at: datetime | None = None
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class QuotaFact:
    """The queue of a quota; `before` is None if the conversation is not in it, perhaps because its turn has come."""

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
        row: its row in the index; None if the conversation is in no store.
        is_run: it belongs to a run of this machine. If it is in no store, that run is not in progress.
        history: the relevant part of its log.
        owner: the controller worker that owns it; None if there is none.
        place: its place in the queue for a controller worker; None if it is in no queue.
        parked_until: the time when a worker checks it again; None if it is not parked.
        expires: the latest time at which it may start.
        died: the time when it was found to have crashed three workers; None if it has not.
        deaths: the workers that died with it, the latest last.
        controllers: the number of running controller workers.
        actions: the actions in `history.pending`, by id.
        pool: the pool of its workspace.
        unserved: the reason why no running tool worker takes its actions; empty if one does.
        delegates: the explanations of the delegates that it waits for, by action; None if they are too many or nested
            too deeply.
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
