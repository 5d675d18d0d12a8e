"""Parses browser actions as a model writes them: lines that look like function calls (BrowserGym's action set).

    click('12')
    fill('a3', value='Ada')

Holds: actions are parsed and never run as code. A wrong name, argument count or type is refused before any action runs,
with a text that names the valid form.
Differs: a number is accepted for a bid or a text, because models write `click(12)`. A surplus closing parenthesis at
the end is ignored, as in BrowserGym.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_CHARS = 200_000
MAX_CALLS = 50
BUTTONS = ("left", "middle", "right")
FORM = "Write one call a line, as click('12')."
MODIFIERS = ("Alt", "Control", "ControlOrMeta", "Meta", "Shift")


class ActionStringError(Exception):
    """The text is not a list of actions; the error text is for the model."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an action.

    Attributes:
        kind: `text`, `texts` (one or a list), `number`, `flag`, `button` or `modifiers`.
        default: None if the argument is required.
    """

    name: str
    kind: str = "text"
    default: Any = None


@dataclass(frozen=True, slots=True)
class BrowserCall:
    """One action.

    Attributes:
        arguments: The values of all parameters, by name.
        text: The source text.
    """

    name: str
    arguments: Mapping[str, Any]
    text: str


_BID = Parameter("bid")
_MOUSE = (_BID, Parameter("button", "button", "left"), Parameter("modifiers", "modifiers", ()))

ACTIONS: Mapping[str, tuple[Parameter, ...]] = {
    "noop": (Parameter("wait_ms", "number", 1000),),
    "goto": (Parameter("url"),),
    "go_back": (),
    "go_forward": (),
    "scroll": (Parameter("delta_x", "number"), Parameter("delta_y", "number")),
    "fill": (_BID, Parameter("value")),
    "select_option": (_BID, Parameter("options", "texts")),
    "click": _MOUSE,
    "dblclick": _MOUSE,
    "hover": (_BID,),
    "press": (_BID, Parameter("key_comb")),
    "focus": (_BID,),
    "clear": (_BID,),
    "drag_and_drop": (Parameter("from_bid"), Parameter("to_bid")),
    "upload_file": (_BID, Parameter("file", "texts")),
    "new_tab": (),
    "tab_close": (),
    "tab_focus": (Parameter("index", "number"),),
    "answer_dialogs": (Parameter("accept", "flag"), Parameter("text", "text", "")),
    "console": (),
    "send_msg_to_user": (Parameter("text"),),
    "report_infeasible": (Parameter("reason"),),
}
"""The parameters of each action, in order."""


def parse_actions(written: str) -> list[BrowserCall]:
    """Return the actions of a text, in order.

    Raises:
        ActionStringError: the text has no actions, or anything but actions.
    """
    if len(written) > MAX_CHARS:
        raise ActionStringError(f"The actions have {len(written)} characters; {MAX_CHARS} are allowed.")
    try:
        statements = _parse_statements(written.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ActionStringError(f"The actions cannot be read: {error}. {FORM}") from error
    if not statements:
        raise ActionStringError(f"No action is given. {_list_actions()}")
    if len(statements) > MAX_CALLS:
        raise ActionStringError(f"{len(statements)} actions are given; {MAX_CALLS} are allowed at once.")
    return [_parse_call(statement) for statement in statements]


def _parse_statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError:
        if not text.endswith("))"):
            raise
        # Models write one parenthesis too many.
        return ast.parse(text[:-1]).body


def _parse_call(statement: ast.stmt) -> BrowserCall:
    try:
        text = ast.unparse(statement)
    except RecursionError as error:
        raise ActionStringError(f"The actions cannot be read: one is nested too deeply. {FORM}") from error
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ActionStringError(f"{_shorten(text)} is not an action. {FORM} {_list_actions()}")
    name = call.func.id
    if name not in ACTIONS:
        raise ActionStringError(f"There is no action {name!r}. {_list_actions()}")
    given = _collect_arguments(call, name, text)
    return BrowserCall(name, {one.name: _convert_argument(given, one, name) for one in ACTIONS[name]}, text)


def _collect_arguments(call: ast.Call, name: str, text: str) -> dict[str, Any]:
    """Return the arguments by name."""
    parameters = ACTIONS[name]
    names = [parameter.name for parameter in parameters]
    keywords = [keyword.arg for keyword in call.keywords]
    given = [*names[: len(call.args)], *keywords]
    if len(call.args) > len(parameters) or len(set(given)) < len(given) or not set(given) <= set(names):
        raise ActionStringError(f"{_shorten(text)} does not fit {signature(name)}.")
    try:
        values = [ast.literal_eval(node) for node in (*call.args, *(keyword.value for keyword in call.keywords))]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ActionStringError(f"The arguments of {_shorten(text)} must be plain values.") from error
    return {name: value for name, value in zip(given, values, strict=True) if name is not None}


def _convert_argument(given: Mapping[str, Any], parameter: Parameter, name: str) -> Any:
    if parameter.name not in given:
        if parameter.default is None:
            raise ActionStringError(f"{parameter.name!r} is missing: {signature(name)}.")
        return parameter.default
    value = given[parameter.name]
    fits = {
        "text": _text,
        "texts": _texts,
        "number": _number,
        "flag": lambda value: value if isinstance(value, bool) else None,
        "button": lambda value: value if value in BUTTONS else None,
        "modifiers": _modifiers,
    }[parameter.kind](value)
    if fits is None:
        raise ActionStringError(f"{parameter.name!r} cannot be {_shorten(repr(value))}: {signature(name)}.")
    return fits


def _text(value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


def _texts(value: Any) -> list[str] | None:
    texts = [_text(item) for item in (value if isinstance(value, list | tuple) else [value])]
    found = [text for text in texts if text is not None]
    return found if len(found) == len(texts) else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) <= 1_000_000 else None


def _modifiers(value: Any) -> list[str] | None:
    wanted = value if isinstance(value, list | tuple) else [value]
    return list(wanted) if all(item in MODIFIERS for item in wanted) else None


def signature(name: str) -> str:
    """Return an action's signature, for example `noop(wait_ms=1000)`."""
    words = [
        parameter.name if parameter.default is None else f"{parameter.name}={parameter.default!r}"
        for parameter in ACTIONS[name]
    ]
    return f"{name}({', '.join(words)})"


def _list_actions() -> str:
    return "The actions are: " + ", ".join(signature(name) for name in ACTIONS) + "."


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
