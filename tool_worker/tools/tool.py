"""The interface of tools: converts an action to a request to the workspace host, and its result to an observation.

Holds: both are pure functions; all access to the workspace happens in the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from broker.contract import Action, CommandExecutedObservation, ErrorObservation, Observation
from broker.runtime import DeckhandsError


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A request to the workspace host.

    Attributes:
        tool: See `tool_worker.host.protocol`.
        arguments: Plain JSON values.
    """

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Tool(Protocol):
    """The handler of one kind of action. Defining a subclass registers it.

    Attributes:
        action: The kind.
    """

    OF_KIND: ClassVar[dict[str, Tool]] = {}
    action: ClassVar[type[Action]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the tool for its kind."""
        super().__init_subclass__(**kwargs)
        if "action" in cls.__dict__:
            Tool.OF_KIND[cls.action.model_fields["kind"].default] = cls()

    def request(self, action: Any) -> HostRequest | Observation:
        """Return the request to the host, or immediately the observation of an action that cannot run."""
        ...

    def observe(self, action: Any, result: Mapping[str, Any]) -> Observation:
        """Turn the host's result into an observation, without cause and metadata."""
        ...


def to_answer(action: Action, observation: Observation) -> Observation:
    """Return the observation with the action's cause, source and tool call."""
    return action.to_answer(observation).model_copy(
        update={
            "cause": action.id,
            "source": action.source,
            "tool_call_metadata": action.tool_call_metadata,
        }
    )


def make_replacement(observation: Observation, text: str, error: DeckhandsError) -> Observation:
    """Return a replacement for an observation that cannot be appended, as the answer to the same call."""
    changes = {"cause": observation.cause, "tool_call_metadata": observation.tool_call_metadata}
    is_of_person = isinstance(observation, CommandExecutedObservation)
    failed = (CommandExecutedObservation if is_of_person else ErrorObservation)(content=text, error_id=error.code)
    return failed.model_copy(update=changes)
