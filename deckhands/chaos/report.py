"""The report of a run of chaos, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from broker.runtime import format_count

MAX_LISTED = 200


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that took effect.

    Attributes:
        kind: see `FAULTS`.
        at: the store's time, ISO 8601.
        after_seconds: the time since the start of the run.
        target: the worker, the conversation of a workspace host, or the store.
        lasted_seconds: 0 for a kill.
        planned_after_seconds: the time in the schedule.
    """

    kind: str
    at: str
    after_seconds: float
    target: str
    pid: int = 0
    lasted_seconds: float = 0.0
    planned_after_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Statistics of times in seconds; None if there are no times."""

    count: int
    p50: float | None
    p99: float | None
    longest: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latencies:
        """Compute them by the nearest rank."""
        if not seconds:
            return cls(0, None, None, None)
        found = sorted(seconds)
        rank = [found[max(0, -(-len(found) * percent // 100) - 1)] for percent in (50, 99)]
        return cls(len(found), round(rank[0], 3), round(rank[1], 3), round(found[-1], 3))

    def __str__(self) -> str:
        if not self.count:
            return "none"
        return f"{self.count}; p50 {self.p50:.2f} s, p99 {self.p99:.2f} s, max {self.longest:.2f} s"


@dataclass(frozen=True, slots=True)
class EffectCounts:
    """Counts of the commands by effect, read from the files of their workspaces.

    Attributes:
        commands: how many the agents decided on and got an answer for.
        done: ran once, to their end, as in the log.
        unknown: the log records an unknown outcome or a failure; they ran at most once.
        lost: did not run, or not to their end, although the log says so.
        doubled: ran more than once.
        unread: in workspaces that could not be read.
    """

    commands: int = 0
    done: int = 0
    unknown: int = 0
    lost: int = 0
    doubled: int = 0
    unread: int = 0

    def __add__(self, other: EffectCounts) -> EffectCounts:
        return EffectCounts(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """The result of a run.

    Attributes:
        schedule: the planned faults, each with its seconds after the start.
        not_tried: the reason, by fault.
        unreachable: the reason, by worker that got no signal.
        conversations: the number started; `finished` of them ended correctly.
        redriven: how many conversations became a dead letter after three workers died, as promised, and were continued.
        unsettled: conversations that did not settle after the faults.
        logs: how many logs were verified.
        findings: faults of the cluster: violations of the specification of a log, and effects lost or doubled.
    """

    seed: int
    seconds: float
    schedule: tuple[tuple[float, str], ...] = ()
    faults: tuple[Fault, ...] = ()
    not_tried: dict[str, str] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)
    takeovers: Latencies = Latencies(0, None, None, None)
    conversations: int = 0
    finished: int = 0
    redriven: int = 0
    unsettled: tuple[str, ...] = ()
    logs: int = 0
    events: int = 0
    effects: EffectCounts = EffectCounts()
    findings: tuple[str, ...] = ()
    was_interrupted: bool = False

    @property
    def holds(self) -> bool:
        """Whether every log is correct, every conversation has settled, and no effect was lost or doubled.

        False for a run that proves nothing, see `gaps`.
        """
        return not (self.findings or self.unsettled or self.effects.lost or self.effects.doubled or self.gaps)

    @property
    def gaps(self) -> tuple[str, ...]:
        """The limits of this run's proof, a sentence each."""
        gaps = {
            "No conversation has finished.": not self.finished,
            "No command was seen to run once, to its end.": not self.effects.done,
            f"{format_count(self.effects.unread, 'effect')} could not be read.": self.effects.unread > 0,
        }
        return tuple(text for text, is_there in gaps.items() if is_there)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"holds": self.holds}

    def write(self, directory: Path) -> None:
        """Write `report.json` and `report.md` into a directory, which is created."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "report.json").write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        (directory / "report.md").write_text(self.render_markdown(), encoding="utf-8")

    def list_facts(self) -> dict[str, str]:
        """Return the main figures by name, for a table."""
        counts = Counter(fault.kind for fault in self.faults)
        effects = self.effects
        return {
            "faults": ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "none",
            "takeovers": str(self.takeovers),
            "conversations": f"{self.conversations} started, {self.finished} finished, {self.redriven} redriven, "
            f"{len(self.unsettled)} not at rest",
            "effects": f"{effects.commands} commands, {effects.done} done once, {effects.unknown} unknown or failed, "
            f"{effects.lost} lost, {effects.doubled} doubled, {effects.unread} not read",
            "logs": f"{self.logs} verified, {self.events:,} events, {len(self.findings)} findings",
            "seed": str(self.seed),
            "time": f"{self.seconds:.1f} s",
        }

    def render_markdown(self) -> str:
        """Return the report as a page."""
        verdict = "Everything holds." if self.holds else "**Something does not hold.**"
        if self.was_interrupted:
            verdict += " The run was interrupted."
        lines = ["# Chaos", "", verdict, "", "| | |", "|---|---|"]
        lines += [f"| {name} | {text} |" for name, text in self.list_facts().items()]
        lines += _render_list("Findings", self.findings)
        lines += _render_list("Not shown", self.gaps)
        lines += _render_list("Not at rest", self.unsettled)
        lines += _render_list("Not tried", [f"{kind}: {why}" for kind, why in self.not_tried.items()])
        lines += _render_list("Out of reach", [f"{worker}: {why}" for worker, why in self.unreachable.items()])
        lines += ["", "## Faults", "", "| after | fault | of | pid | lasted | time |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {fault.after_seconds:.1f} s | {fault.kind} | {fault.target} | {fault.pid or ''} | "
            f"{fault.lasted_seconds:.1f} s | {fault.at} |"
            for fault in self.faults
        ]
        return "\n".join(lines) + "\n"


def _render_list(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = [f"- and {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return ["", f"## {title}", "", *(f"- {item}" for item in items[:MAX_LISTED]), *more]
