"""Whether the set-up of an attempt failed, according to the log of its conversation.

Holds: only the command with which the environment ran the script before the agent's first step counts, and its result.
An agent cannot write either.
Does not: find a set-up that fails only in the check; `Evaluation` runs that one without the agent's work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from broker.contract import (
    SETUP_SCRIPT,
    CmdOutputObservation,
    CmdRunAction,
    Event,
    EventSource,
    Observation,
    OutcomeUnknownObservation,
)
from deckhands.evaluation.datasets.instances import SETUP_FAILED

COMMAND = f"source {SETUP_SCRIPT}"
NO_EXIT_CODE = "no_exit_code"
_SAYS_FAILED = re.compile(re.escape(SETUP_FAILED).replace(re.escape("{code}"), r"(\d+)"))


@dataclass(frozen=True, slots=True)
class FailedSetup:
    """A set-up that failed: the exit code as a cause, and the output."""

    cause: str
    text: str

    @classmethod
    def of(cls, answer: Observation) -> FailedSetup | None:
        """Return how a command failed; None: it succeeded."""
        if not isinstance(answer, CmdOutputObservation):
            return cls(NO_EXIT_CODE, answer.content)
        if answer.exit_code == 0:
            return None
        said = _find_last_line(answer)
        exit_code = int(said[1]) if said else answer.exit_code
        if exit_code < 0:
            return cls(NO_EXIT_CODE, answer.content + answer.metadata.suffix)
        return cls(f"exit_code_{exit_code}", answer.content)


def find_failed_setup(events: Sequence[Event]) -> FailedSetup | None:
    """Return how the set-up before the agent's first step failed; None: it did not, or has no known end."""
    answer = find_setup_answer(events)
    return None if answer is None or isinstance(answer, OutcomeUnknownObservation) else FailedSetup.of(answer)


def find_setup_answer(events: Sequence[Event]) -> Observation | None:
    """Return the result of the set-up before the agent's first step; None: it has none."""
    for event in events:
        if isinstance(event, CmdRunAction) and event.source is EventSource.ENVIRONMENT and event.command == COMMAND:
            return next((one for one in events if isinstance(one, Observation) and one.cause == event.id), None)
    return None


def find_check_answer(events: Sequence[Event]) -> CmdOutputObservation | None:
    """Return the result of the command of a check; None: it has none."""
    return next((event for event in reversed(events) if isinstance(event, CmdOutputObservation)), None)


def may_have_failed(answer: CmdOutputObservation) -> bool:
    """Return whether the set-up may be why a check failed: the check says so, or did not end."""
    return answer.exit_code < 0 or _find_last_line(answer) is not None


def _find_last_line(answer: CmdOutputObservation) -> re.Match[str] | None:
    return _SAYS_FAILED.fullmatch(answer.content.rstrip().rpartition("\n")[2].strip())
