"""User-defined tools: a typed function, or a class with an `Action` and an `Observation` model.

    @custom_tool(outcome="idempotent")
    async def weather(city: str) -> str:
        '''Tell the weather of a city.'''
        return await forecast(city)

Holds: the tool's schema and description are derived from its types and docstrings alone. Invalid arguments never reach
the tool. Its code is imported and run in tool workers only.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, get_type_hints, overload

from pydantic import BaseModel, Field, ValidationError, create_model

from broker.contract import OutcomePolicy, ToolOffer
from broker.runtime import DeckhandsError, UsageError

DEFAULT_TIMEOUT_SECONDS = 120.0
_importing: ContextVar[str] = ContextVar("importing", default="")
"""The module that a tool worker is importing."""


class ToolFailed(DeckhandsError):
    """Raised by a tool to report a failure to the model; the model reads only this text."""

    code = "tool_failed"


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The current call.

    A function receives it as a parameter of this type, a class as second argument of `run`.

    Attributes:
        fingerprint: a hash of the tool and its arguments.
        traceparent: the trace of the call (W3C Trace Context), or empty.
        cancelled: set when the call is stopped or has timed out. An asynchronous function is also cancelled; any other
            must check it.
    """

    conversation_id: str
    action_id: int
    cancelled: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)
    fingerprint: str = ""
    traceparent: str = ""

    @property
    def is_cancelled(self) -> bool:
        """Whether the result is no longer needed."""
        return self.cancelled.is_set()

    @property
    def idempotency_key(self) -> str:
        """Return a unique key of this call. It is the same when the call is repeated after a crash."""
        return make_idempotency_key(self.conversation_id, self.action_id, self.fingerprint)


def make_idempotency_key(conversation_id: str, action_id: int, fingerprint: str) -> str:
    """Return an action's idempotency key, with which tools of every kind can avoid a second effect.

    Every attempt of an action has the same key, and no other action has it, not even one with the same number after the
    store lost the first. The key proves nothing, because an agent may choose any key.
    """
    call = f"{conversation_id}-{action_id}"
    return f"{call}-{fingerprint}" if fingerprint else call


class ToolRunner(Protocol):
    """Executes a call with valid arguments."""

    def __call__(self, arguments: Any, context: ToolContext) -> Any:
        """Return the result or an awaitable of it. For `check`, None means that the call took no effect."""
        ...


@dataclass(frozen=True, slots=True)
class CustomTool:
    """A tool as held by its worker.

    Attributes:
        offer: its published description.
        action: the model that validates the arguments; None to pass them on unchanged, as a dict.
        run: executes a call. A function that is not asynchronous runs in its own thread.
        check: for a `checkable` tool: reports the outcome of a call whose worker died.
        drop: ends what a call has left elsewhere, when the question of its server is dropped.
        timeout_seconds: after this time, a call returns an error. A thread cannot be stopped: it must check
            `ToolContext.is_cancelled`.
    """

    offer: ToolOffer
    action: type[BaseModel] | None
    run: ToolRunner
    check: ToolRunner | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    drop: Callable[[ToolContext], Awaitable[None]] | None = None

    def parse_arguments(self, given: dict[str, Any]) -> Any:
        """Return the arguments in the form that the tool accepts.

        Raises:
            ToolFailed: an argument is invalid; the text names the first.
        """
        if self.action is None:
            return given
        try:
            return self.action.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the arguments"
            text = f"Invalid argument {where!r} in tool call {self.offer.name}: {first['msg']}."
            raise ToolFailed(text, remedy="Call it again with arguments that fit its schema.") from error


@overload
def custom_tool(definition: Callable[..., Any], /) -> CustomTool: ...


@overload
def custom_tool(
    *,
    name: str = ...,
    pool: str = ...,
    outcome: OutcomePolicy | str = ...,
    timeout_seconds: float = ...,
) -> Callable[[Callable[..., Any]], CustomTool]: ...


def custom_tool(
    definition: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    pool: str = "",
    outcome: OutcomePolicy | str = OutcomePolicy.AT_MOST_ONCE,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> CustomTool | Callable[[Callable[..., Any]], CustomTool]:
    """Create a tool from a typed function or a class. A decorator, with or without arguments.

    Args:
        definition: A function with a docstring and typed parameters, or a class with `Action` (a model of the
            arguments), `run(self, action, context)`, and for a checkable tool `check(self, action, context)`.
        name: For the model; the function's or the class's own name in snake case if empty.
        pool: The tool workers that may run it; empty for those that hold the conversation's workspace.
        outcome: The recovery policy for a call whose worker died: see `OutcomePolicy`.
        timeout_seconds: See `CustomTool`.

    Raises:
        UsageError: the definition cannot be a tool; the text says why.
    """
    if definition is None:
        return lambda found: _build_tool(found, name, pool, OutcomePolicy(outcome), timeout_seconds)
    return _build_tool(definition, name, pool, OutcomePolicy(outcome), timeout_seconds)


def import_tool(name: str) -> Any:
    """Return the object that `module:attribute` names, for a tool worker.

    A script that defines tools is imported like every module. A conversation started at its top level would start
    workers that import the script again, without end; see `refuse_while_importing`.
    """
    module, _, attribute = name.partition(":")
    token = _importing.set(module)
    try:
        found: Any = import_module(module)
    finally:
        _importing.reset(token)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def refuse_while_importing() -> None:
    """Refuse to use a cluster at the top level of a module that a tool worker is importing.

    Raises:
        UsageError: a tool worker imports this module for its tools.
    """
    if module := _importing.get():
        raise UsageError(
            f"The module {module} works with conversations while a tool worker imports it for its tools.",
            remedy='Put the statements of the script under `if __name__ == "__main__":`.',
        )


def as_custom_tool(found: Any) -> CustomTool:
    """Convert the object of an entry point to a tool: a `CustomTool`, or a suitable function or class.

    Raises:
        UsageError: it cannot be a tool.
    """
    if isinstance(found, CustomTool):
        return found
    if callable(found):
        return custom_tool(found)
    raise UsageError(f"{found!r} is not a tool.", remedy="Name a function or a class.")


def _build_tool(
    definition: Callable[..., Any], name: str, pool: str, outcome: OutcomePolicy, timeout_seconds: float
) -> CustomTool:
    own_name = definition.__name__
    check: ToolRunner | None = None
    if inspect.isclass(definition):
        action, run, check = _parse_class(definition)
        own_name = "".join(f"_{c.lower()}" if c.isupper() else c for c in own_name).lstrip("_")
    else:
        action, run = _parse_function(definition)
    if (outcome is OutcomePolicy.CHECKABLE) != (check is not None):
        raise UsageError(
            f"The tool {own_name} is {outcome} and has {'a' if check else 'no'} method check.",
            remedy="Give a class a method `check` if, and only if, its outcome is `checkable`.",
        )
    schema = action.model_json_schema()
    schema.pop("title", None)
    schema.pop("description", None)
    try:
        offer = ToolOffer(
            key=name or own_name,
            name=name or own_name,
            description=inspect.getdoc(definition) or "",
            parameters=schema,
            pool=pool,
            outcome=outcome,
        )
    except ValidationError as error:
        raise UsageError(f"{own_name} cannot be a tool: {error}", remedy="Change its name, text or types.") from error
    if not offer.description:
        raise UsageError(f"The tool {own_name} has no docstring.", remedy="Add one that tells the model its purpose.")
    return CustomTool(offer, action, run, check, timeout_seconds)


def _parse_class(definition: type) -> tuple[type[BaseModel], ToolRunner, ToolRunner | None]:
    action = getattr(definition, "Action", None)
    if not (inspect.isclass(action) and issubclass(action, BaseModel)) or not hasattr(definition, "run"):
        raise UsageError(
            f"The class {definition.__name__} cannot be a tool.",
            remedy="Give it a pydantic model `Action` and a method `run(self, action, context)`.",
        )
    instance = definition()
    return action, instance.run, getattr(instance, "check", None)


def _parse_function(function: Callable[..., Any]) -> tuple[type[BaseModel], ToolRunner]:
    """Create a model of a function's parameters, and a runner that calls the function with it."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    context_name = None
    for parameter in inspect.signature(function).parameters.values():
        if hints.get(parameter.name) is ToolContext:
            context_name = parameter.name
            continue
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(
                f"The parameter {parameter.name} of {function.__name__} has no type, or is variadic.",
                remedy="Give every parameter a name and a type.",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        # By alias: a parameter may have any name, a field of a model may not.
        fields[f"p_{len(fields)}"] = (hints[parameter.name], Field(default, alias=parameter.name))
    model = create_model(function.__name__, **fields)
    names = {key: field[1].alias for key, field in fields.items()}

    def call(arguments: BaseModel, context: ToolContext) -> Any:
        given = {alias: getattr(arguments, key) for key, alias in names.items()}
        return function(**given, **({context_name: context} if context_name else {}))

    async def call_later(arguments: BaseModel, context: ToolContext) -> Any:
        found: Awaitable[Any] = call(arguments, context)
        return await found

    return model, call_later if inspect.iscoroutinefunction(function) else call
