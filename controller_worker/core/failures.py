"""What a failed model call leads to, whether or not a client listens (OpenHands 1.11).

The text that a person sees is the error's own `last_error` (`controller_worker.providers.errors`): OpenHands' status
value where it has one, else `<class>: <text>`.

Holds: a failure is tried again where its event says when, whatever its code; else the work ends in an error.
Differs: the original wraps some errors (an unreachable provider) in a RuntimeError before it looks at them, and ends a
rate limit that does not pass in its own state. Here each has its own code, and a rate limit becomes an error as well,
whether or not anybody listens, because a conversation that nobody watches must end too.
"""

from __future__ import annotations

from broker.contract import AgentState
from broker.runtime import DeckhandsError

CONTEXT_WINDOW = "context_window"
"""The code of a prompt that does not fit the model."""
RATE_LIMIT = "rate_limit"
"""The code of a call that the provider refused for now; the only one whose wait shows as a separate state."""


def state_while_waiting(code: str) -> AgentState:
    """Return the state that shows while a failed call waits for its next attempt."""
    return AgentState.RATE_LIMITED if code == RATE_LIMIT else AgentState.RUNNING


def code_of(error: Exception) -> str:
    """Return the class of an error; `unexpected` for one that was not foreseen."""
    return error.code if isinstance(error, DeckhandsError) else "unexpected"


def last_error_of(error: Exception) -> str:
    """Return an error as OpenHands shows it; only its name if it was not foreseen (1.11)."""
    if isinstance(error, DeckhandsError):
        return f"{type(error).__name__}: {error}"
    return (
        f"RuntimeError: There was an unexpected error while running the agent: {type(error).__name__}. "
        "You can ask the agent to try again."
    )
