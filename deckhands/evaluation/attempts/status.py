"""The progress of an evaluation: figures, the attempts in flight, and the limit that binds.

The progress is displayed as a table on a terminal, otherwise as a line from time to time.

It is printed on standard error, the final summary on standard output.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from broker.runtime import SYSTEM_CLOCK
from deckhands.client import clean_line, fit_width, is_redrawn, note, redraw_lines, render_table
from deckhands.evaluation.attempts.in_flight import AttemptInFlight
from deckhands.evaluation.attempts.model_health import FAILING, ModelHealth
from deckhands.evaluation.attempts.pace import HostPace, ModelPace
from deckhands.evaluation.attempts.plan import EvaluationPlan
from deckhands.evaluation.attempts.results import AttemptRow

WINDOW_SECONDS = 120.0
FEWEST_SECONDS = 1.0
MAX_SHOWN = 100
UNBOUND = "nothing:"
STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class AttemptDetails:
    """One attempt in flight; `cause` is the text of its last failure or failing call."""

    instance: str
    model: str
    attempt: int
    state: str
    waits_for: str
    worker: str
    seconds: float
    iterations: int
    cost_usd: float
    conversation_id: str
    cause: str = ""

    @property
    def render_line(self) -> str:
        """The attempt in one line, with its conversation."""
        reasons = dict.fromkeys(text for text in (self.waits_for, self.cause) if text)
        waits = f" ({'; '.join(reasons)})" if reasons else ""
        name = f"{self.instance}, {self.model}, attempt {self.attempt}"
        return f"{name}: {self.state}{waits}, {self.iterations} steps, {self.conversation_id or 'not started yet'}"


@dataclass(frozen=True, slots=True)
class EvaluationStatus:
    """The progress of an evaluation.

    Attributes:
        state: the desired state (`running`, `paused` or `cancelled`); `over` once all attempts have ended; `stopped` if
            the driver has ended earlier, for the reason in `stopped`.
        outcomes: the number of finished attempts by outcome.
        eta_seconds: at the rate of the last two minutes; None if unknown.
        refused: replies with status 429 since this driver started.
        limit: the current maximum in flight; `limits` has the maximum by model.
        found: by model, the number of attempts at the last overload; models without one are left out.
        bound: the limit that binds.
        stopped: the reason for an early end.
        warning: why the budget has no effect; empty if it has one, or if there is no budget.
        attempts: those in flight, the longest first, at most 100.
    """

    state: str
    total: int
    ended: int
    in_flight: int
    pending: int
    outcomes: Mapping[str, int]
    cost_usd: float
    tokens: int
    usd_per_minute: float
    tokens_per_minute: float
    eta_seconds: float | None
    refused: int
    limit: int
    limits: Mapping[str, int]
    found: Mapping[str, int]
    bound: str
    stopped: str = ""
    warning: str = ""
    attempts: Sequence[AttemptDetails] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @property
    def render_line(self) -> str:
        """The progress in one line."""
        outcomes = ", ".join(f"{count} {name}" for name, count in self.outcomes.items() if count)
        eta = "" if self.eta_seconds is None else f", {_format_minutes(self.eta_seconds)} left"
        return (
            f"{self.ended:,} of {self.total:,} attempts ended{f' ({outcomes})' if outcomes else ''}, {self.in_flight} "
            f"in flight{eta}; ${self.cost_usd:.4f}, ${self.usd_per_minute:.4f} and {self.tokens_per_minute:,.0f} "
            f"tokens a minute; {self.refused} 429s; {self.render_bound_line}"
            f"{f'; {self.warning}' if self.warning else ''}"
        )

    @property
    def render_bound_line(self) -> str:
        """The limit that binds now, and the limits found at overloads."""
        found = "".join(f"; {model} overloads at {limit}" for model, limit in self.found.items())
        if self.state != "running":
            return (self.stopped or self.state) + found
        if self.bound.startswith(UNBOUND):
            return f"limit {self.limit},{self.bound.removeprefix(UNBOUND)}{found}"
        return f"limit {self.limit}, bound by {self.bound}{found}"


def parse_status(fields: Mapping[str, object]) -> EvaluationStatus | None:
    """Return the progress from the fields that `as_json` wrote; None if they are not valid."""
    try:
        return _FIELDS.validate_python({name: value for name, value in fields.items() if name != "at"})
    except ValidationError:
        return None


_FIELDS = TypeAdapter(EvaluationStatus)


@dataclass(slots=True)
class SpendingMeter:
    """The amount and the rate of spending.

    Attributes:
        cost_usd: the total cost, including critics and failed tries; initially, the cost of attempts without a row in
            `rows`.
        tokens: the same, for tokens.
        refused: replies with status 429.
        unpriced: the models of attempts whose cost is unknown in part.
        has_news: an attempt has ended since this was set to False.
    """

    rows: Collection[AttemptRow] = ()
    refused: int = 0
    has_news: bool = True
    ended: int = 0
    cost_usd: float = 0.0
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    unpriced: set[str] = field(default_factory=set)
    _marks: deque[tuple[float, float, int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        for row in self.rows:
            self._count(row)
        self.ended = 0

    def add(self, row: AttemptRow, *, is_paid: bool = False) -> None:
        """Count a finished attempt. The cost of a paid attempt was counted before."""
        cost_usd, tokens = self.cost_usd, self.tokens
        self._count(row)
        if is_paid:
            self.cost_usd = cost_usd
            self.tokens = tokens
        self.has_news = True

    def forget(self, rows: Iterable[AttemptRow]) -> None:
        """Remove the outcomes of attempts that are repeated."""
        self.outcomes.subtract(row.outcome for row in rows)

    def rates(self, now: float, cost_usd: float, tokens: int) -> tuple[float, float, float]:
        """Return USD, tokens and finished attempts per second, over the last two minutes."""
        self._marks.append((now, cost_usd, tokens, self.ended))
        while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW_SECONDS:
            self._marks.popleft()
        then, cost, counted, ended = self._marks[0]
        seconds = now - then
        if seconds < FEWEST_SECONDS:
            return 0.0, 0.0, 0.0
        return (
            max(0.0, cost_usd - cost) / seconds,
            max(0, tokens - counted) / seconds,
            (self.ended - ended) / seconds,
        )

    def _count(self, row: AttemptRow) -> None:
        self.ended += 1
        self.outcomes[row.outcome] += 1
        self.cost_usd += row.spent_usd
        self.tokens += row.spent_tokens
        if row.has_unknown_cost:
            self.unpriced.add(row.model)


def compute_status(
    plan: EvaluationPlan,
    in_flight: Collection[AttemptInFlight],
    *,
    state: str,
    pending: int,
    hosts: HostPace,
    models: Mapping[str, ModelPace],
    health: Mapping[str, ModelHealth],
    stopped: str,
    meter: SpendingMeter,
    now: float,
) -> EvaluationStatus:
    """Return the progress of an evaluation."""
    cost = meter.cost_usd + math.fsum(one.spent_usd for one in in_flight)
    tokens = meter.tokens + sum(one.spent_tokens for one in in_flight)
    unpriced = meter.unpriced | {one.attempt.model for one in in_flight if one.seen.has_unknown_cost}
    usd, each, ended = meter.rates(now, cost, tokens)
    is_over = not in_flight and not pending
    running = Counter(one.attempt.model for one in in_flight)
    return EvaluationStatus(
        state="over" if is_over and state == "running" else state,
        total=plan.size,
        ended=plan.size - pending - len(in_flight),
        in_flight=len(in_flight),
        pending=pending,
        outcomes=dict(meter.outcomes),
        cost_usd=round(cost, 6),
        tokens=tokens,
        usd_per_minute=round(60 * usd, 6),
        tokens_per_minute=round(60 * each, 1),
        eta_seconds=round((pending + len(in_flight)) / ended, 1) if ended and not is_over else None,
        refused=meter.refused,
        limit=min(hosts.pace.limit, sum(model.pace.limit for model in models.values())),
        limits={name: model.pace.limit for name, model in models.items()},
        found={name: model.pace.found[-1] for name, model in models.items() if model.pace.found},
        bound=_find_bound(plan, len(in_flight), pending, running, hosts=hosts, models=models, health=health),
        stopped=stopped,
        warning=_warn_of_unknown_prices(plan, unpriced),
        attempts=[_list_attempts(one, now) for one in sorted(in_flight, key=lambda one: one.started)[:MAX_SHOWN]],
    )


def _warn_of_unknown_prices(plan: EvaluationPlan, unpriced: Collection[str]) -> str:
    if not unpriced or plan.budget_usd is None or math.isinf(plan.budget_usd):
        return ""
    names = ", ".join(name for name in plan.models if name in unpriced)
    return f"--budget does not bind, because the price of {names} is unknown: use --token-budget"


def _find_bound(
    plan: EvaluationPlan,
    in_flight: int,
    pending: int,
    running: Mapping[str, int],
    *,
    hosts: HostPace,
    models: Mapping[str, ModelPace],
    health: Mapping[str, ModelHealth],
) -> str:
    problems = [f"{name}: {one.problem}" for name, one in health.items() if one.problem]
    if problems and (pending or in_flight):
        return "; ".join(problems)
    if not pending:
        return f"{UNBOUND} all have started"
    if in_flight >= plan.at_once:
        return f"-n {plan.at_once}"
    if in_flight >= hosts.pace.limit:
        return hosts.bound or f"{UNBOUND} it grows"
    held = [
        f"{name}: {model.bound}"
        for name, model in models.items()
        if model.bound and running.get(name, 0) >= model.pace.limit
    ]
    held += [f"{name}: its first reply" for name, one in health.items() if not one.has_replied and running.get(name)]
    return "; ".join(held) or hosts.bound or f"{UNBOUND} it grows"


def _list_attempts(one: AttemptInFlight, now: float) -> AttemptDetails:
    seen = one.seen
    state = seen.state if one.phase == "works" and seen.state else one.phase
    return AttemptDetails(
        instance=one.attempt.instance.id,
        model=one.attempt.model,
        attempt=one.attempt.number,
        state=state,
        waits_for=seen.wait_reason if one.phase == "works" else "",
        worker=seen.worker,
        seconds=round(now - one.started, 1),
        iterations=seen.iterations,
        cost_usd=one.cost_usd,
        conversation_id=one.conversation_id,
        cause=(seen.wait_reason if one.phase == "works" and seen.wait_reason in FAILING else "") or one.cause,
    )


def _format_minutes(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3_600 else f"{whole // 3_600} h {whole % 3_600 // 60} min"


REDRAW_SECONDS = 0.5
LINE_SECONDS = 10.0
OTHER_LINES = 6
HEAD = ("INSTANCE", "MODEL", "TRY", "STATE", "WAITS FOR", "STEPS", "SECONDS", "USD", "WORKER")
SPARE = ("WORKER", "WAITS FOR", "MODEL", "USD")


class ProgressScreen:
    """Shows the progress repeatedly."""

    def __init__(self) -> None:
        self._is_table = is_redrawn(sys.stderr)
        self._lines = 0
        self._shown_at = float("-inf")
        self._bound = self._line = ""
        self._last: EvaluationStatus | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave the final state on the screen, even if the command fails."""
        if self._last is not None:
            self._show(self._last)

    def show(self, status: EvaluationStatus) -> None:
        """Show the progress, if it is due."""
        now = SYSTEM_CLOCK.monotonic()
        is_new = not self._is_table and status.render_bound_line != self._bound and self._last is not None
        if now - self._shown_at < (REDRAW_SECONDS if self._is_table else LINE_SECONDS) and not is_new:
            self._last = status
            return
        self._shown_at = now
        self._show(status)
        self._last = None if status.state == "over" else status

    def _show(self, status: EvaluationStatus) -> None:
        self._bound = status.render_bound_line
        if not self._is_table:
            if status.render_line != self._line:
                note(status.render_line)
            self._line = status.render_line
            return
        size = shutil.get_terminal_size()
        lines = render_progress(status, columns=size.columns, rows=size.lines)
        redraw_lines(lines, self._lines)
        self._lines = len(lines)


def render_progress(status: EvaluationStatus, *, columns: int, rows: int) -> list[str]:
    """Return the progress as lines that fit on a screen; attempts that do not fit are counted."""
    room = max(1, rows - OTHER_LINES)
    shown = status.attempts[:room]
    cells = [
        [
            one.instance,
            one.model,
            str(one.attempt),
            one.state,
            one.waits_for,
            str(one.iterations),
            f"{one.seconds:.0f}",
            f"{one.cost_usd:.4f}",
            one.worker,
        ]
        for one in shown
    ]
    lines = render_table(HEAD, cells, columns=columns, spare=SPARE) if cells else []
    if status.in_flight > len(shown):
        lines.append(f"… and {status.in_flight - len(shown):,} more in flight")
    progress, _, spending = status.render_line.partition("; ")
    return [*lines, *(fit_width(clean_line(line, limit=1_000), columns) for line in (progress, spending))]
