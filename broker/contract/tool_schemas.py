"""The tools of the built-in agents, as the model sees them (OpenHands 9.1: names, parameters; the texts are ours)."""

from __future__ import annotations

from broker.contract.tool_specs import ToolSpec

SECURITY_RISK = {
    "type": "string",
    "enum": ["LOW", "MEDIUM", "HIGH"],
    "description": "How dangerous this is: LOW reads or changes only the workspace; MEDIUM changes things the task "
    "needs beyond it, such as installing a package; HIGH may harm the system, leak secrets or cannot be undone.",
}

EXECUTE_BASH = ToolSpec(
    name="execute_bash",
    description=(
        "Run a command in the conversation's bash session. The session keeps its directory, variables and background "
        "programs. Several lines run in order, as a script does. "
        "A command that is silent for a while comes back with exit code -1 and is still running: send an empty "
        "command to see more, text with is_input to answer it (Enter follows by itself; a line break is Enter alone), "
        "or `C-c` with is_input to interrupt it. Start servers and other long jobs with is_background. Very long "
        "output loses its middle; a file that is named has all of it."
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
            "is_background": {
                "type": "boolean",
                "description": "true: return at once. The answer names the job's terminal.",
            },
            "terminal": {
                "type": "string",
                "description": "Another shell, by any name, or a job's. Default `main`.",
            },
            "control": {
                "type": "string",
                "enum": ["list", "kill", "reset"],
                "description": "Instead of a command: list terminals and jobs, or end or restart `terminal`.",
            },
            "security_risk": SECURITY_RISK,
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
            "task": {"type": "string", "description": "What to do, and what to report."},
            "background": {
                "type": "boolean",
                "description": "true: continue at once; you get the result when it is ready. Default false.",
            },
            "join": {
                "type": "string",
                "enum": ["all", "any"],
                "description": "With several calls in one turn: wait for all of them (default), or for the first.",
            },
        },
        "required": ["agent", "task"],
    },
)
