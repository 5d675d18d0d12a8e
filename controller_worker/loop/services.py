"""The services that all conversations of a worker share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from broker.coordination import Figures, Notebooks, Owners, SuspectTurns
from broker.limits import QuotaTable
from broker.log import EventLog
from broker.runtime import Tracing, open_tracing
from broker.store import Store
from controller_worker.loop.hooks import Hooks
from controller_worker.loop.sdk.sessions import SdkSessions
from controller_worker.loop.step_turns import StepTurns
from controller_worker.model import BatchKeeper, Models, Permits


@dataclass(frozen=True, slots=True)
class Services:
    """The services that all conversations of a worker share.

    Attributes:
        quotas: quotas of models, for the whole cluster; empty for none.
        hooks: the operator's code around calls and events.
        turns: turns of the conversations that are suspected of killing workers.
        steps: the order of steps.
        notebooks: the store's notebooks.
        permits: permits for model calls, from the quotas and the store's budgets.
        keeper: polls batched calls.
        figures: this worker's counters.
        tracing: this worker's spans.
        sdk_sessions: this worker's programs of the Claude Agent SDK.
    """

    store: Store
    log: EventLog
    owners: Owners
    models: Models
    quotas: QuotaTable = QuotaTable()
    hooks: Hooks = field(default_factory=Hooks)
    turns: SuspectTurns = field(default_factory=SuspectTurns)
    steps: StepTurns = field(default_factory=StepTurns)
    figures: Figures = field(default_factory=Figures)
    tracing: Tracing = field(default_factory=partial(open_tracing, "controller"))
    sdk_sessions: SdkSessions = field(default_factory=SdkSessions)
    notebooks: Notebooks = field(init=False)
    permits: Permits = field(init=False)
    keeper: BatchKeeper = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "notebooks", Notebooks(self.store))
        object.__setattr__(
            self, "permits", Permits(self.store, self.quotas, may_batch=self.models.may_batch, figures=self.figures)
        )
        object.__setattr__(self, "keeper", BatchKeeper(self.store, self.permits.batches, self.models))
