"""The tool section of a prompt for models without function calling: descriptions, call format, example.

The structure is OpenHands' (6.5: headings, order, banners), so that models trained on it recognise it. The wording is
ours.

Holds: the same tools produce the same bytes, so that a provider's prompt cache stays warm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from broker.contract import ToolSpec
from controller_worker.providers.messages.messages import Message, TextPart

NO_EXAMPLE_FOR = ("openhands-lm", "devstral")
"""Parts of names of models that were trained on the format and need no example."""
EXAMPLE_TOOLS = ("execute_bash", "str_replace_editor", "browser", "finish", "edit_file")

_FORM = """
To call a function, end your reply with the call in exactly this form:

<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>
<parameter=example_parameter_2>
A value of several lines
stands between two line breaks,
which do not belong to it.
</parameter>
</function>

<IMPORTANT>
Reminder:
- A call begins with <function= and ends with </function>, as above.
- Required parameters must be given.
- Call one function at a time.
- Reasons go before the call; nothing may follow it.
- To write one of these tags inside a value, put a backslash behind its <, as in <\\/parameter>.
- If no function fits, answer the question as usual from what you know, and do not speak of functions.
</IMPORTANT>"""

_EXAMPLE_BEGIN = """Here is an example of how to do a task with the functions you have.

--------------------- START OF EXAMPLE ---------------------

USER: Make a list of the numbers from 1 to 10, shown on a web page at port 5000.

"""
_EXAMPLE_END = """
--------------------- END OF EXAMPLE ---------------------

Do NOT take the example's files, ports or results for those of your task!

--------------------- NEW TASK DESCRIPTION ---------------------
"""
EXAMPLE_SUFFIX = """
--------------------- END OF NEW TASK DESCRIPTION ---------------------

PLEASE follow the format strictly! PLEASE EMIT ONE AND ONLY ONE FUNCTION CALL PER MESSAGE.
"""

_APP = """from flask import Flask

app = Flask(__name__)


@app.route("/")
def index():
    return str(list(range(1, 11)))


app.run(port=5000)"""
_APP_CHANGED = 'return "<br>".join(str(number) for number in range(1, 11))'

Step = tuple[str, str, dict[str, str], str]
"""The assistant's text, the function, its parameters, and the result."""

_CHECK: Step = ("First I look where I am.", "execute_bash", {"command": "pwd && ls"}, "/workspace\nREADME.md")
_CREATE = "I write the server into a file."
_RUN: Step = (
    "Now I start the server in the background.",
    "execute_bash",
    {"command": "python3 app.py > server.log 2>&1 &"},
    "[1] 4242",
)
_VIEW: Step = (
    "I look at the page.",
    "browser",
    {"code": "goto('http://127.0.0.1:5000')"},
    "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]",
)
_KILL: Step = (
    "The numbers should stand one to a line. I stop the server.",
    "execute_bash",
    {"command": "kill 4242"},
    "[1]+  Terminated  python3 app.py",
)
_CHANGE = "I change what the page shows."
_RUN_AGAIN: Step = ("I start it again.", "execute_bash", _RUN[2], "[1] 4343")
_FINISH: Step = (
    "The page shows the list.",
    "finish",
    {"message": "The numbers from 1 to 10 are on a web page at port 5000, one to a line."},
    "",
)


def describe_tools(tools: Sequence[ToolSpec]) -> str:
    """Return the tools' description."""
    return "\n\n".join(_describe(number, tool) for number, tool in enumerate(tools, 1)) + "\n"


def render_system_suffix(tools: Sequence[ToolSpec]) -> str:
    """Return the text to append to the system prompt."""
    return f"\n\nYou have access to the following functions:\n\n{describe_tools(tools)}{_FORM}"


def needs_example(model: str) -> bool:
    """Return whether the first user message needs the example."""
    return not any(part in model.lower() for part in NO_EXAMPLE_FOR)


def add_example(text: str, tools: Sequence[ToolSpec]) -> str:
    """Return the first user text between example and reminder; unchanged if no tool has an example."""
    names = {tool.name for tool in tools}
    if not names & set(EXAMPLE_TOOLS):
        return text
    steps = "\n".join(_example_step(step) for step in _example_steps(names))
    return f"{_EXAMPLE_BEGIN}{steps}{_EXAMPLE_END}{text}{EXAMPLE_SUFFIX}"


@lru_cache(maxsize=64)
def add_suffix(message: Message, suffix: str) -> Message:
    """Return the system message with a text appended to its last text part, or as a new part.

    Conversations with the same prompt share the message, which is most of the memory of a short conversation.
    """
    content = message.content
    if content and isinstance(content[-1], TextPart):
        content = (*content[:-1], TextPart(content[-1].text + suffix))
    else:
        content = (*content, TextPart(suffix))
    return Message(message.role, content)


def get_type_names(schema: Any) -> tuple[str, ...]:
    """Return the JSON types named in a parameter's schema, in order; empty if it names none."""
    if not isinstance(schema, dict):
        return ()
    kind = schema.get("type")
    if isinstance(kind, str):
        return (kind,)
    if isinstance(kind, list):
        return tuple(name for name in kind if isinstance(name, str))
    found: list[str] = []
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        names = get_type_names(choice)
        if not names:
            return ()
        found += [name for name in names if name not in found]
    return tuple(found)


def _describe(number: int, tool: ToolSpec) -> str:
    lines = [f"---- BEGIN FUNCTION #{number}: {tool.name} ----", f"Description: {tool.description}"]
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    lines.append("Parameters:" if properties else "No parameters are required for this function.")
    for position, (name, schema) in enumerate(properties.items(), 1):
        known = schema if isinstance(schema, dict) else {}
        kind = " or ".join(get_type_names(schema)) or "string"
        need = "required" if name in required else "optional"
        description = known.get("description") or "No description provided"
        lines.append(f"  ({position}) {name} ({kind}, {need}): {description}")
        if known.get("enum"):
            lines.append(f"Allowed values: [{', '.join(f'`{value}`' for value in known['enum'])}]")
    lines.append(f"---- END FUNCTION #{number} ----")
    return "\n".join(lines)


def _example_steps(names: set[str]) -> list[Step]:
    create, change = _editor_steps(names)
    steps = (_CHECK, create, _RUN, _VIEW, _KILL, change, _RUN_AGAIN, _FINISH)
    return [step for step in steps if step is not None and step[1] in names]


def _editor_steps(names: set[str]) -> tuple[Step | None, Step | None]:
    path = "/workspace/app.py"
    if "str_replace_editor" in names:
        create = {"command": "create", "path": path, "file_text": _APP}
        change = {
            "command": "str_replace",
            "path": path,
            "old_str": "return str(list(range(1, 11)))",
            "new_str": _APP_CHANGED,
        }
        done = f"The file {path} has been edited."
        return (
            (_CREATE, "str_replace_editor", create, f"File created successfully at: {path}"),
            (_CHANGE, "str_replace_editor", change, done),
        )
    if "edit_file" in names:
        edit = {"path": path, "start": "1", "end": "-1", "content": _APP}
        changed = {"path": path, "start": "8", "end": "8", "content": "    " + _APP_CHANGED}
        return (
            (_CREATE, "edit_file", edit, f"File created successfully at: {path}"),
            (_CHANGE, "edit_file", changed, f"The file {path} has been edited."),
        )
    return None, None


def _example_step(step: Step) -> str:
    said, name, parameters, result = step
    lines = [f"ASSISTANT: {said}", f"<function={name}>"]
    for parameter, value in parameters.items():
        shown = f"\n{value}\n" if "\n" in value else value
        lines.append(f"<parameter={parameter}>{shown}</parameter>")
    lines.append("</function>\n")
    if result:
        lines.append(f"USER: EXECUTION RESULT of [{name}]:\n{result}\n")
    return "\n".join(lines)
