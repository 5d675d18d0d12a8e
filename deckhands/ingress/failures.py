"""The exceptions of the ingress' tasks. Callers need not import this: Celery passes their names and arguments.

    TaskFailure args: message, code, conversation id ├── RequestRefused the request is invalid; nothing was started ├──
    AgentFailed the agent ended with an error, reached a limit, or refused the task ├── AgentStopped the agent was
    stopped by a user └── AgentNeedsPerson the agent asks a question, and its task is headless SoftTimeLimitExceeded
    Celery's, with the same args: the agent worked for as long as the task's limit allows TimeLimitExceeded likewise for
    a hard limit

Holds: the arguments are JSON, and always the same for the same conversation.
"""

from __future__ import annotations

from typing import Any

from broker.contract import AgentState, add_remedy
from broker.runtime import DeckhandsError
from deckhands.client import ExitCode, Summary
from deckhands.ingress.ingress_results import TIME_LIMITS

MAX_REASON_CHARS = 300


class TaskFailure(Exception):
    """The failure of a task.

    Args:
        message: what happened, and what to do.
        code: stable, machine-readable.
        conversation_id: empty if there is none.
    """

    def __init__(self, message: str, code: str = "error", conversation_id: str = "") -> None:
        super().__init__(message, code, conversation_id)


class RequestRefused(TaskFailure):
    """The request is invalid; nothing was started."""


class AgentFailed(TaskFailure):
    """The agent ended with an error, reached a limit, or refused the task."""


class AgentStopped(TaskFailure):
    """A user stopped the agent."""


class AgentNeedsPerson(TaskFailure):
    """The agent asks a question, and its task is headless: no user can answer."""


class TaskExpired(Exception):
    """The message of a task has expired, and no earlier delivery has performed it."""


FAILURES = {kind.__name__: kind for kind in (TaskFailure, RequestRefused, AgentFailed, AgentStopped, AgentNeedsPerson)}
RAISED = (TaskFailure, *TIME_LIMITS.values())
OUT_OF_TIME = "max_time"
"""The error code of a conversation that reached its time limit."""


def refusal(error: DeckhandsError) -> dict[str, Any]:
    """Return the failure of an invalid request, as plain JSON values."""
    return {"kind": RequestRefused.__name__, "message": str(error), "code": error.code, "conversation_id": ""}


def unusable_callback(error: Exception, conversation_id: str) -> dict[str, Any]:
    """Return, as plain JSON values, the failure of a task whose agent has ended but whose callbacks cannot be sent."""
    message = (
        f"The agent has ended, but the callbacks of its task cannot be sent: {type(error).__name__}: "
        f"{str(error)[:MAX_REASON_CHARS]}. `deckhands show {conversation_id}` has the agent's result."
    )
    return {
        "kind": TaskFailure.__name__,
        "message": message,
        "code": "unusable_callback",
        "conversation_id": conversation_id,
    }


def failure_of(summary: Summary, time_limit: str = "") -> dict[str, Any] | None:
    """Return the failure of a summary, as plain JSON values; None if the agent has finished.

    Args:
        time_limit: the exception of the time limit of the task, if that limit bounds the agent; empty if the agent's
            own limits do.
    """
    kind: type[Exception] = AgentFailed
    code, text = summary.error_code or "agent_error", summary.last_error or summary.message
    match summary.state:
        case AgentState.FINISHED:
            return None
        case AgentState.REJECTED:
            code = "rejected"
            text = summary.message
        case AgentState.STOPPED:
            kind = AgentStopped
            code = "stopped"
            text = "The agent was stopped."
        case AgentState.ERROR if summary.error_code == OUT_OF_TIME and time_limit in TIME_LIMITS:
            kind = TIME_LIMITS[time_limit]
            code = OUT_OF_TIME
        case AgentState.ERROR:
            code = "limit" if summary.exit_code is ExitCode.LIMIT else code
        case _:
            kind = AgentNeedsPerson
            code = "needs_person"
            text = summary.message or f"It is {summary.state}."
    message = add_remedy(text, summary.remedy) or f"It is {summary.state}."
    return {"kind": kind.__name__, "message": message, "code": code, "conversation_id": summary.conversation_id}


def to_exception(failure: dict[str, Any]) -> Exception:
    """Return a failure as an exception."""
    name = str(failure["kind"])
    kind: type[Exception] = TIME_LIMITS.get(name) or FAILURES.get(name, AgentFailed)
    return kind(str(failure["message"]), str(failure["code"]), str(failure["conversation_id"]))
