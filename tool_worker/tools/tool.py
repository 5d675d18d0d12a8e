"""The protocol of tools: how an action becomes a request to the workspace host, and its result an observation.

Holds: both are functions of values; whatever touches the workspace happens in the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from broker.contract import Action, CommandExecutedObservation, ErrorObservation, Observation
from broker.runtime import DeckhandsError


@dataclass(frozen=True, slots=True)
class HostRequest:
    """What the workspace host is asked to do.

    Attributes:
        tool: see `tool_worker.host.protocol`.
        arguments: plain JSON values.
    """

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Tool(Protocol):
    """What carries out one kind of action. Defining a subclass registers it.

    Attributes:
        action: the kind.
    """

    OF_KIND: ClassVar[dict[str, Tool]] = {}
    action: ClassVar[type[Action]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the tool of a kind."""
        super().__init_subclass__(**kwargs)
        if "action" in cls.__dict__:
            Tool.OF_KIND[cls.action.model_fields["kind"].default] = cls()

    def request(self, action: Any) -> HostRequest | Observation:
        """Return what to ask the host, or at once the observation of an action that cannot be run."""
        ...

    def observe(self, action: Any, result: Mapping[str, Any]) -> Observation:
        """Turn the host's result into an observation, without cause and metadata."""
        ...


def answering(action: Action, observation: Observation) -> Observation:
    """Return the observation as the answer to this action: cause, source and tool call are the action's."""
    return action.as_answer(observation).model_copy(
        update={
            "cause": action.id,
            "source": action.source,
            "tool_call_metadata": action.tool_call_metadata,
        }
    )


def instead_of(observation: Observation, text: str, error: DeckhandsError) -> Observation:
    """Return what answers the same call in place of an observation that cannot be appended."""
    changes = {"cause": observation.cause, "tool_call_metadata": observation.tool_call_metadata}
    is_of_person = isinstance(observation, CommandExecutedObservation)
    failed = (CommandExecutedObservation if is_of_person else ErrorObservation)(content=text, error_id=error.code)
    return failed.model_copy(update=changes)
