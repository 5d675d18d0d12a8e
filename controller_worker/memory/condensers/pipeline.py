"""CondenserPipeline: passes the View through several condensers."""

from __future__ import annotations

from collections.abc import Sequence

from controller_worker.memory.condensers.condenser import Condensed, Condenser
from controller_worker.memory.view import View


class CondenserPipeline:
    """Each condenser gets the View of the one before it; the first condensation ends the pipeline."""

    def __init__(self, condensers: Sequence[Condenser]) -> None:
        self._condensers = condensers

    def condense(self, view: View) -> Condensed:
        """See `Condenser.condense`."""
        for condenser in self._condensers:
            condensed = condenser.condense(view)
            if not isinstance(condensed, View):
                return condensed
            view = condensed
        return view
