"""What a failed model call leads to: one table for all callers, whether or not a client listens (OpenHands 1.11).

The text that a person sees is the error's own `last_error` (`controller_worker.llm.errors`): OpenHands' status value
where it has one, else `<class>: <text>`.

Holds: every code of both backends is in the table, and every way ends: a failure that is not tried again, or no longer,
is an error.
Differs: what the original wraps into a RuntimeError before it is looked at (a provider that is unreachable) has its own
line; a rate limit that does not pass becomes an error; both whether somebody listens or not, because a conversation
that nobody watches must end too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.runtime.errors import DeckhandsError
from broker.specs.agent_state import AgentState

ERROR, RATE_LIMITED, RUNNING = AgentState.ERROR, AgentState.RATE_LIMITED, AgentState.RUNNING


@dataclass(frozen=True, slots=True)
class Failure:
    """What one class of failures leads to.

    Attributes:
        is_retried: whether the call is made again after a while.
        waiting: the state that shows meanwhile.
        ended: the state in which the last attempt ends.
    """

    is_retried: bool
    waiting: AgentState = RUNNING
    ended: AgentState = ERROR


CONTEXT_WINDOW = "context_window"
"""The code of a prompt that does not fit the model."""

FAILURES: Mapping[str, Failure] = {
    "authentication": Failure(is_retried=False),
    "rate_limit": Failure(is_retried=True, waiting=RATE_LIMITED),
    CONTEXT_WINDOW: Failure(is_retried=False),
    "content_policy": Failure(is_retried=False),
    "out_of_credits": Failure(is_retried=False),
    "service_unavailable": Failure(is_retried=True),
    "internal": Failure(is_retried=True),
    "timeout": Failure(is_retried=True),
    "bad_request": Failure(is_retried=False),
    "not_found": Failure(is_retried=False),
    "malformed_reply": Failure(is_retried=True),
    "no_response": Failure(is_retried=True),
    "llm_config": Failure(is_retried=False),
    "hook_veto": Failure(is_retried=False),
    "max_budget": Failure(is_retried=False),
    "unexpected": Failure(is_retried=False),
}
"""By the code of a `ModelCallFailed`."""


def failure_of(code: str) -> Failure:
    """Return what a failure leads to; a code from another version is tried again where its event says so."""
    return FAILURES.get(code) or Failure(is_retried=True)


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
