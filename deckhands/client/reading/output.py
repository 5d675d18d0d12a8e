"""Output of commands: results on standard output, everything else on standard error.

Holds: colour and redrawing are used only on a terminal; all output goes through `deckhands.client.reading.terminal`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from broker.contract import Event, RiskyAction
from broker.log import LivePiece, render_event_line
from broker.runtime import format_count
from deckhands.client.reading.metrics import Metrics
from deckhands.client.reading.rendering import Renderer
from deckhands.client.reading.summary import Summary
from deckhands.client.reading.terminal import (
    clean_line,
    format_time,
    is_coloured,
    note,
    print_ascii,
    print_coloured,
    print_json,
    print_text,
    render_cost,
)

CALLS_REMEMBERED = 8
"""The number of recent calls whose printed pieces are remembered."""
UNCONFINED = "none: commands can do all that their tool worker's user can"


class EventPrinter:
    """Prints events, readable or as JSON."""

    def __init__(self, *, as_json: bool, is_plain: bool = False) -> None:
        self._as_json = as_json
        self._renderer = Renderer(is_coloured=is_coloured(sys.stdout) and not is_plain)
        self._call = self._kind = ""
        self._streamed: dict[str, str] = {}  # by call: pieces may be ahead of the events of earlier calls
        self._is_in_line = False

    def event(self, event: Event) -> None:
        """Print an event, unless readers do not need it or its text was printed already."""
        if self._as_json:
            print_ascii(render_event_line(event) + "\n")
            return
        shown = "\n".join(self._streamed.values()) if self._streamed and _is_output_shared() else ""
        if lines := self._renderer.lines(event, shown=shown):
            self._end_line()
            print_coloured(lines)

    def question(self, action: RiskyAction) -> None:
        """Print the action that awaits confirmation, and how to answer."""
        print_coloured(["", *self._renderer.render_question(action)])
        print_text("`deckhands confirm ID` runs it, `deckhands reject ID` refuses it.")

    def piece(self, piece: LivePiece) -> None:
        """Print a piece of a reply on standard error while the model writes it. The whole reply follows as an event."""
        if piece.kind == "superseded":
            self._streamed.pop(piece.call, None)
            text = f"\n[{piece.call}: the call failed and its output is dropped; another model is called]"
            print_coloured([self._renderer.style(text, "dim")], err=True, end="")
            return
        if piece.call != self._call or piece.kind != self._kind:
            self._end_line()
            print_coloured([self._renderer.style(f"[{piece.call} {piece.kind}] ", "dim")], err=True, end="")
            self._call = piece.call
            self._kind = piece.kind
        self._remember(piece)
        self._is_in_line = True
        print_text(piece.text, err=True, end="")

    def note(self, text: str) -> None:
        """Print a notice on standard error."""
        note(text)

    def close(self) -> None:
        """Erase temporary lines; plain lines stay."""

    @asynccontextmanager
    async def leave_to_user(self) -> AsyncIterator[None]:
        """Leave the terminal to the user while they type an answer."""
        yield

    @asynccontextmanager
    async def live(self) -> AsyncIterator[None]:
        """Keep temporary lines up to date."""
        yield

    def _remember(self, piece: LivePiece) -> None:
        self._streamed[piece.call] = self._streamed.get(piece.call, "") + piece.text
        if len(self._streamed) > CALLS_REMEMBERED:
            del self._streamed[next(iter(self._streamed))]

    def _end_line(self) -> None:
        """End the line of a partly written reply."""
        if self._is_in_line:
            print_text("", err=True)
        self._is_in_line = False

    def summary(self, summary: Summary) -> None:
        """Print a summary: one line of JSON, or a few readable ones."""
        if self._as_json:
            print_json(summary.as_json())
            return
        style = "green" if summary.state == "finished" else "red"
        lines = render_summary(summary)
        styled = [self._renderer.style(line, style if line.startswith("State") else "dim") for line in lines]
        print_coloured(["", *styled])


def _is_output_shared() -> bool:
    """Return whether standard output and standard error go to the same terminal, file or pipe."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError):  # one of them is not a file
        return sys.stdout.isatty() and sys.stderr.isatty()


def render_summary(summary: Summary) -> list[str]:
    """Return a summary as lines, one fact per line."""
    cost = render_cost(summary.cost_usd, is_whole=not summary.has_unknown_cost)
    facts = {
        "State": summary.state + (f": {summary.last_error}" if summary.last_error else ""),
        "Details": "" if summary.error_detail in summary.last_error else summary.error_detail,
        "Remedy": summary.remedy,
        "Begins": f"not before {format_time(summary.not_before)}" if summary.not_before else "",
        "Expires": f"unless it has started by {format_time(summary.expires)}" if summary.expires else "",
        "Conversation": summary.conversation_id,
        "Title": summary.title,
        "Labels": " ".join(f"{name}={value}" for name, value in sorted(summary.labels.items())),
        "Model": summary.model,
        "Workspace": summary.workspace or "",
        "Sandbox": UNCONFINED if summary.sandbox == "none" else "",
        "IPython": "the agent can run cells" if summary.has_ipython else "",
        "Hands to": ", ".join(f"{name} ({what})" for name, what in summary.delegates.items()),
        "Iterations": str(summary.iterations),
        "Tokens": f"{summary.prompt_tokens:,} in, {summary.completion_tokens:,} out" + _describe_cache(summary.metrics),
        "Cost": cost + _describe_budget(summary) + _describe_estimates(summary),
        "Models": _describe_models(summary.metrics),
        "Delegates": _describe_delegates(summary.metrics),
        "Latency": _describe_latency(summary.metrics),
        "Duration": f"{summary.duration_seconds:.1f} s",
        "Output": json.dumps(summary.outputs, ensure_ascii=False) if summary.outputs else "",
    }
    return [f"{name + ':':<14}{clean_line(value, limit=1_000)}" for name, value in facts.items() if value]


def _describe_budget(summary: Summary) -> str:
    budget = summary.metrics.max_budget_per_task
    if budget is None or not summary.has_unknown_cost:
        return ""
    return f"; the budget of ${budget:.2f} covers only calls of known price"


def _describe_estimates(summary: Summary) -> str:
    if not summary.estimated_calls:
        return ""
    return f"; estimated for {format_count(summary.estimated_calls, 'call')} without token counts from the provider"


def _describe_cache(metrics: Metrics) -> str:
    usage = metrics.accumulated_token_usage
    if not usage.cache_read_tokens and not usage.cache_write_tokens:
        return ""
    return f" ({usage.cache_read_tokens:,} read from the cache, {usage.cache_write_tokens:,} written to it)"


def _describe_models(metrics: Metrics) -> str:
    """Return the cost of each model; empty if there was only one."""
    models = metrics.per_model()
    parts = []
    for name, found in models.items():
        cost = render_cost(found["accumulated_cost"], is_whole=not metrics.has_unknown_price(name))
        parts.append(f"{name} {_of_unknown(cost)} (calls: {found['calls']})")
    return ", ".join(parts) if len(parts) > 1 else ""


def _describe_delegates(metrics: Metrics) -> str:
    """Return the cost of each delegate, which is part of the total."""
    return ", ".join(
        f"{found.agent or found.conversation_id} "
        f"{_of_unknown(render_cost(found.cost, is_whole=not found.has_unknown_cost))} "
        f"({found.state}, iterations: {found.iterations})"
        for found in metrics.delegates
    )


def _of_unknown(cost: str) -> str:
    return "at an unknown cost" if cost == "unknown" else cost


def _describe_latency(metrics: Metrics) -> str:
    totals = metrics.totals()
    if not totals["longest_latency"]:
        return ""
    return f"{totals['mean_latency']:.1f} s a call, {totals['longest_latency']:.1f} s the longest"
