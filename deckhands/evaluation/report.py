"""The report of an evaluation as one self-contained HTML page; every figure is from `statistics`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from deckhands.evaluation.attempts.results import OUTCOMES, AttemptRow
from deckhands.evaluation.attempts.statistics import classify_failures, compute_summary, format_interval, further_costs
from deckhands.evaluation.critic import MAX_SCORE

COLOURS = dict(zip(OUTCOMES, ("#2f855a", "#c05621", "#b7791f", "#6b46c1", "#718096", "#cbd5e0"), strict=True))
BINS = 20
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1a202c; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; } th, td { text-align: left; padding: .3rem .6rem; }
tr:nth-child(even) { background: #f7fafc; } th { border-bottom: 2px solid #cbd5e0; } pre { white-space: pre-wrap; }
.bar { display: flex; height: 1.2rem; border-radius: .3rem; overflow: hidden; } svg { width: 100%; height: 8rem; }
@media (prefers-color-scheme: dark) { body { background: #1a202c; color: #e2e8f0; }
  tr:nth-child(even) { background: #2d3748; } }
"""


def render_html(title: str, rows: Sequence[AttemptRow]) -> str:
    """Return the page."""
    parts = [_model(name, figures, rows) for name, figures in compute_summary(rows)["models"].items()]
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
    )
    return head + "".join(parts) + _attempts(rows) + "</html>\n"


def _model(name: str, figures: dict[str, Any], rows: Sequence[AttemptRow]) -> str:
    passes = ", ".join(
        f"{key} {value:.1%}" for key, value in figures.items() if key.startswith("pass@") and "_" not in key
    )
    own = [row for row in rows if row.model == name]
    bar = "".join(
        f'<span title="{kind}: {count}" style="flex:{count};background:{COLOURS[kind]}"></span>'
        for kind, count in figures["outcomes"].items()
        if count
    )
    legend = ", ".join(f"{count} {kind}" for kind, count in figures["outcomes"].items() if count)
    cost = "unknown in part; at least " if figures["has_unknown_cost"] else ""
    further = "".join(f"; {what}: ${usd:.4f}" for what, usd in further_costs(figures))
    return (
        f"<h2>{escape(name)}</h2><p><strong>{escape(passes) or 'nothing to score'}</strong> "
        f"(95 % interval of pass@1: {format_interval(figures['pass@1_interval'])}), {figures['instances']} instances, "
        f"{figures['attempts']} attempts: {escape(legend)}. Cost: {cost}${figures['cost_usd']['total']:.4f}{further}; "
        f"{figures['tokens']:,} tokens; {figures['infrastructure_failures_per_1000']:.1f} failures of the "
        f"infrastructure per 1,000 conversations.</p>"
        f'<div class="bar" role="img" aria-label="{escape(legend)}">{bar}</div>'
        + _histogram("Seconds of an attempt", [row.seconds for row in own])
        + _histogram("Cost of an attempt in USD", [row.cost_usd for row in own])
        + _tags(figures["tags"])
        + _failures(own)
    )


def _histogram(label: str, values: Sequence[float]) -> str:
    most = max(values, default=0.0)
    if most <= 0.0:
        return ""
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int(value / most * BINS))] += 1
    tallest = max(counts)
    bars = "".join(
        f'<rect x="{number * 5}" y="{100 - 100 * count / tallest:.1f}" width="4.5" '
        f'height="{100 * count / tallest:.1f}" fill="#3182ce">'
        f"<title>{most * number / BINS:.4g} to {most * (number + 1) / BINS:.4g}: {count}</title></rect>"
        for number, count in enumerate(counts)
    )
    return (
        f"<h3>{escape(label)}, 0 to {most:.4g}</h3>"
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{bars}</svg>'
    )


def _tags(tags: dict[str, dict[str, int]]) -> str:
    if not tags:
        return ""
    rows = "".join(
        f"<tr><td>{escape(tag)}<td>{found['resolved']} of {found['attempts']}" for tag, found in tags.items()
    )
    return f"<table><tr><th>Tag<th>Resolved{rows}</table>"


def _failures(rows: Sequence[AttemptRow]) -> str:
    """Return the outcomes of a model's unresolved attempts."""
    found = classify_failures(rows)
    lines = "".join(
        f"<tr><td>{one.outcome}{escape(f': {one.cause}' if one.cause else '')}<td>{sum(one.attempts.values())}"
        for one in found
    )
    return f"<table><tr><th>Not resolved<th>Attempts{lines}</table>" if found else ""


def _render_verdict(row: AttemptRow) -> str:
    if not row.critic_id and not row.critic_cost_usd:
        return ""
    gave = "nothing" if row.score is None else f"{row.score:g} of {MAX_SCORE}"
    return f"<p>The critic gave {gave} and cost ${row.critic_cost_usd:.4f}: {escape(row.verdict)}</p>"


def _attempts(rows: Sequence[AttemptRow]) -> str:
    lines = "".join(
        f"<tr><td>{escape(row.instance)}<td>{escape(row.model)}<td>{row.attempt}"
        f'<td style="color:{COLOURS[row.outcome]}">{row.outcome} {escape(row.cause)}'
        f"<td>{row.iterations}<td>{row.seconds:.1f}<td>{row.cost_usd:.4f}"
        f"<td><details><summary>{escape(row.conversation_id)}</summary>{_render_verdict(row)}<pre>{escape(row.evidence)}</pre>"
        f"<pre>{escape(row.patch)}</pre></details>"
        for row in rows
    )
    head = "<tr><th>Instance<th>Model<th>Attempt<th>Outcome<th>Steps<th>Seconds<th>USD<th>Evidence and patch"
    return f"<h2>Attempts</h2><table>{head}{lines}</table>"
