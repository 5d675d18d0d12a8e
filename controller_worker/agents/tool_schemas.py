"""The tools of the built-in agents, as the model sees them (OpenHands 9.1: names, parameters; the words are ours)."""

from __future__ import annotations

from broker.contract.tool_specs import ToolSpec

_SECURITY_RISK = {
    "type": "string",
    "enum": ["LOW", "MEDIUM", "HIGH"],
    "description": "How dangerous this is: LOW reads or changes only the workspace; MEDIUM changes things the task "
    "needs beyond it, such as installing a package; HIGH may harm the system, leak secrets or cannot be undone.",
}

EXECUTE_BASH = ToolSpec(
    name="execute_bash",
    description=(
        "Run a command in the conversation's bash session. The session keeps its directory, variables and background "
        "programs. One command per call: join several with `&&` or `;`. "
        "A command that is silent for a while comes back with exit code -1 and is still running: send an empty "
        "command to see more, text with is_input to answer it, or `C-c` with is_input to interrupt it. Start servers "
        "and other long jobs in the background with their output in a file. Very long output loses its middle."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "description": "The command. Empty: more output of the running one. `C-c`, `C-d`, `C-z`: that key.",
            },
            "is_input": {
                "type": "string",
                "enum": ["true", "false"],
                "description": "true: the command is typed into the program that is running. Default false.",
            },
            "timeout": {
                "type": "number",
                "description": "Seconds after which the call returns even if the command still runs.",
            },
            "security_risk": _SECURITY_RISK,
        },
        "required": ["command", "security_risk"],
    },
)

THINK = ToolSpec(
    name="think",
    description=(
        "Write a thought down. Nothing is run and nothing changes. Use it to weigh several ways, to plan, or to sort "
        "out what a failure means."
    ),
    parameters={
        "type": "object",
        "properties": {"thought": {"type": "string", "description": "The thought."}},
        "required": ["thought"],
    },
)

FINISH = ToolSpec(
    name="finish",
    description="End the task: it is done, or you cannot get further. Report what was done, checked and left open.",
    parameters={
        "type": "object",
        "properties": {"message": {"type": "string", "description": "The final report to the person."}},
        "required": ["message"],
    },
)

PROPOSE_PLAN = ToolSpec(
    name="propose_plan",
    description=(
        "Propose the plan, when you have looked at all that it touches. Once it is accepted it is carried out as it "
        "stands, so it has to be complete."
    ),
    parameters={
        "type": "object",
        "properties": {"plan": {"type": "string", "description": "The whole plan, in Markdown."}},
        "required": ["plan"],
    },
)

REQUEST_CONDENSATION = ToolSpec(
    name="request_condensation",
    description=(
        "Have the older part of this conversation replaced by a summary. Use it when much of what was said and shown "
        "no longer matters, such as after one part of a long task."
    ),
    parameters={"type": "object", "properties": {}, "required": []},
)

DELEGATE = ToolSpec(
    name="delegate",
    description=(
        "Hand a task to another agent, which works on it by itself and reports its result. It sees the workspace but "
        "nothing of this conversation: the task must say everything it needs. Several calls in one turn work at the "
        "same time."
    ),
    parameters={
        "type": "object",
        "properties": {
            "agent": {"type": "string", "description": "The agent's name, such as CodeActAgent."},
            "task": {"type": "string", "description": "What is to be done, and what is to be reported."},
            "background": {
                "type": "boolean",
                "description": "true: go on at once; the result is told when it is there. Default false.",
            },
            "join": {
                "type": "string",
                "enum": ["all", "any"],
                "description": "Of several calls in one turn: wait for all of them (default), or for the first.",
            },
        },
        "required": ["agent", "task"],
    },
)

DELEGATE_TO_BROWSING_AGENT = ToolSpec(
    name="delegate_to_browsing_agent",
    description=(
        "Hand a task to an agent that acts in a web browser, and get its answer. It has a browser of its own and sees "
        "nothing of this conversation: the task must say everything it needs, addresses included."
    ),
    parameters={
        "type": "object",
        "properties": {
            "task": {"type": "string", "description": "What is to be done or found out, in plain words."},
        },
        "required": ["task"],
    },
)

EXECUTE_IPYTHON_CELL = ToolSpec(
    name="execute_ipython_cell",
    description=(
        "Run a cell of Python code in the conversation's IPython kernel. Variables and imports live from cell to "
        "cell; magics such as %pip and %timeit work; pictures are shown. The kernel follows the shell's directory. "
        "A cell that is just `%restart` gives a new kernel."
    ),
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The code."},
            "security_risk": _SECURITY_RISK,
        },
        "required": ["code", "security_risk"],
    },
)

BROWSER = ToolSpec(
    name="browser",
    description=(
        "Act in the conversation's web browser. `code` is one action a line, written as a call; values are plain texts "
        "and numbers. Every answer shows the page as an accessibility tree, in which [bid] names an element; use bids "
        "of the latest answer only. Files that are downloaded, PDF files among them, go into the workspace.\n\n"
        "goto(url): open http://, https:// or file:// addresses\n"
        "go_back(), go_forward(): in the history\n"
        "noop(wait_ms=1000): wait, to see what the page does\n"
        "scroll(delta_x, delta_y): in pixels; down and right are positive\n"
        "fill(bid, value): put a text into a field in place of what is there\n"
        "select_option(bid, options): one or a list, by value or label\n"
        "click(bid, button='left', modifiers=[]), dblclick(bid, button='left', modifiers=[])\n"
        "hover(bid), focus(bid), clear(bid)\n"
        "press(bid, key_comb): such as 'Enter' or 'ControlOrMeta+a'\n"
        "drag_and_drop(from_bid, to_bid)\n"
        "upload_file(bid, file): one path or a list, in the workspace\n"
        "new_tab(), tab_close(), tab_focus(index)\n"
        "answer_dialogs(accept, text=''): from now on accept what a page asks; otherwise it is dismissed"
    ),
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The actions, such as goto('http://localhost:8000')."},
            "security_risk": _SECURITY_RISK,
        },
        "required": ["code", "security_risk"],
    },
)

STR_REPLACE_EDITOR = ToolSpec(
    name="str_replace_editor",
    description=(
        "View, create and edit text files. `view` shows a file with line numbers, or a directory two levels deep. "
        "`create` makes a new file and refuses if there is one. `str_replace` replaces `old_str`, which must occur "
        "exactly once, white space included, by `new_str`. `insert` puts `new_str` after line `insert_line`. "
        "`undo_edit` takes the last edit of the file back. Long output is cut."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
                "description": "What to do.",
            },
            "path": {"type": "string", "description": "Absolute path of the file or directory."},
            "file_text": {"type": "string", "description": "For `create`: the content of the new file."},
            "old_str": {"type": "string", "description": "For `str_replace`: the text to replace."},
            "new_str": {"type": "string", "description": "For `str_replace` and `insert`: the new text."},
            "insert_line": {"type": "integer", "description": "For `insert`: the line after which to insert; 0: top."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For `view` of a file: first and last line, from 1; -1 as last: to the end.",
            },
            "security_risk": _SECURITY_RISK,
        },
        "required": ["command", "path", "security_risk"],
    },
)
