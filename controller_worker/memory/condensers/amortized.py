"""AmortizedForgettingCondenser: forgets the events between the first and the latest ones."""

from __future__ import annotations

from broker.contract import AmortizedForgettingCondenserSpec, CondensationAction
from controller_worker.memory.condensers.condenser import forgetting
from controller_worker.memory.condensers.rolling import should_condense, target_size, to_forget
from controller_worker.memory.view import View


class AmortizedForgettingCondenser:
    """Shortens to half of `max_size`, without a summary."""

    type = "amortized"

    def __init__(self, spec: AmortizedForgettingCondenserSpec) -> None:
        self._spec = spec

    def condense(self, view: View) -> View | CondensationAction:
        """See `Condenser.condense`."""
        spec = self._spec
        if not should_condense(spec, view):
            return view
        head = min(spec.keep_first, len(view))
        return forgetting(view, to_forget(spec, view, tail_size=target_size(spec, view) - head))
