"""What the tasks of the door raise: Celery hands them to callers by name and arguments, who need not import this.

    TaskFailure             args: message, code, conversation id
    ├── RequestRefused      the request cannot be used; nothing was begun
    ├── AgentFailed         the agent ended with an error, used up a limit, or refused the task
    ├── AgentStopped        somebody stopped it
    └── AgentNeedsPerson    it asks something, and its task says that nobody can be asked
    SoftTimeLimitExceeded   Celery's, with the same args: the agent worked for as long as the task's limit allows
    TimeLimitExceeded       so, for a limit that is not soft

Holds: the arguments are JSON, and the same for the same conversation, however often they are stored.
"""

from __future__ import annotations

from typing import Any

from broker.contract import AgentState
from broker.runtime import DeckhandsError
from deckhands.client import ExitCode, Summary
from deckhands.ingress.task_results import TIME_LIMITS

MAX_REASON_CHARS = 300


class TaskFailure(Exception):
    """What a task has failed with.

    Args:
        message: what happened, and what to do.
        code: stable, machine-readable.
        conversation_id: empty: there is none.
    """

    def __init__(self, message: str, code: str = "error", conversation_id: str = "") -> None:
        super().__init__(message, code, conversation_id)


class RequestRefused(TaskFailure):
    """The request cannot be used; nothing was begun."""


class AgentFailed(TaskFailure):
    """The agent ended with an error, used up a limit, or refused the task."""


class AgentStopped(TaskFailure):
    """Somebody stopped the agent."""


class AgentNeedsPerson(TaskFailure):
    """The agent asks something, and its task says that nobody can be asked."""


class TaskExpired(Exception):
    """The message of a task has expired, and no earlier delivery has done what it asks for."""


FAILURES = {kind.__name__: kind for kind in (TaskFailure, RequestRefused, AgentFailed, AgentStopped, AgentNeedsPerson)}
THROWN = (TaskFailure, *TIME_LIMITS.values())
OUT_OF_TIME = "max_time"
"""The code of a conversation that has worked for as long as it may."""


def refusal(error: DeckhandsError) -> dict[str, Any]:
    """Return the failure of a request that cannot be used, as plain JSON values."""
    return {"kind": RequestRefused.__name__, "message": str(error), "code": error.code, "conversation_id": ""}


def unusable_callback(error: Exception, conversation_id: str) -> dict[str, Any]:
    """Return the failure of a task whose agent has ended and whose callbacks cannot be sent, as plain JSON values."""
    message = (
        f"The agent has ended, but what follows its task cannot be carried out: {type(error).__name__}: "
        f"{str(error)[:MAX_REASON_CHARS]}. `deckhands show {conversation_id}` has the agent's result."
    )
    return {
        "kind": TaskFailure.__name__,
        "message": message,
        "code": "unusable_callback",
        "conversation_id": conversation_id,
    }


def failure_of(summary: Summary, time_limit: str = "") -> dict[str, Any] | None:
    """Return the failure that a summary stands for, as plain JSON values; None: the agent has finished.

    Args:
        time_limit: the exception of the task's time limit that bounds the agent; empty: its own limits do.
    """
    kind: type[Exception] = AgentFailed
    code, text = summary.error_code or "agent_error", summary.last_error or summary.message
    match summary.state:
        case AgentState.FINISHED:
            return None
        case AgentState.REJECTED:
            code, text = "rejected", summary.message
        case AgentState.STOPPED:
            kind, code, text = AgentStopped, "stopped", "The agent was stopped."
        case AgentState.ERROR if summary.error_code == OUT_OF_TIME and time_limit in TIME_LIMITS:
            kind, code = TIME_LIMITS[time_limit], OUT_OF_TIME
        case AgentState.ERROR:
            code = "limit" if summary.exit_code is ExitCode.LIMIT else code
        case _:
            kind, code, text = AgentNeedsPerson, "needs_person", summary.message or f"It is {summary.state}."
    message = f"{text} {summary.remedy}".strip() or f"It is {summary.state}."
    return {"kind": kind.__name__, "message": message, "code": code, "conversation_id": summary.conversation_id}


def raised(failure: dict[str, Any]) -> Exception:
    """Return the exception that a failure stands for."""
    name = str(failure["kind"])
    kind: type[Exception] = TIME_LIMITS.get(name) or FAILURES.get(name, AgentFailed)
    return kind(str(failure["message"]), str(failure["code"]), str(failure["conversation_id"]))
