"""Parses and writes tool calls as text: the format of OpenHands (6.5) for models without function calling.

    <function=NAME>
    <parameter=P>VALUE</parameter>
    </function>

Holds: `read_calls(write_calls(text, calls))` returns the text and every list of calls that fit their tools, whatever
their values contain. A call never runs with a truncated value. A call that cannot be parsed completely has a
`problem`, which the model reads.
Differs: the original reads one call and drops the others. It treats a call without a line break after its name as plain
text, cuts a value at a tag that it contains, passes the line breaks around a block to the tool, and leaves numbers and
booleans as texts. Each of these loses or corrupts a valid call. Like the original, this drops text between two
parameters, except text that may be the rest of a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from broker.contract import ToolSpec
from controller_worker.providers.messages.fn_call_prompt import get_type_names
from controller_worker.providers.messages.messages import ToolCall

CALL_END = "</function>"
STOP_WORD = "</function"
SHOWN_CHARS = 200
INDENT_CHARS = 100
"""The maximum indentation of a call that stands alone on its line."""

_WRITE_AGAIN = "Write the whole call again; if it was too long, in smaller parts."

_PARAMETER_END = "</parameter>"
# The bound on a name keeps the search linear in a text with many openings and no ends.
_CALL = re.compile(r"<function=([^<>\n]{0,200})(>|\Z)")
# The second form is a common mistake of models: <parameter=name=value</parameter>
_PARAMETER = re.compile(r"<parameter=([^=>\n]+)[>=]")
_GAP = re.compile(r"(?:\s|</?tool_call>)*")
_NEXT_TAG = re.compile(r"<(?:parameter=|/parameter>|function=|/function>)")
_REST_OF_LINE = re.compile(r"[^\S\n]*\n")
_BEGINNINGS = ("<parameter=", CALL_END, "{")
_TAG = re.compile(r"<(?=\\*/?(?:function|parameter|tool_call))")
_ESCAPED_TAG = re.compile(r"<\\(?=\\*/?(?:function|parameter|tool_call))")
_PLAIN_NAME = re.compile(r"[\w.-]+")
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_ARTICLES: Mapping[str, str] = {"integer": "an", "array": "an", "object": "an"}


class CallProblem(Exception):
    """A call that cannot run as written. The model reads the text."""


def write_calls(text: str, calls: Sequence[ToolCall], tools: Mapping[str, ToolSpec]) -> str:
    """Return an assistant's text followed by its calls."""
    blocks = [_escape(text), *(_write_call(call, tools.get(call.name)) for call in calls)]
    return "\n\n".join(block for block in blocks if block.strip()).lstrip() if calls else blocks[0]


def read_calls(
    text: str, tools: Mapping[str, ToolSpec], *, ids: str, is_cut: bool = False
) -> tuple[str, tuple[ToolCall, ...]]:
    """Parse a model's reply.

    Args:
        text: the whole reply. The end of the last call may be missing, because it is the stop word.
        tools: by name; a call of any other tool has a problem.
        ids: the prefix of the calls' ids; a number from 01 is appended.
        is_cut: the reply reached its length limit, so a missing end was never written.

    Returns:
        The text before the first call, and the calls that directly follow each other. Text after a call is dropped,
        together with the calls behind that text, because the model wrote them without the call's result.
    """
    first = next((found for found in _CALL.finditer(text) if _is_call(found, tools, is_cut=is_cut)), None)
    if first is None:
        return _unescape(text), ()
    content = text[: first.start()].rstrip().removesuffix("<tool_call>")
    calls: list[ToolCall] = []
    position = first.start()
    while (found := _CALL.match(text, position)) and _is_call(found, tools, is_cut=is_cut):
        name = found[1].strip()
        begin = found.end()
        reader = _CallReader(text, begin, is_cut=is_cut or not found[2])
        problem = ""
        try:
            arguments = json.dumps(reader.read_arguments(name, tools), ensure_ascii=False)
        except CallProblem as error:
            problem = str(error)
            arguments = text[begin : reader.position].removesuffix(CALL_END).strip()
        calls.append(ToolCall(f"{ids}{len(calls) + 1:02d}", name, arguments, problem))
        position = _skip(text, reader.position)
    return _unescape(content).strip(), tuple(calls)


def _is_call(found: re.Match[str], tools: Mapping[str, ToolSpec], *, is_cut: bool) -> bool:
    """Return whether a tag starts a call; otherwise the text only mentions it.

    It starts a call if the inside of a call follows, or if it is alone on its line. At the end of the text, the end tag
    of a call without parameters may be missing because it is the stop word.
    """
    text = found.string
    begin = found.start()
    end = found.end()
    # Only the end of the line is searched, so that a long line with many mentions is not scanned for each of them.
    before = text[max(begin - INDENT_CHARS, 0) : begin]
    indent = before.rpartition("\n")[2].replace("<tool_call>", "").strip()
    begins_line = not indent and ("\n" in before or begin <= INDENT_CHARS)
    if not found[2]:
        return is_cut or (begins_line and bool(found[1].strip()))
    after = _skip(text, end)
    if after == len(text):
        tool = tools.get(found[1].strip())
        return is_cut or begins_line or (tool is not None and not tool.parameters.get("required"))
    if text.startswith(_BEGINNINGS, after) or _is_open_tag(text, after, is_cut=is_cut):
        return True
    if not begins_line:
        return False
    if _REST_OF_LINE.match(text, end):
        return True
    inside = _NEXT_TAG.search(text, end)
    return inside is not None and inside[0] == "<parameter="


def _is_open_tag(text: str, position: int, *, is_cut: bool) -> bool:
    """Return whether the text ends inside a tag of a call."""
    rest = text[position : position + len("<parameter=")]
    return position + len(rest) == len(text) and (
        CALL_END.startswith(rest) or (is_cut and "<parameter=".startswith(rest))
    )


class _CallReader:
    """Parses the inside of one call. `position` is the end of the parsed part."""

    def __init__(self, text: str, position: int, *, is_cut: bool) -> None:
        self._text = text
        self._is_cut = is_cut
        self.position = position

    def read_arguments(self, name: str, tools: Mapping[str, ToolSpec]) -> dict[str, Any]:
        """Return the arguments.

        Raises:
            CallProblem: the call is incomplete or does not fit its tool; `position` is after the call in this case,
                too.
        """
        try:
            texts, values = self._read_inside(name)
        except CallProblem:
            end = self._text.find(CALL_END, self.position)
            self.position = len(self._text) if end < 0 else end + len(CALL_END)
            raise
        tool = tools.get(name)
        if tool is None:
            raise CallProblem(f"Function '{name[:SHOWN_CHARS]}' not found in available tools: {sorted(tools)}")
        return _check_arguments(tool, texts, values)

    def _read_inside(self, name: str) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the parameters as texts, or as values if the model wrote one JSON object."""
        texts: dict[str, str] = {}
        values: dict[str, Any] = {}
        self.position = _skip(self._text, self.position)
        if self._text.startswith("{", self.position):
            values = self._read_json(name)
        while not self._is_at_end(name):
            found = _PARAMETER.match(self._text, self.position)
            if found is None and self._skip_words(texts):
                continue
            if found is None or values:
                if self._is_cut and self._text.find(CALL_END, self.position) < 0:
                    raise CallProblem(f"The call of function '{name}' is cut off. {_WRITE_AGAIN}")
                shown = self._text[self.position : self.position + SHOWN_CHARS]
                raise CallProblem(
                    f"Malformed call of function '{name}': no <parameter=…> or {CALL_END} before {shown!r}. "
                    f"Inside a value, write <\\/parameter> for {_PARAMETER_END}."
                )
            parameter = found[1].strip()
            if parameter in texts:
                raise CallProblem(f"Parameter '{parameter}' is given twice for function '{name}'.")
            texts[parameter] = self._read_value(name, parameter, found.end())
        return texts, values

    def _skip_words(self, texts: dict[str, str]) -> bool:
        """Skip text that is not part of a call, such as words and a superfluous end tag of a parameter.

        Returns:
            False if the text may be the rest of a value that contains the end of a parameter; such text is never
            dropped.
        """
        last = next(reversed(texts.values()), "")
        is_surplus = self._text.startswith(_PARAMETER_END, self.position)
        if is_surplus and "<parameter" not in last:
            self.position = _skip(self._text, self.position + len(_PARAMETER_END))
            return True
        tag = _NEXT_TAG.search(self._text, self.position)
        if tag is None:
            self.position = len(self._text)
            return not self._is_cut
        if is_surplus or tag[0] == "<function=" or (tag[0] == _PARAMETER_END and texts):
            return False
        has_moved = tag.start() > self.position
        self.position = tag.start()
        return has_moved

    def _read_value(self, name: str, parameter: str, begin: int) -> str:
        end = self._text.find(_PARAMETER_END, begin)
        value = self._text[begin:end]
        # The tag alone is a mention. With the end of a call it is the next call, and this value's end is missing.
        if end < 0 or "<parameter=" in value or ("<function=" in value and CALL_END in value):
            raise CallProblem(
                f"The call of function '{name}' is cut off: parameter '{parameter}' has no {_PARAMETER_END}. "
                + _WRITE_AGAIN
            )
        self.position = _skip(self._text, end + len(_PARAMETER_END))
        is_block = len(value) > 1 and value.startswith("\n") and value.endswith("\n")
        return _unescape(value[1:-1] if is_block else value)

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            value, self.position = json.JSONDecoder(parse_constant=_refuse).raw_decode(self._text, self.position)
        except (ValueError, RecursionError) as error:
            raise CallProblem(f"Failed to parse the arguments of function '{name}': {error}.") from error
        self.position = _skip(self._text, self.position)
        assert isinstance(value, dict), "it begins with a brace"
        return value

    def _is_at_end(self, name: str) -> bool:
        """Return whether the call ends here, and skip its end tag.

        The tag may be missing, because it is the stop word.
        """
        if self._text.startswith(CALL_END, self.position):
            self.position += len(CALL_END)
            return True
        if not CALL_END.startswith(self._text[self.position :]):
            return False
        if self._is_cut:
            raise CallProblem(f"The call of function '{name}' is cut off: there is no {CALL_END}. {_WRITE_AGAIN}")
        self.position = len(self._text)
        return True


def _check_arguments(tool: ToolSpec, texts: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments converted to their types. The order and texts of the checks are OpenHands'."""
    properties = tool.parameters.get("properties") or {}
    checked: dict[str, Any] = {}
    for name in (*texts, *values):
        if name not in properties and not tool.parameters.get("additionalProperties"):
            allowed = "{" + ", ".join(repr(known) for known in properties) + "}"
            raise CallProblem(
                f"Parameter '{name[:SHOWN_CHARS]}' is not allowed for function '{tool.name}'. "
                f"Allowed parameters: {allowed}"
            )
        schema = properties.get(name)
        value = values[name] if name in values else _convert(texts[name], name, schema)
        choices = schema.get("enum") if isinstance(schema, dict) else None
        if choices and value not in choices:
            raise CallProblem(f"Parameter '{name}' is expected to be one of {choices}.")
        checked[name] = value
    missing = [name for name in tool.parameters.get("required") or () if name not in checked]
    if missing:
        listed = "{" + ", ".join(repr(name) for name in missing) + "}"
        raise CallProblem(f"Missing required parameters for function '{tool.name}': {listed}")
    return checked


def _convert(text: str, name: str, schema: Any) -> Any:
    types = get_type_names(schema)
    if types == ("string",) or (isinstance(schema, dict) and text in (schema.get("enum") or ())):
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = text.strip() == "True" if text.strip() in ("True", "False") and "boolean" in types else text
    if not types or any(_has_type(value, kind) for kind in types):
        return value
    if "string" in types:
        return text
    raise CallProblem(f"Parameter '{name}' is expected to be {_ARTICLES.get(types[0], 'a')} {types[0]}.")


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _PYTHON_TYPES.get(kind, (object,)))


def _write_call(call: ToolCall, tool: ToolSpec | None) -> str:
    name = re.sub(r"[>\n]", "_", call.name)
    try:
        arguments = json.loads(call.arguments or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):  # as the model wrote it, so that the mistake is visible
        return f"<function={name}>\n{call.arguments}\n{CALL_END}"
    if not all(_PLAIN_NAME.fullmatch(key) for key in arguments):
        return f"<function={name}>\n{json.dumps(arguments, ensure_ascii=False)}\n{CALL_END}"
    properties = (tool.parameters.get("properties") or {}) if tool is not None else {}
    lines = [
        f"<parameter={key}>{_write_value(value, properties.get(key))}{_PARAMETER_END}"
        for key, value in arguments.items()
    ]
    return "\n".join([f"<function={name}>", *lines, CALL_END])


def _write_value(value: Any, schema: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and get_type_names(schema) != ("string",):
        # A text that would be parsed as another type, such as a number, is written as JSON.
        try:
            is_read_back = _convert(text, "", schema) == value
        except CallProblem:
            is_read_back = True
        text = text if is_read_back else json.dumps(value, ensure_ascii=False)
    text = _escape(text)
    return f"\n{text}\n" if "\n" in text else text


def _escape(text: str) -> str:
    """Return the text with one more backslash in each tag of the format."""
    return _TAG.sub(r"<\\", text)


def _unescape(text: str) -> str:
    return _ESCAPED_TAG.sub("<", text)


def _skip(text: str, position: int) -> int:
    gap = _GAP.match(text, position)
    assert gap is not None, "it matches nothing too"
    return gap.end()


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
