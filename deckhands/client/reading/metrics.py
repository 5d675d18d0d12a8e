"""Metrics: the cost of a conversation's model calls, by OpenHands' rules (4.5, 4.7).

A reply's cost, tokens and latency are stored once in the log, in its `ModelReply`. Metrics are folded from these
replies: for a whole log (`compute_metrics`), up to any event, or between two events (`diff`).

`Spending` is the cost by purpose.

Holds: metrics are values; `a.merge(b).diff(a)` has the costs, latencies and usages of `b`; counts are never negative.
The parts of `Spending` add up to the cost of the replies.
Differs: nothing is attached to events, because the log has it already; `context_window` is 0, because a reply does not
record its model's window.
Does not: include failed calls; the ledger keeps their reservations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Self

from broker.contract import (
    Action,
    AgentDelegateAction,
    ConversationCreated,
    DelegateEnded,
    Event,
    ModelCallFailed,
    ModelReply,
)

_CACHE_FIELDS = ("cache_read_tokens", "cache_write_tokens")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one call in USD; `timestamp` is seconds since the epoch."""

    model: str
    cost: float
    timestamp: float


@dataclass(frozen=True, slots=True)
class ResponseLatency:
    """The duration of one call, in seconds."""

    model: str
    latency: float
    response_id: str


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one call, or of several added up."""

    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    context_window: int = 0
    per_turn_token: int = 0
    response_id: str = ""

    def __add__(self, other: TokenUsage) -> TokenUsage:
        """Add the counts.

        Keeps the larger window, the right operand's turn, and the left operand's model and response.
        """
        return replace(
            self,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cache_read_tokens=self.cache_read_tokens + other.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            context_window=max(self.context_window, other.context_window),
            per_turn_token=other.per_turn_token,
        )

    def __sub__(self, baseline: TokenUsage) -> TokenUsage:
        """Subtract the counts of an earlier moment; the turn is dropped."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens - baseline.prompt_tokens,
            completion_tokens=self.completion_tokens - baseline.completion_tokens,
            cache_read_tokens=self.cache_read_tokens - baseline.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens - baseline.cache_write_tokens,
            per_turn_token=0,
        )


@dataclass(frozen=True, slots=True)
class DelegateCost:
    """The usage of one delegate, including its own delegates.

    Attributes:
        per_model: calls, cost and tokens by model; empty if an older version wrote the report.
        has_unknown_cost: the price of some of its calls is not known.
    """

    delegate_id: int
    conversation_id: str
    agent: str
    state: str
    iterations: int
    cost: float
    prompt_tokens: int
    completion_tokens: int
    per_model: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_unknown_cost: bool = False


@dataclass(frozen=True, slots=True)
class Metrics:
    """The cost of calls, one by one and in total.

    Attributes:
        max_budget_per_task: the budget; None for no limit.
        costs, response_latencies, token_usages: one for each call, in order. A call of unknown price has no cost.
        delegates: the ended delegates. The sums above include their usage; the lists do not.
    """

    accumulated_cost: float = 0.0
    max_budget_per_task: float | None = None
    accumulated_token_usage: TokenUsage = TokenUsage()
    costs: tuple[Cost, ...] = ()
    response_latencies: tuple[ResponseLatency, ...] = ()
    token_usages: tuple[TokenUsage, ...] = ()
    delegates: tuple[DelegateCost, ...] = ()

    @property
    def model_name(self) -> str:
        """The model of calls that name none."""
        return self.accumulated_token_usage.model

    def with_cost(self, cost: float, *, model: str, at: datetime | None) -> Metrics:
        """Add the cost of a call.

        Raises:
            ValueError: the cost is negative.
        """
        if cost < 0:
            raise ValueError("Added cost cannot be negative.")
        timestamp = at.timestamp() if at else 0.0
        added = Cost(model or self.model_name, cost, timestamp)
        return replace(self, accumulated_cost=self.accumulated_cost + cost, costs=(*self.costs, added))

    def with_latency(self, latency: float, *, model: str, response_id: str) -> Metrics:
        """Add the duration of a call; a negative one counts as 0."""
        added = ResponseLatency(model or self.model_name, max(0.0, latency), response_id)
        return replace(self, response_latencies=(*self.response_latencies, added))

    def with_usage(self, usage: TokenUsage) -> Metrics:
        """Add the tokens of a call."""
        total = self.accumulated_token_usage + usage
        return replace(self, accumulated_token_usage=total, token_usages=(*self.token_usages, usage))

    def merge(self, other: Metrics) -> Metrics:
        """Add all calls of other metrics; their budget is used only if this has none."""
        return replace(
            self,
            accumulated_cost=self.accumulated_cost + other.accumulated_cost,
            max_budget_per_task=other.max_budget_per_task
            if self.max_budget_per_task is None
            else self.max_budget_per_task,
            accumulated_token_usage=self.accumulated_token_usage + other.accumulated_token_usage,
            costs=self.costs + other.costs,
            response_latencies=self.response_latencies + other.response_latencies,
            token_usages=self.token_usages + other.token_usages,
            delegates=self.delegates + other.delegates,
        )

    def diff(self, baseline: Metrics) -> Metrics:
        """Return the calls since an earlier moment of the same metrics.

        Differs: costs are matched by number, like the rest, because two calls may end in the same moment.
        """
        return replace(
            self,
            accumulated_cost=self.accumulated_cost - baseline.accumulated_cost,
            accumulated_token_usage=self.accumulated_token_usage - baseline.accumulated_token_usage,
            costs=self.costs[len(baseline.costs) :],
            response_latencies=self.response_latencies[len(baseline.response_latencies) :],
            token_usages=self.token_usages[len(baseline.token_usages) :],
            delegates=self.delegates[len(baseline.delegates) :],
        )

    def get(self) -> dict[str, Any]:
        """Return OpenHands' six keys, as plain JSON values."""
        fields = asdict(replace(self, delegates=()))
        del fields["delegates"]
        return fields | {name: list(fields[name]) for name in ("costs", "response_latencies", "token_usages")}

    def totals(self) -> dict[str, Any]:
        """Return the sums, the number of calls, and the average and longest latency in seconds."""
        latencies = [found.latency for found in self.response_latencies]
        usage = self.accumulated_token_usage
        return {
            "calls": len(self.token_usages),
            "accumulated_cost": self.accumulated_cost,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cache_read_tokens": usage.cache_read_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
            "mean_latency": sum(latencies) / len(latencies) if latencies else 0.0,
            "longest_latency": max(latencies, default=0.0),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return metrics from the fields that `get` returned.

        Raises:
            KeyError, TypeError: the fields are not those of metrics.
        """
        return cls(
            accumulated_cost=fields["accumulated_cost"],
            max_budget_per_task=fields["max_budget_per_task"],
            accumulated_token_usage=TokenUsage(**fields["accumulated_token_usage"]),
            costs=tuple(Cost(**cost) for cost in fields["costs"]),
            response_latencies=tuple(ResponseLatency(**latency) for latency in fields["response_latencies"]),
            token_usages=tuple(TokenUsage(**usage) for usage in fields["token_usages"]),
            delegates=tuple(DelegateCost(**delegate) for delegate in fields.get("per_delegate", ())),
        )

    def per_model(self) -> dict[str, dict[str, Any]]:
        """Return the totals of each model, including the calls of delegates; latencies exclude those of delegates."""
        found = {name: metrics.totals() for name, metrics in self.by_model().items()}
        for delegate in self.delegates:
            for name, used in delegate.per_model.items():
                totals = found.setdefault(name, Metrics().totals())
                for key, count in used.items():
                    totals[key] += count
        return found

    def has_unknown_price(self, model: str) -> bool:
        """Return whether calls of a model, or of a delegate, count as 0 because their price is unknown."""
        own = self._of(model)
        is_unknown = len(own.costs) < len(own.token_usages)
        return is_unknown or any(found.has_unknown_cost and model in found.per_model for found in self.delegates)

    def by_model(self) -> dict[str, Metrics]:
        """Return the metrics of each model, in the order in which they were first called."""
        names = dict.fromkeys([*(usage.model for usage in self.token_usages), *(cost.model for cost in self.costs)])
        return {name: self._of(name) for name in names}

    def _of(self, model: str) -> Metrics:
        costs = tuple(cost for cost in self.costs if cost.model == model)
        usages = tuple(usage for usage in self.token_usages if usage.model == model)
        return Metrics(
            accumulated_cost=sum(cost.cost for cost in costs),
            max_budget_per_task=self.max_budget_per_task,
            accumulated_token_usage=sum(usages, TokenUsage(model=model)),
            costs=costs,
            response_latencies=tuple(found for found in self.response_latencies if found.model == model),
            token_usages=usages,
        )


def with_reply(metrics: Metrics, reply: ModelReply) -> Metrics:
    """Return the metrics after one more reply."""
    usage = reply.usage
    if reply.cost_usd is not None:
        metrics = metrics.with_cost(reply.cost_usd, model=reply.model, at=reply.timestamp)
    metrics = metrics.with_latency(reply.latency_seconds, model=reply.model, response_id=reply.response_id)
    return metrics.with_usage(
        TokenUsage(
            model=reply.model or metrics.model_name,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cache_read_tokens=usage.cache_read_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            per_turn_token=usage.prompt_tokens + usage.completion_tokens,
            response_id=reply.response_id,
        )
    )


def with_delegate(metrics: Metrics, ended: DelegateEnded, agent: str) -> Metrics:
    """Return the metrics after a delegate's report; only its first report counts.

    Args:
        agent: the delegate's name in its parent.
    """
    if any(delegate.delegate_id == ended.delegate_id for delegate in metrics.delegates):
        return metrics
    per_model = {
        used.model: {"calls": used.calls, "accumulated_cost": used.cost_usd, **used.usage.model_dump()}
        for used in ended.models
    }
    cached = [sum(used.get(name, 0) for used in per_model.values()) for name in _CACHE_FIELDS]
    usage = TokenUsage(
        prompt_tokens=ended.prompt_tokens,
        completion_tokens=ended.completion_tokens,
        cache_read_tokens=cached[0],
        cache_write_tokens=cached[1],
        per_turn_token=metrics.accumulated_token_usage.per_turn_token,  # the latest turn stays the conversation's own
    )
    cost = DelegateCost(
        delegate_id=ended.delegate_id,
        conversation_id=ended.conversation_id,
        agent=agent,
        state=ended.agent_state.value,
        iterations=ended.iterations,
        cost=ended.cost_usd,
        prompt_tokens=ended.prompt_tokens,
        completion_tokens=ended.completion_tokens,
        per_model=per_model,
        has_unknown_cost=ended.has_unknown_cost,
    )
    return metrics.merge(Metrics(ended.cost_usd, None, usage, delegates=(cost,)))


class MetricsFold:
    """The metrics of a growing log. Adding a reply takes constant time."""

    def __init__(self) -> None:
        self._sums = Metrics()  # everything except the lists of calls
        self._costs: list[Cost] = []
        self._latencies: list[ResponseLatency] = []
        self._usages: list[TokenUsage] = []
        self._agents: dict[int, str] = {}

    def add(self, event: Event) -> None:
        """Add the next event."""
        if isinstance(event, ConversationCreated):
            self._sums = Metrics(0.0, event.limits.max_budget_usd, TokenUsage(model=event.agent.llm.model or ""))
        elif isinstance(event, ModelReply):
            after = with_reply(self._sums, event)
            self._costs += after.costs
            self._latencies += after.response_latencies
            self._usages += after.token_usages
            self._sums = replace(after, costs=(), response_latencies=(), token_usages=())
        elif isinstance(event, AgentDelegateAction):
            self._agents[event.id] = event.agent
        elif isinstance(event, DelegateEnded):
            self._sums = with_delegate(self._sums, event, self._agents.get(event.delegate_id, ""))

    @property
    def sums(self) -> Metrics:
        """The metrics so far, without the lists of calls."""
        return self._sums

    def metrics(self) -> Metrics:
        """Return the metrics so far."""
        return replace(
            self._sums,
            costs=tuple(self._costs),
            response_latencies=tuple(self._latencies),
            token_usages=tuple(self._usages),
        )


def compute_metrics(events: Iterable[Event]) -> Metrics:
    """Return the metrics of a log, or of its first events."""
    fold = MetricsFold()
    for event in events:
        fold.add(event)
    return fold.metrics()


@dataclass(frozen=True, slots=True)
class Spending:
    """Cost by purpose, in USD.

    Attributes:
        work_usd: replies that made progress, and critics' verdicts.
        retries_usd: replies without an understandable tool call, after which the model was called again.
        loops_usd: replies with exactly the texts and calls of the reply before.
        condensation_usd: summaries of long histories.
        calls: all replies.
        failed_calls: calls without a reply.
        unpriced_calls: replies of unknown price; they count as 0.
    """

    work_usd: float = 0.0
    retries_usd: float = 0.0
    loops_usd: float = 0.0
    condensation_usd: float = 0.0
    calls: int = 0
    failed_calls: int = 0
    unpriced_calls: int = 0

    @property
    def spent_usd(self) -> float:
        """The sum of all parts."""
        return self.work_usd + self.retries_usd + self.loops_usd + self.condensation_usd

    def __add__(self, other: Spending) -> Spending:
        return Spending(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Spending)))


def compute_spending(events: Iterable[Event]) -> Spending:
    """Return the breakdown of a conversation's cost."""
    log = list(events)
    understood = {
        event.tool_call_metadata.reply_id for event in log if isinstance(event, Action) and event.tool_call_metadata
    }
    total, before = Spending(), None
    # another conversation has paid for it
    inherited = log[0].forked_at if log and isinstance(log[0], ConversationCreated) else 0
    for event in log[inherited:]:
        if isinstance(event, ModelCallFailed):
            total += Spending(failed_calls=1)
        if not isinstance(event, ModelReply):
            continue
        cost = event.cost_usd or 0.0
        counted = Spending(calls=1, unpriced_calls=int(event.cost_usd is None))
        if event.service == "condenser":
            total += counted + Spending(condensation_usd=cost)
            continue
        if event.service == "critic":
            total += counted + Spending(work_usd=cost)
            continue
        said = (event.content, tuple((call.name, call.arguments) for call in event.tool_calls))
        if event.tool_calls and event.id not in understood:
            total += counted + Spending(retries_usd=cost)
        elif said == before:
            total += counted + Spending(loops_usd=cost)
        else:
            total += counted + Spending(work_usd=cost)
        before = said
    return total
