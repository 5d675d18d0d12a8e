"""The condensers by type: those of this package, and those of installed packages by entry point.

Holds: a package cannot replace a built-in condenser. Its code is loaded only when a conversation names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import controller_worker.memory.condensers
from broker.contract import CondenserPipelineSpec, CondenserSpec
from broker.runtime import UsageError, find_classes
from broker.tools import entry_points
from controller_worker.memory.condensers.condenser import Condenser
from controller_worker.memory.condensers.model_free import CondenserPipeline

CONDENSERS: Mapping[str, Callable[[Any], Condenser]] = {
    found.type: found for found in find_classes(controller_worker.memory.condensers) if hasattr(found, "type")
}
"""By the specification's type, without pipelines."""
ENTRY_POINTS = "deckhands.condensers"


def create_condenser(spec: CondenserSpec) -> Condenser:
    """Make the condenser of a specification.

    Raises:
        UsageError: its type is unknown, or its package cannot be loaded.
    """
    if isinstance(spec, CondenserPipelineSpec):
        return CondenserPipeline([create_condenser(part) for part in spec.condensers])
    name: str = getattr(spec, "type")  # noqa: B009  (each specification but the base has one)
    factory = CONDENSERS.get(name)
    if factory is not None:
        return factory(spec)
    installed = entry_points(ENTRY_POINTS)
    if name not in installed.names:
        known = ", ".join(sorted({*CONDENSERS, *installed.names, "pipeline"}))
        raise UsageError(f"There is no condenser of the type {name!r}.", remedy=f"Known types: {known}.")
    try:
        condenser: Condenser = installed[name].load()(spec)
    except Exception as error:
        raise UsageError(f"The condenser {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return condenser
