"""The effects of a message that arrives while the agent works: an interruption, or a rollback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from broker.contract.events import DelegateEnded, Event, Observation
from broker.contract.observations import AgentDelegateObservation

ROLLED_BACK = (
    "The person has taken back what you were working on. It is no longer part of this conversation, but what it "
    "changed in the workspace is still there."
)


class InterruptedObservation(Observation):
    """A user has interrupted the current turn. Its actions have been answered, and no model reply is awaited.

    Attributes:
        message_id: the message, or the request to pause.
    """

    kind: Literal["observation.interrupted"] = "observation.interrupted"
    is_decided: ClassVar[bool] = True
    is_shown_to_model: ClassVar[bool] = False
    counts_for_loops: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "Event {message_id} has interrupted the agent"
    message_id: int


class RolledBackObservation(Observation):
    """A message has rolled back the agent's current work.

    The rolled-back events stay in the log. The state and the model's view are restored to before them. Observations of
    earlier actions and reports of earlier delegates are not rolled back.

    Attributes:
        start_id: the first event that was rolled back: the message that the agent worked on.
        kept: later messages that were not rolled back.
    """

    kind: Literal["observation.rolled_back"] = "observation.rolled_back"
    is_decided: ClassVar[bool] = True
    counts_for_loops: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "The work from event {start_id} on is taken back"
    start_id: int
    kept: tuple[int, ...] = ()

    def rolls_back(self, event: Event) -> bool:
        """Return whether an event before this one was rolled back."""
        if not max(self.start_id, 2) <= event.id < self.id or event.id in self.kept:
            return False
        asked = event.cause
        if asked is None and isinstance(event, AgentDelegateObservation | DelegateEnded):
            asked = event.delegate_id
        return asked is None or asked >= self.start_id


def find_rolled_back(events: Iterable[Event]) -> set[int]:
    """Return the ids of all events in a log that were rolled back."""
    events = list(events)
    ends = [event for event in events if isinstance(event, RolledBackObservation)]
    return {event.id for end in ends for event in events if end.rolls_back(event)}
