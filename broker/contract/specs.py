"""What a conversation is, as data: its agent, its model, its workspace, its limits.

Holds: frozen values that anybody may keep, compare and send; what cannot work is refused when it is written down.
Does not: hold an address or a key; those are the workers'.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from broker.contract.allowed_hosts import host_rules
from broker.contract.condenser_specs import DEFAULT_CONDENSER, AnyCondenserSpec
from broker.contract.llm_spec import LLMSpec as LLMSpec  # noqa: PLC0414  (an agent's specification holds one)
from broker.contract.llm_spec import Part as Part  # noqa: PLC0414
from broker.contract.policies import ConfirmationPolicy, LoopPolicy
from broker.contract.tool_specs import MAX_SCHEMA_CHARS, OF_OBJECTS, ToolOffer
from broker.contract.workspace_sources import WorkspaceSource

NAME_PATTERN = r"^[A-Za-z0-9_.-]{0,64}$"
"""Of tenants, experiments, users and projects."""
LABEL_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
"""Of what an operator says of a node."""
MAX_LABELS = 16
MAX_NEED = 2**53

ACP_AGENT, ACP_PREFIX = "AcpAgent", "acp:"
"""The agent that is a program in the sandbox, and how it is named together with its command."""

PriorityName = Literal["interactive", "normal", "batch"]
"""What goes first where something is scarce."""


class Skill(Part):
    """Instructions for an agent. See `broker.contract.skills` for skills as files.

    Attributes:
        triggers: the agent reads the skill once a message contains one of these words; empty: always, from the start.
    """

    name: str = Field(min_length=1)
    content: str
    triggers: tuple[str, ...] = ()


class CriticSpec(Part):
    """A model that decides whether a finish counts.

    Attributes:
        llm: None means the conversation's own model.
        instructions: what it is to look at, besides the task.
    """

    llm: LLMSpec | None = None
    instructions: str = Field(default="", max_length=MAX_SCHEMA_CHARS)


class GoalSpec(Part):
    """When an agent's finish counts: when the check accepts it, and then the critic.

    Attributes:
        check: a command in the workspace; exit code 0 accepts the finish, anything else refuses it.
        critic: who is asked when the check has accepted.
        max_refusals: how often a finish may be refused; the next one that fails ends the conversation in an error.
        timeout_seconds: how long the check may take.
    """

    check: str | None = Field(default=None, min_length=1)
    critic: CriticSpec | None = None
    max_refusals: int = Field(default=3, ge=0)
    timeout_seconds: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _has_a_judge(self) -> Self:
        if self.check is None and self.critic is None:
            raise ValueError("a goal needs a check or a critic")
        return self


class OutputSpec(Part):
    """The structured output that an agent returns when it finishes, besides its words.

    Attributes:
        json_schema: of the object; see `broker.tools.output_schema` for what it may be.
        max_corrections: how often its output may not fit the schema; the next time is an error.
    """

    json_schema: dict[str, Any] = Field(json_schema_extra=OF_OBJECTS)
    max_corrections: int = Field(default=3, ge=0)

    @field_validator("json_schema")
    @classmethod
    def _check_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
            raise ValueError(f"a schema may have {MAX_SCHEMA_CHARS} characters")
        if schema.get("type") != "object":
            raise ValueError("the schema of the output must be of the type object")
        return schema


class PlanSpec(Part):
    """What happens to a planning agent's plan.

    Attributes:
        executor: the agent that carries it out.
        llm: that agent's model; None: the same.
        needs_approval: whether a person has to confirm the plan first.
    """

    executor: str = "CodeActAgent"
    llm: LLMSpec | None = None
    needs_approval: bool = True


class MemorySpec(Part):
    """Which notebook an agent writes to and recalls from, at its tenant; see `broker.contract.notes`.

    Attributes:
        user: whose; empty for everybody.
        project: of which work; empty for none in particular.
    """

    user: str = Field(default="", pattern=NAME_PATTERN)
    project: str = Field(default="", pattern=NAME_PATTERN)


class SdkSpec(Part):
    """How an SDK agent runs: one whose loop is the Claude Agent SDK.

    Attributes:
        fallback_to_legacy: where the SDK cannot run, the legacy agent behind it continues the conversation; otherwise
            the conversation ends in an error that a person may resume.
        timeout_seconds: how long the SDK's program may take to ask or to end once it has all that it waits for.
    """

    fallback_to_legacy: bool = True
    timeout_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)


class AcpSpec(Part):
    """Which program an `AcpAgent` is: one that speaks the Agent Client Protocol on its standard streams.

    Attributes:
        command: a command line for bash, run in the sandbox of the workspace; secrets that it names are in its
            environment.
        timeout_seconds: how long the program may be silent while it works.
    """

    command: str = Field(max_length=4096, pattern=r"^ *[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$")
    timeout_seconds: float = Field(default=900.0, gt=0, le=86_400, allow_inf_nan=False)


class AgentSpec(Part):
    """An agent as data: its registered name, its model and its options.

    Attributes:
        name: of an agent that the controller workers know; `acp:COMMAND` stands for `AcpAgent` with that command.
        enable_cmd: offer the model `execute_bash`.
        enable_editor: offer the model `str_replace_editor`.
        enable_think: offer the model `think`.
        enable_finish: offer the model `finish`.
        enable_plan_mode: offer the model `task_tracker`.
        enable_jupyter: offer the model `execute_ipython_cell`; the tool workers have to serve the pool `ipython`.
        enable_stuck_detection: look for loops.
        loop_policy: what is done about a loop.
        confirmation: which actions a person has to confirm.
        tool_concurrency: how many calls of one reply may run at once.
        system_prompt_suffix: text behind the system prompt.
        condenser: how a long history is shortened for the model.
        enable_history_truncation: when a prompt does not fit the model, condense and continue; otherwise fail.
        enable_condensation_request: offer the model a tool that asks for a condensation.
        skills: the skills that it has in addition to those of its workspace.
        enable_workspace_skills: read AGENTS.md and similar files from a workspace that existed before.
        enable_prompt_extensions: show the model what recalls find.
        disabled_microagents: names of skills that the model does not read.
        goal: what decides whether a finish counts; None: the agent.
        output: the structured output that it returns when it finishes; None: words only.
        plan: of a planning agent; None: as `PlanSpec` has it.
        memory: where it keeps notes for later conversations; None: it keeps none.
        enable_patch: offer the model `apply_patch`, which some models were trained on.
        enable_search: offer the model `grep` and `glob`.
        enable_browsing: offer the model a browser; the tool workers have to serve the pool `browser`.
        enable_som_visual_browsing: show pages to models that see, with a mark at each element.
        enable_browsing_delegate: offer the model a tool that hands tasks to BrowsingAgent; same pool.
        enable_delegation: offer the model a tool that hands tasks to other agents.
        delegates: what those agents are, by name; an agent that is not named here is this one under that name.
        tools: what it may use besides its own tools, as it was offered when the conversation began.
        sdk: of an SDK agent; None: as `SdkSpec` has it.
        acp: of an `AcpAgent`, which needs it.
    """

    name: str = "CodeActAgent"
    llm: LLMSpec = LLMSpec()
    enable_cmd: bool = True
    enable_editor: bool = True
    enable_search: bool = True
    enable_patch: bool = False
    enable_think: bool = True
    enable_finish: bool = True
    enable_plan_mode: bool = True
    enable_jupyter: bool = False
    enable_browsing: bool = False
    enable_som_visual_browsing: bool = True
    enable_stuck_detection: bool = True
    loop_policy: LoopPolicy = LoopPolicy()
    confirmation: ConfirmationPolicy = ConfirmationPolicy()
    enable_condensation_request: bool = False
    enable_history_truncation: bool = True
    condenser: AnyCondenserSpec = DEFAULT_CONDENSER
    skills: tuple[Skill, ...] = ()
    enable_workspace_skills: bool = False
    enable_prompt_extensions: bool = True
    disabled_microagents: tuple[str, ...] = ()
    goal: GoalSpec | None = None
    plan: PlanSpec | None = None
    output: OutputSpec | None = None
    memory: MemorySpec | None = None
    enable_browsing_delegate: bool = False
    enable_delegation: bool = False
    delegates: dict[str, AgentSpec] = Field(default_factory=dict)
    tool_concurrency: int = Field(default=1, ge=1, le=16)
    tools: tuple[ToolOffer, ...] = ()
    sdk: SdkSpec | None = None
    acp: AcpSpec | None = None
    system_prompt_suffix: str = ""

    @model_validator(mode="before")
    @classmethod
    def _name_command(cls, fields: Any) -> Any:
        name = fields.get("name") if isinstance(fields, dict) else None
        if not isinstance(name, str) or not name.startswith(ACP_PREFIX):
            return fields
        given = fields.get("acp") or {}
        acp = dict(given) if isinstance(given, dict | Part) else {}
        return {**fields, "name": ACP_AGENT, "acp": {**acp, "command": name.removeprefix(ACP_PREFIX).strip()}}

    @model_validator(mode="after")
    def _has_command(self) -> AgentSpec:
        if self.name == ACP_AGENT and self.acp is None:
            raise ValueError(f"{ACP_AGENT} needs a command: name it {ACP_PREFIX}COMMAND")
        return self


AGENTS_WITHOUT_MODEL = frozenset({"CheckAgent", "DummyAgent", ACP_AGENT})
"""Who decides without asking one."""


def asks_model(agent: str) -> bool:
    """Say whether an agent, as it is named where a task is given, needs a model of ours."""
    return agent not in AGENTS_WITHOUT_MODEL and not agent.startswith(ACP_PREFIX)


class WorkspaceNeeds(Part):
    """What a node has to offer to a workspace. None means no need.

    Attributes:
        labels: what the operator of the node says of it, such as `gpu`; see DECKHANDS_LABELS.
        memory_bytes: that its programs together may use.
        disk_bytes: that it may hold.
        cpus: that it may keep busy.
    """

    labels: tuple[Annotated[str, Field(pattern=LABEL_PATTERN)], ...] = Field(default=(), max_length=MAX_LABELS)
    memory_bytes: int | None = Field(default=None, ge=1, le=MAX_NEED)
    disk_bytes: int | None = Field(default=None, ge=1, le=MAX_NEED)
    cpus: float | None = Field(default=None, gt=0, le=MAX_NEED)


class WorkspaceSpec(Part):
    """Where a conversation's tools work.

    Attributes:
        path: an existing directory on the tool worker's node; None makes an empty one.
        sandbox: `auto` (what the node demands), `bwrap`, `docker` or `none`.
        image: of the container, for the sandbox `docker`; the node's first if empty.
        network: whether commands may reach the network.
        allow: the hosts that they may reach although they have no network, by a proxy; see `allowed_hosts`.
        pool: the action stream of the tool workers that may take the conversation.
        source: what is put into it before anything else happens; None: nothing.
        needs: what the node has to offer besides the sandbox and the image; None: nothing.
    """

    path: str | None = None
    sandbox: Literal["auto", "bwrap", "docker", "none"] = "auto"
    image: str = ""
    network: bool = False
    allow: tuple[str, ...] = ()
    pool: str = "bash"
    source: WorkspaceSource | None = None
    needs: WorkspaceNeeds | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path is not None and self.source is not None:
            raise ValueError("a directory that exists is used as it is, not filled from a source")
        return self

    @field_validator("allow")
    @classmethod
    def _are_hosts(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        host_rules(allow)
        return allow

    @model_validator(mode="after")
    def _is_given_one_way(self) -> Self:
        if self.network and self.allow:
            raise ValueError("with the whole network there is nothing to allow: give either")
        if self.image and self.sandbox != "docker":
            raise ValueError("an image is for the sandbox docker")
        return self


class Tenancy(Part):
    """Who a conversation is for: whose budget pays for it, and who goes first where something is scarce.

    Attributes:
        tenant: empty for nobody in particular.
        experiment: one piece of the tenant's work, with its own budget; empty for none.
        priority: None: interactive if a person is there, else batch.
    """

    tenant: str = Field(default="", pattern=NAME_PATTERN)
    experiment: str = Field(default="", pattern=NAME_PATTERN)
    priority: PriorityName | None = None


class Limits(Part):
    """What a conversation may use up. None means no limit.

    Attributes:
        max_tokens: of all model calls, in and out.
        max_seconds: how long it may work, counted from its start or from when a person continued it.
        max_delegate_level: how deep delegates of delegates may go; 0: none at all.
    """

    max_iterations: int = Field(default=500, ge=1)
    max_budget_usd: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1)
    max_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_delegate_level: int = Field(default=3, ge=0)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_flag(cls, value: object) -> object:
        if isinstance(value, bool):  # Python counts with them
            raise ValueError(f"{str(value).lower()} is not a number")  # noqa: TRY004  (Pydantic reports it)
        return value
