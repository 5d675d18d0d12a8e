"""The metrics of a worker. They travel with its heartbeat to the readers of metrics.

Every few beats, a worker repeats its facts in the store; one field of them is a text with these figures. So one reader
of the store has the figures of all workers, and no worker needs a port.

Holds: a figure has at most `MAX_LABELS` labels; further ones count under `OTHER`. Labels are short and plain, because
providers choose the names of models. Figures are validated when read, because any process with the rights of a worker
could have written them; invalid ones are left out.
Does not: store history. A counter starts at 0 with its worker. If the worker is killed, its last seconds are lost.
Keys: the field `figures` of `deck:{k}:worker:<w>:about` of the first shard.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Mapping

FIELD = "figures"
MAX_LABELS = 32
"""For one figure of one worker."""
MAX_LABEL_CHARS = 100
MAX_TEXT_CHARS = 65_536
MAX_FIGURES = 50
LARGEST = 2.0**53
OTHER = "other"
MAX_LAGS = 50
"""A quarter of a minute of beats."""

_UNSAFE_CHARS = re.compile(r"[^ !#-\[\]-~]")
"""Characters that are not printable ASCII, or that JSON escapes. Without them, a text of figures has a bounded
length."""

LabeledValues = Mapping[str, float]
"""Values by label. The label of a figure without labels is empty."""


class Figures:
    """The figures of one worker. Only its event loop changes them."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = {}
        self._lags: deque[float] = deque(maxlen=MAX_LAGS)

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Add to a counter."""
        values = self._values.setdefault(name, {})
        if label not in values:
            label = _UNSAFE_CHARS.sub("?", label[:MAX_LABEL_CHARS])
            if label not in values and len(values) >= MAX_LABELS:
                label = OTHER
        values[label] = values.get(label, 0.0) + amount

    def set(self, **now: float) -> None:
        """Set the current values of some gauges."""
        for name, value in now.items():
            self._values[name] = {"": value}

    def record_lag(self, seconds: float) -> None:
        """Record how late the event loop was for something due at a certain time."""
        lag = max(0.0, seconds)
        self._lags.append(lag)
        self.add("loop_late_seconds", lag)
        self.set(loop_lag_seconds=max(self._lags))

    def render(self) -> str:
        """Return all figures in the format of `read_figures`."""
        return json.dumps(self._values)


def read_figures(text: str) -> dict[str, dict[str, float]]:
    """Parse figures by name and label. Invalid ones are left out. Raises nothing."""
    try:
        found = json.loads(text) if 0 < len(text) <= MAX_TEXT_CHARS else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    figures = list(found.items())[:MAX_FIGURES]
    return {name: values for name, given in figures if (values := _parse_values(given))}


def _parse_values(given: object) -> dict[str, float]:
    if not isinstance(given, dict):
        return {}
    pairs = list(given.items())[: MAX_LABELS + 1]
    return {label: float(value) for label, value in pairs if len(label) <= MAX_LABEL_CHARS and _is_usable(value)}


def _is_usable(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= LARGEST and math.isfinite(value)
