"""NoOpCondenser: shows everything. A prompt that does not fit the model ends the conversation's work in an error."""

from __future__ import annotations

from broker.contract import NoOpCondenserSpec
from controller_worker.memory.view import View


class NoOpCondenser:
    """Leaves the View unchanged."""

    type = "noop"

    def __init__(self, spec: NoOpCondenserSpec) -> None:
        self.spec = spec

    def condense(self, view: View) -> View:
        """See `Condenser.condense`."""
        return view
