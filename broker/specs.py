"""What a conversation is, as data: its agent, its model, its workspace, its limits.

Holds: frozen values that anybody may keep, compare and send; what cannot work is refused when it is written down.
Does not: hold an address or a key; those are the workers'.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from broker.loop_policy import LoopPolicy
from broker.tool_specs import ToolOffer


class Part(BaseModel):
    """A value inside an event."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class LLMSpec(Part):
    """Which model a conversation uses. Address and key are the controller's, never the conversation's."""

    model: str | None = None
    temperature: float | None = None
    max_output_tokens: int | None = None


class GoalSpec(Part):
    """When an agent's finish counts.

    Attributes:
        check: a command in the workspace; exit code 0 accepts the finish, anything else refuses it.
        max_refusals: how often a finish may be refused; the next one that fails ends the conversation in an error.
        timeout_seconds: how long the check may take.
    """

    check: str = Field(min_length=1)
    max_refusals: int = Field(default=3, ge=0)
    timeout_seconds: float = Field(default=600.0, gt=0)


class AgentSpec(Part):
    """An agent as data: its registered name, its model and its options.

    Attributes:
        tools: what it may use besides its own tools, as it was offered when the conversation began.
    """

    name: str = "CodeActAgent"
    llm: LLMSpec = LLMSpec()
    enable_cmd: bool = True
    enable_editor: bool = True
    enable_think: bool = True
    enable_finish: bool = True
    enable_plan_mode: bool = True
    enable_stuck_detection: bool = True
    loop_policy: LoopPolicy = LoopPolicy()
    goal: GoalSpec | None = None
    tool_concurrency: int = Field(default=1, ge=1, le=16)
    tools: tuple[ToolOffer, ...] = ()
    system_prompt_suffix: str = ""


class WorkspaceSpec(Part):
    """Where a conversation's tools work.

    Attributes:
        path: an existing directory on the tool worker's node; None makes an empty one.
        sandbox: `auto` (the strongest that works on the node), `bwrap` or `none`.
        network: whether commands may reach the network.
        pool: the action stream of the tool workers that may take the conversation.
    """

    path: str | None = None
    sandbox: Literal["auto", "bwrap", "none"] = "auto"
    network: bool = False
    pool: str = "bash"


class Tenancy(Part):
    """Who a conversation is for: whose budget pays for it, and who goes first when a quota is short.

    Attributes:
        tenant: empty for nobody in particular.
        experiment: one piece of the tenant's work, with a budget of its own; empty for none.
        priority: None: interactive if a person is there, else batch.
    """

    tenant: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    experiment: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    priority: Literal["interactive", "batch"] | None = None


class Limits(Part):
    """What a conversation may use up. None means no limit.

    Attributes:
        max_tokens: of all model calls, in and out.
        max_seconds: how long it may work, from when it was begun or a person went on with it.
    """

    max_iterations: int = Field(default=500, ge=1)
    max_budget_usd: float | None = Field(default=None, gt=0)
    max_tokens: int | None = Field(default=None, ge=1)
    max_seconds: float | None = Field(default=None, gt=0)
