"""The report of an evaluation as one self-contained HTML page; every figure is from `statistics`.

Holds: the page has no script. Its filters are check boxes that style sheets act on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from deckhands.evaluation.attempts.results import OUTCOMES, AttemptRow, Outcome
from deckhands.evaluation.attempts.statistics import (
    classify_failures,
    compute_summary,
    format_interval,
    format_mean,
    further_costs,
    list_means,
)
from deckhands.evaluation.critic import MAX_SCORE
from deckhands.evaluation.rewards import find_rewards
from deckhands.evaluation.transcripts import Transcript

COLOURS: Mapping[Outcome, str] = {
    "resolved": "#2f855a",
    "unresolved": "#c05621",
    "limit": "#b7791f",
    "refused": "#6b46c1",
    "setup_failed": "#9b2c2c",
    "infra-abandoned": "#718096",
    "not-run": "#cbd5e0",
}
BINS = 20
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1a202c; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; } th, td { text-align: left; padding: .3rem .6rem; }
tr:nth-child(even) { background: #f7fafc; } th { border-bottom: 2px solid #cbd5e0; } pre { white-space: pre-wrap; }
.bar { display: flex; height: 1.2rem; border-radius: .3rem; overflow: hidden; } svg { width: 100%; height: 8rem; }
@media (prefers-color-scheme: dark) { body { background: #1a202c; color: #e2e8f0; }
  tr:nth-child(even) { background: #2d3748; } }
"""


MAX_WHY_CHARS = 200
REASONS = {
    "limit": "It reached the limit: {}.",
    "setup_failed": "The set-up failed: {}.",
    "infra-abandoned": "The infrastructure failed: {}.",
    "not-run": "It was not run: {}.",
}


def render_html(
    title: str,
    rows: Sequence[AttemptRow],
    configuration: Mapping[str, Any] | None = None,
    transcripts: Mapping[str, Transcript] | None = None,
) -> str:
    """Return the page.

    Args:
        configuration: the request of the evaluation.
        transcripts: by the conversations of attempts.
    """
    models = compute_summary(rows)["models"]
    parts = [_render_configuration(configuration or {}), _render_side_by_side(models, rows)]
    parts += [_render_model(name, figures, rows) for name, figures in models.items()]
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
    )
    return head + "".join(parts) + _render_attempts(rows, transcripts or {}) + "</html>\n"


def explain(row: AttemptRow) -> str:
    """Return, in one line, why an attempt is not resolved; empty if it is."""
    if row.outcome == "resolved":
        return ""
    lines = [line.strip() for line in row.evidence.splitlines() if line.strip() and find_rewards(line) is None]
    why = lines[-1] if lines else ""
    if row.outcome in REASONS:
        return " ".join(part for part in (REASONS[row.outcome].format(row.cause or "no cause"), why) if part)[
            :MAX_WHY_CHARS
        ]
    if row.cause:
        why = f"The agent ended in {row.cause}. {why}"
    return (why or "The check failed and wrote nothing." if row.checked_id else why or "No reason is known.")[
        :MAX_WHY_CHARS
    ]


def _render_configuration(configuration: Mapping[str, Any]) -> str:
    texts = {
        name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for name, value in configuration.items()
        if value is not None
    }
    lines = "".join(f"<tr><td>{escape(name)}<td>{escape(text)}" for name, text in texts.items() if text)
    return f"<details><summary>Configuration</summary><table>{lines}</table></details>" if lines else ""


def _render_side_by_side(models: Mapping[str, Mapping[str, Any]], rows: Sequence[AttemptRow]) -> str:
    """Return the figures of all models, and their outcomes at each instance, in columns."""
    if len(models) < 2:
        return ""
    names = list(dict.fromkeys(name for found in models.values() for name, _ in list_means(found)))
    lines: list[tuple[str, list[str]]] = [
        ("pass@1", [f"{one['pass@1']:.1%}" if "pass@1" in one else "no score" for one in models.values()]),
        ("95 % interval", [format_interval(one["pass@1_interval"]) for one in models.values()]),
        *((name, [_format_if_known(dict(list_means(one)).get(name)) for one in models.values()]) for name in names),
        ("USD", [f"{one['cost_usd']['total']:.4f}" for one in models.values()]),
        ("Seconds (median)", [f"{one['seconds']['median']:.1f}" for one in models.values()]),
        ("Steps (median)", [f"{one['iterations']['median']:g}" for one in models.values()]),
    ]
    head = "<tr><th>" + "".join(f"<th>{escape(model)}" for model in models)
    figures = "".join(f"<tr><td>{escape(name)}" + "".join(f"<td>{one}" for one in cells) for name, cells in lines)
    found: dict[str, dict[str, list[str]]] = {}
    for number, row in enumerate(rows):
        reward = "" if row.reward is None else f" ({row.reward:.4g})"
        link = f'<a href="#a{number}" style="color:{COLOURS[row.outcome]}">{row.outcome}{reward}</a>'
        found.setdefault(row.instance, {}).setdefault(row.model, []).append(link)
    instances = "".join(
        f"<tr><td>{escape(instance)}" + "".join(f"<td>{', '.join(cells.get(model, []))}" for model in models)
        for instance, cells in found.items()
    )
    return f"<h2>Models side by side</h2><table>{head}{figures}</table><table>{head}{instances}</table>"


def _format_if_known(mean: Mapping[str, Any] | None) -> str:
    return "" if mean is None else format_mean(mean)


def _render_model(name: str, figures: dict[str, Any], rows: Sequence[AttemptRow]) -> str:
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
    means = "".join(f" {escape(label)}: {format_mean(mean)}." for label, mean in list_means(figures))
    further = "".join(f"; {what}: ${usd:.4f}" for what, usd in further_costs(figures))
    return (
        f"<h2>{escape(name)}</h2><p><strong>{escape(passes) or 'no score'}</strong> "
        f"(95 % interval of pass@1: {format_interval(figures['pass@1_interval'])}), {figures['instances']} instances, "
        f"{figures['attempts']} attempts: {escape(legend)}.{means} "
        f"Cost: {cost}${figures['cost_usd']['total']:.4f}{further}; "
        f"{figures['tokens']:,} tokens; {figures['infrastructure_failures_per_1000']:.1f} failures of the "
        f"infrastructure per 1,000 conversations.</p>"
        f'<div class="bar" role="img" aria-label="{escape(legend)}">{bar}</div>'
        + _render_histogram("Seconds of an attempt", [row.seconds for row in own])
        + _render_histogram("Cost of an attempt in USD", [row.cost_usd for row in own])
        + _render_tags(figures["tags"])
        + _render_failures(own)
    )


def _render_histogram(label: str, values: Sequence[float]) -> str:
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


def _render_tags(tags: dict[str, dict[str, int]]) -> str:
    if not tags:
        return ""
    rows = "".join(
        f"<tr><td>{escape(tag)}<td>{found['resolved']} of {found['attempts']}" for tag, found in tags.items()
    )
    return f"<table><tr><th>Tag<th>Resolved{rows}</table>"


def _render_failures(rows: Sequence[AttemptRow]) -> str:
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


def _render_attempts(rows: Sequence[AttemptRow], transcripts: Mapping[str, Transcript]) -> str:
    outcomes: dict[str, str] = {outcome: f"o{number}" for number, outcome in enumerate(OUTCOMES)}
    models = {model: f"m{number}" for number, model in enumerate(dict.fromkeys(row.model for row in rows))}
    tags = {tag: f"t{number}" for number, tag in enumerate(dict.fromkeys(tag for row in rows for tag in row.tags))}
    shown = {outcome: name for outcome, name in outcomes.items() if any(row.outcome == outcome for row in rows)}
    lines = "".join(
        f'<tr id="a{number}" class="{outcomes[row.outcome]} {models[row.model]} '
        f'{" ".join(tags[tag] for tag in row.tags)}"><td>{escape(row.instance)}<td>{escape(row.model)}<td>{row.attempt}'
        f'<td style="color:{COLOURS[row.outcome]}">{row.outcome} {escape(row.cause)}'
        f"<td>{'' if row.reward is None else f'{row.reward:.4g}'}<td>{escape(explain(row))}"
        f"<td>{row.iterations}<td>{row.seconds:.1f}<td>{row.cost_usd:.4f}"
        f"<td>{_render_details(row, transcripts.get(row.conversation_id))}"
        for number, row in enumerate(rows)
    )
    filters = (
        _render_filter("Outcome", shown) + _render_filter("Model", models) + _render_filter("Tag", tags, is_any=True)
    )
    columns = ("Instance", "Model", "Attempt", "Outcome", "Reward", "Why", "Steps", "Seconds", "USD", "Details")
    head = "<tr>" + "".join(f"<th>{column}" for column in columns)
    return f'<h2>Attempts</h2>{filters}<table id="attempts">{head}{lines}</table>'


def _render_filter(label: str, names: Mapping[str, str], *, is_any: bool = False) -> str:
    """Return check boxes for the classes of table rows, and the style that hides rows.

    Args:
        is_any: a row can have any number of the classes, so a checked box hides the rows without its class.
    """
    if len(names) < (1 if is_any else 2):
        return ""
    checked = "" if is_any else " checked"
    boxes = "".join(
        f'<label><input type="checkbox" id="f-{name}"{checked}> {escape(text)}</label> ' for text, name in names.items()
    )
    state, hidden = (":checked", ":not(.{})") if is_any else (":not(:checked)", ".{}")
    rules = "".join(
        f"body:has(#f-{name}{state}) #attempts tr[id]{hidden.format(name)}{{display:none}}" for name in names.values()
    )
    return f"<p>{label}: {boxes}</p><style>{rules}</style>"


def _render_details(row: AttemptRow, transcript: Transcript | None) -> str:
    task = turns = ""
    if transcript is not None:
        task = f"<h4>Task</h4><pre>{escape(transcript.task)}</pre>"
        left_out = f"<p>{transcript.left_out} turns are left out.</p>" if transcript.left_out else ""
        said = "".join(
            f"<p><strong>{escape(turn.role)} {escape(turn.name)}</strong></p><pre>{escape(turn.text)}</pre>"
            + "".join(f"<pre>→ {escape(call)}</pre>" for call in turn.calls)
            for turn in transcript.turns
        )
        turns = f"<details><summary>Transcript</summary>{left_out}{said}</details>"
    elif row.conversation_id:
        turns = f"<p>No transcript is here: <code>deckhands eval logs DIR {escape(row.conversation_id)}</code></p>"
    metrics = "".join(f"<tr><td>{escape(name)}<td>{value:.6g}" for name, value in row.metrics.items())
    steps = (
        f"<p>Rewards of steps: {', '.join(f'{one:.4g}' for one in row.step_rewards)}</p>" if row.step_rewards else ""
    )
    failures = f"<p>Failures of the infrastructure: {escape(', '.join(row.failures))}</p>" if row.failures else ""
    return (
        f"<details><summary>{escape(row.conversation_id) or 'not started'}</summary>{_render_verdict(row)}{failures}"
        f"{task}{f'<table>{metrics}</table>' if metrics else ''}{steps}{turns}"
        f"<h4>Evidence</h4><pre>{escape(row.evidence)}</pre><h4>Patch</h4><pre>{escape(row.patch)}</pre></details>"
    )
