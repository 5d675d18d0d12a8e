"""The effects of a failed model call, with or without a watching client (OpenHands 1.11).

A user sees the error's own `last_error` (`controller_worker.providers.errors`): OpenHands' status value if there is
one, else `<class>: <text>`.

Holds: a failure is retried at the time in its event, whatever its code; without a time, the work ends in an error.
Differs: the original wraps some errors (an unreachable provider) in a RuntimeError before it classifies them, and ends
a lasting rate limit in a separate state. Here each error has its own code, and a lasting rate limit becomes an error
with or without listeners, because an unwatched conversation must end too.
"""

from __future__ import annotations

from broker.contract import AgentState
from broker.runtime import DeckhandsError

CONTEXT_WINDOW = "context_window"
"""The code of a prompt that does not fit the model."""
RATE_LIMIT = "rate_limit"
"""The code of a rate limited call, the only failure with its own state while it waits."""


def find_waiting_state(code: str) -> AgentState:
    """Return the state shown while a failed call waits for its next attempt."""
    return AgentState.RATE_LIMITED if code == RATE_LIMIT else AgentState.RUNNING


def find_error_code(error: Exception) -> str:
    """Return the class of an error; `unexpected` if it was not foreseen."""
    return error.code if isinstance(error, DeckhandsError) else "unexpected"


def render_last_error(error: Exception) -> str:
    """Return an error in OpenHands' form; only its name if it was not foreseen (1.11)."""
    if isinstance(error, DeckhandsError):
        return f"{type(error).__name__}: {error}"
    return (
        f"RuntimeError: There was an unexpected error while running the agent: {type(error).__name__}. "
        "You can ask the agent to try again."
    )
