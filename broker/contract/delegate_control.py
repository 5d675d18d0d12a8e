"""Control of delegates: their agent lists, messages, awaits, pauses, resumes and stops them by tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from broker.contract.events import Action, EventSource, Observation
from broker.contract.tool_arguments import ToolCallError, parse_optional_text
from broker.contract.tool_specs import ToolSpec

DelegateOperation = Literal["list", "message", "wait", "pause", "resume", "stop"]
MAX_MESSAGE_CHARS = 100_000
MAX_NUMBERS = 200

DELEGATES = ToolSpec(
    name="delegates",
    description=(
        "See and control the agents that work for you in the background. `list` shows their state. `message` tells one "
        "something. `wait` lets you continue when they have finished (`join`: all of them, or the first). `pause` and "
        "`resume` interrupt one for a while, and `stop` ends one for good; you still get its result."
    ),
    parameters={
        "type": "object",
        "properties": {
            "operation": {"type": "string", "enum": list(get_args(DelegateOperation)), "description": "What to do."},
            "numbers": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "The numbers of the agents. May be left out for `list` and `wait`: all of them.",
            },
            "text": {"type": "string", "description": "For `message`: what to tell them."},
            "join": {"type": "string", "enum": ["all", "any"], "description": "For `wait`. Default all."},
        },
        "required": ["operation"],
    },
)


class ManageDelegatesAction(Action):
    """See or control delegates in the background.

    Attributes:
        numbers: the ids of the actions that started the delegates; empty for all.
        text: the message.
        join: for `wait`: whether the next step waits for all of them or for any.
    """

    kind: Literal["action.manage_delegates"] = "action.manage_delegates"
    is_decided: ClassVar[bool] = True
    tool_spec: ClassVar[ToolSpec] = DELEGATES
    enabled_by: ClassVar[str] = "enable_delegate_control"
    source: EventSource = EventSource.AGENT
    operation: DelegateOperation = "list"
    numbers: tuple[int, ...] = ()
    text: str = ""
    join: Literal["all", "any"] = "all"

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        which = ", ".join(map(str, self.numbers)) or "all"
        return f"Delegates {which}: {self.operation}" + (f": {self.text}" if self.text else "")

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`."""
        operation, join = arguments.get("operation"), arguments.get("join", "all")
        if operation not in get_args(DelegateOperation):
            known = ", ".join(get_args(DelegateOperation))
            raise ToolCallError(f"Invalid argument 'operation' in tool call {DELEGATES.name}. Use one of {known}.")
        if join not in ("all", "any"):
            raise ToolCallError(f"Invalid argument 'join' in tool call {DELEGATES.name}. Use all or any.")
        numbers = _parse_numbers(arguments.get("numbers", []))
        if not numbers and operation not in ("list", "wait"):
            raise ToolCallError(f"Missing required argument 'numbers' for {operation} in tool call {DELEGATES.name}.")
        text = parse_optional_text(arguments, "text", DELEGATES.name, "").strip() if operation == "message" else ""
        if operation == "message" and not 0 < len(text) <= MAX_MESSAGE_CHARS:
            raise ToolCallError(f"A message has 1 to {MAX_MESSAGE_CHARS:,} characters, not {len(text):,}.")
        return cls(operation=operation, numbers=numbers, text=text, join=join)


class DelegatesObservation(Observation):
    """The result of a `ManageDelegatesAction`; the content is for the model.

    Attributes:
        numbers: the delegates that the action applied to; empty if it was not carried out.
    """

    kind: Literal["observation.manage_delegates"] = "observation.manage_delegates"
    numbers: tuple[int, ...] = ()


def _parse_numbers(given: Any) -> tuple[int, ...]:
    values = [given] if isinstance(given, int) else given
    if not isinstance(values, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
        raise ToolCallError(f"Invalid argument 'numbers' in tool call {DELEGATES.name}: use a list of numbers.")
    if len(values) > MAX_NUMBERS or any(not 0 < one < 2**53 for one in values):
        raise ToolCallError(
            f"Invalid argument 'numbers' in tool call {DELEGATES.name}: at most {MAX_NUMBERS} numbers above 0."
        )
    return tuple(dict.fromkeys(values))
