"""One model call before its start.

Holds: a step uses only values that an earlier step has set. `make_question` sets `question` and `config`;
`find_own_endpoint` sets `endpoint`; `count_prompt` sets `counted_ratio`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from broker.runtime import Rest
from broker.secrets import OwnEndpoint, Secrets
from controller_worker.agents import Agent
from controller_worker.core import BATCH, Append, CallModel, State
from controller_worker.model.models import Models
from controller_worker.model.permits.call_permit import CallPermit
from controller_worker.model.permits.permits import Permits
from controller_worker.model.prompt_history import PromptHistory
from controller_worker.model.question import Question
from controller_worker.model.steps.call_task import CallTask, NotStarted, Started
from controller_worker.providers import LLMConfig


@dataclass(slots=True)
class PendingCall:
    """A call that the core requested.

    Attributes:
        is_watched: a client follows the reply while the model writes it.
        before_waiting: called before a step waits for something outside this conversation; idempotent.
        traceparent: the call's parent span.
        secrets: the secrets of conversations; None without any.
        config: the settings of the model; None if unknown.
        endpoint: the conversation's own endpoint, to which the call goes; None if it has none.
        counted_ratio: exact prompt size divided by the estimate, if the prompt was counted.
    """

    wanted: CallModel
    state: State
    agent: Agent
    recollection: PromptHistory
    models: Models
    permits: Permits
    permit: CallPermit
    task: CallTask
    is_watched: bool
    before_waiting: Callable[[], Awaitable[None]]
    make: Callable[[PendingCall], Started]
    secrets: Secrets | None = None
    traceparent: str | None = None
    question: Question = field(init=False)
    config: LLMConfig | None = field(init=False)
    endpoint: OwnEndpoint | None = None
    counted_ratio: float | None = None

    @property
    def is_paid(self) -> bool:
        """Whether the reply comes from a batch, which was paid for when it was sent."""
        return self.state.calls.deferral is not None and self.state.calls.deferral.reason == BATCH


StartOutcome = Append | NotStarted | Started
RestOfStart = Rest[PendingCall, StartOutcome]
