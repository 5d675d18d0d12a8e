"""The general search: a run for each seed, of one of four kinds of work under faults that the seed draws.

The canonical conversation; several conversations with messages and superfluous wake-ups; several that share a budget; a
conversation with delegates, notes, questions and checks. No run is made for a certain error.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.simulation.canonical import Plan, environment, simulate
from tests.simulation.chat import Chat, broken_chat, simulate_chat
from tests.simulation.checks import broken
from tests.simulation.errand import broken_errand, sender
from tests.simulation.faults import OF_A_PROCESS, Fault
from tests.simulation.wire import Bug
from tool_worker.host.journal import Journal

MAX_FAULTS = 3
LAST_FAULT_AT = {"canonical": 220, "chat": 600, "budget": 600, "errand": 500}
KINDS = tuple(LAST_FAULT_AT)
COMMAND_SECONDS = (0.02, 0.05, 0.2)


@dataclass(frozen=True)
class Search:
    """The runs of the search, perhaps with a planted bug; the scripts of its models are in the folder."""

    folder: Path
    bug: Bug | None = None
    journal: type[Journal] = Journal

    def run(self, seed: int) -> list[str]:
        """Run a seed and return what its checks found."""
        kind, random = KINDS[seed % len(KINDS)], Random(seed)
        faults = self._draw_faults(kind, random)
        controllers, tools = random.choice([1, 2]), random.choice([1, 2])
        if kind in ("canonical", "errand"):
            plan = Plan(seed, faults, controllers, tools, bug=self.bug)
            if kind == "canonical":
                return broken(simulate(plan, environment(self.folder), journal=self.journal))
            return broken_errand(simulate(plan, {}, journal=self.journal, person=sender(self.folder)))
        chat = Chat(
            seed,
            faults,
            command_seconds=random.choice(COMMAND_SECONDS),
            has_bell=random.random() < 0.3,
            has_early_bell=random.random() < 0.7,
            has_budget=kind == "budget",
            bug=self.bug,
            journal=self.journal,
            controllers=controllers,
            tools=tools,
        )
        return broken_chat(simulate_chat(chat, self.folder))

    def find(self, seeds: range) -> tuple[int, list[str]] | None:
        """Return the first seed whose checks find something, and what; None: none does."""
        return next(self._find_failures(seeds), None)

    def _find_failures(self, seeds: range) -> Iterator[tuple[int, list[str]]]:
        return ((seed, found) for seed in seeds if (found := self.run(seed)))

    def _draw_faults(self, kind: str, random: Random) -> dict[int, Fault]:
        number = random.randint(0, MAX_FAULTS)
        kinds = OF_A_PROCESS if kind == "errand" or random.random() < 0.5 else tuple(Fault)
        at = random.sample(range(1, LAST_FAULT_AT[kind] + 1), number)
        return {place: random.choice(kinds) for place in at}
