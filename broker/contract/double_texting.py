"""What a message has done that came while the agent worked: it stopped what ran, or took back a stretch of work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from broker.contract.events import DelegateEnded, Event, Observation
from broker.contract.observations import AgentDelegateObservation

TAKEN_BACK = (
    "The person has taken back what you were working on. It is no longer part of this conversation, but what it "
    "changed in the workspace is still there."
)


class InterruptedObservation(Observation):
    """A person has stopped the turn under way: its actions have been answered, and no reply is waited for.

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
    """A message has taken back what the agent worked on.

    What was taken back stays in the log; the state and the model's view are as they were before it. What answers an
    action, or reports a delegate, of before it is not taken back.

    Attributes:
        start_id: the first event that was taken back: the message that the agent worked on.
        kept: messages behind it that were not.
    """

    kind: Literal["observation.rolled_back"] = "observation.rolled_back"
    is_decided: ClassVar[bool] = True
    counts_for_loops: ClassVar[bool] = False
    sentence_template: ClassVar[str] = "The work from event {start_id} on is taken back"
    start_id: int
    kept: tuple[int, ...] = ()

    def takes_back(self, event: Event) -> bool:
        """Say whether an event before this one was taken back."""
        if not max(self.start_id, 2) <= event.id < self.id or event.id in self.kept:
            return False
        asked = event.cause
        if asked is None and isinstance(event, AgentDelegateObservation | DelegateEnded):
            asked = event.delegate_id
        return asked is None or asked >= self.start_id


def taken_back(events: Iterable[Event]) -> set[int]:
    """Return the ids of all events of a log that were taken back."""
    events = list(events)
    ends = [event for event in events if isinstance(event, RolledBackObservation)]
    return {event.id for end in ends for event in events if end.takes_back(event)}
