"""Settings of an evaluation that a dataset brings, for options that are not given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FIELDS = ("attempts", "max_iterations", "max_budget", "max_seconds")


@dataclass(frozen=True, slots=True)
class DatasetDefaults:
    """The settings.

    Attributes:
        values: by the field of `EvaluationRequest`, one of `FIELDS`.
        sources: the dataset's own words for them, such as `epochs=3`.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def resolve(self, given: Mapping[str, float | None]) -> tuple[dict[str, float], list[str]]:
        """Return the settings to use, and notes on those of the dataset.

        Args:
            given: the options; None: not given.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        notes = []
        for name, value in self.values.items():
            if name not in chosen:
                chosen[name] = value
                notes.append(f"The dataset sets {name} to {value:g}: {self.sources[name]}.")
            elif chosen[name] != value:
                notes.append(f"The dataset's {self.sources[name]} is ignored: {name} is {chosen[name]:g}.")
        return chosen, notes
