"""The specification of a conversation: its agent, model, workspace and limits.

Holds: the values are frozen; any process may keep, compare and send them. Invalid values are rejected on construction.
Does not: contain addresses or keys; those belong to the workers.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from broker.contract.allowed_hosts import parse_host_rules
from broker.contract.condenser_specs import DEFAULT_CONDENSER, AnyCondenserSpec
from broker.contract.llm_spec import EventValue as EventValue  # noqa: PLC0414
from broker.contract.llm_spec import LLMSpec as LLMSpec  # noqa: PLC0414  (an agent's specification holds one)
from broker.contract.policies import ConfirmationPolicy, LoopPolicy
from broker.contract.tool_specs import MAX_SCHEMA_CHARS, OBJECT_SCHEMA, ToolOffer
from broker.contract.workspace_sources import WorkspaceSource

NAME_PATTERN = r"^[A-Za-z0-9_.-]{0,64}$"
"""The pattern of names of tenants, experiments, users and projects."""
SANDBOX_PATTERN = r"^[a-z][a-z0-9-]{0,31}$"
"""The pattern of names of sandboxes."""
LABEL_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
"""The pattern of an operator's label of a node."""
MAX_LABELS = 16
MAX_NEED = 2**53

ACP_AGENT, ACP_PREFIX = "AcpAgent", "acp:"
"""The agent that is a program in the sandbox, and the prefix that names it together with its command."""

PriorityName = Literal["interactive", "normal", "batch"]
"""The priority for scarce resources."""


class Skill(EventValue):
    """Instructions for an agent. See `broker.contract.skills` for skills as files.

    Attributes:
        triggers: the agent reads the skill once a message contains one of these words. If empty, and there is neither a
            location nor a path, always, from the start.
        location: the file of the workspace that holds the skill (`SKILL.md`). The prompt lists its name and
            description, and the agent reads the file when it needs it.
        description: the purpose of a skill with a location. None: the prompt does not list it.
        paths: patterns of files. The agent reads the skill once its tools read or change a matching file.
    """

    name: str = Field(min_length=1)
    content: str
    triggers: tuple[str, ...] = ()
    location: str | None = None
    description: str | None = None
    paths: tuple[str, ...] | None = None


class CriticSpec(EventValue):
    """A model that accepts or refuses a finish.

    Attributes:
        llm: the model; None for the conversation's own.
        instructions: criteria in addition to the task.
    """

    llm: LLMSpec | None = None
    instructions: str = Field(default="", max_length=MAX_SCHEMA_CHARS)


class GoalSpec(EventValue):
    """The conditions for an agent's finish: the check must accept it, then the critic.

    Attributes:
        check: a command in the workspace. Exit code 0 accepts the finish, any other refuses it.
        critic: the critic that is asked after the check has accepted.
        max_refusals: how often a finish may be refused. The next failure ends the conversation in an error.
        timeout_seconds: the time limit of the check.
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


class OutputSpec(EventValue):
    """The structured output that an agent returns when it finishes, in addition to its message.

    Attributes:
        json_schema: the schema of the output object; see `broker.tools.output_schema` for the supported subset.
        max_corrections: how often the output may violate the schema. The next violation is an error.
    """

    json_schema: dict[str, Any] = Field(json_schema_extra=OBJECT_SCHEMA)
    max_corrections: int = Field(default=3, ge=0)

    @field_validator("json_schema")
    @classmethod
    def _check_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
            raise ValueError(f"the schema has more than {MAX_SCHEMA_CHARS} characters")
        if schema.get("type") != "object":
            raise ValueError("the schema of the output must be of the type object")
        return schema


class PlanSpec(EventValue):
    """The execution of a planning agent's plan.

    Attributes:
        executor: the agent that executes the plan.
        llm: that agent's model; None for the same model.
        needs_approval: whether a user must approve the plan first.
    """

    executor: str = "CodeActAgent"
    llm: LLMSpec | None = None
    needs_approval: bool = True


class MemorySpec(EventValue):
    """The notebook that an agent writes to and recalls from, within its tenant; see `broker.contract.notes`.

    Attributes:
        user: the user that the notes belong to; empty to share them among all users.
        project: the project that the notes belong to; empty for none.
    """

    user: str = Field(default="", pattern=NAME_PATTERN)
    project: str = Field(default="", pattern=NAME_PATTERN)


class SdkSpec(EventValue):
    """Options of an SDK agent: an agent whose loop is the Claude Agent SDK.

    Attributes:
        fallback_to_legacy: if the SDK cannot run, its legacy agent continues the conversation; otherwise the
            conversation ends in an error, and a user may resume it.
        timeout_seconds: how long the SDK's program may take to send a request or to exit once all its requests are
            answered.
    """

    fallback_to_legacy: bool = True
    timeout_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)


class AcpSpec(EventValue):
    """The program of an `AcpAgent`. It speaks the Agent Client Protocol on its standard streams.

    Attributes:
        command: a command line for bash, run in the sandbox of the workspace. Secrets that it names are in its
            environment.
        timeout_seconds: how long the program may be silent while it works.
    """

    command: str = Field(max_length=4096, pattern=r"^ *[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$")
    timeout_seconds: float = Field(default=900.0, gt=0, le=86_400, allow_inf_nan=False)


class AgentSpec(EventValue):
    """An agent: its registered name, its model and its options.

    Attributes:
        name: an agent that the controller workers have registered; `acp:COMMAND` means `AcpAgent` with that command.
        enable_cmd: offer the model `execute_bash`.
        enable_editor: offer the model `str_replace_editor`.
        enable_think: offer the model `think`.
        enable_finish: offer the model `finish`.
        enable_plan_mode: offer the model `task_tracker`.
        enable_jupyter: offer the model `execute_ipython_cell`; the tool workers must serve the pool `ipython`.
        enable_stuck_detection: detect loops.
        loop_policy: the responses to a loop.
        confirmation: the actions that a user must confirm.
        tool_concurrency: how many tool calls of one reply may run at once.
        system_prompt_suffix: text appended to the system prompt.
        condenser: how a long history is condensed for the model.
        enable_history_truncation: if a prompt does not fit the model, condense and continue; otherwise fail.
        enable_condensation_request: offer the model a tool that requests a condensation.
        skills: skills in addition to those of the workspace.
        enable_workspace_skills: read AGENTS.md and similar files from an existing workspace.
        enable_prompt_extensions: show the model the results of recalls.
        disabled_microagents: names of skills that the model does not read.
        goal: the conditions for a finish; None: the agent decides.
        output: the structured output that it returns when it finishes; None for a message only.
        plan: options of a planning agent; None for the defaults of `PlanSpec`.
        memory: the notebook for later conversations; None for none.
        enable_patch: offer the model `apply_patch`, which some models were trained on.
        enable_search: offer the model `grep` and `glob`.
        enable_browsing: offer the model a browser; the tool workers must serve the pool `browser`.
        enable_som_visual_browsing: show screenshots with a mark at each element to models that accept images.
        enable_browsing_delegate: offer the model a tool that delegates tasks to BrowsingAgent; same pool.
        enable_delegation: offer the model a tool that delegates tasks to other agents.
        enable_delegate_control: offer the model a tool that lists, messages, awaits, pauses, resumes and stops the
            delegates that work in the background.
        delegates: specifications of those agents by name; an unlisted name means this specification under that name.
        tools: additional tools, as offered when the conversation was created.
        sdk: options of an SDK agent; None for the defaults of `SdkSpec`.
        acp: the program of an `AcpAgent`; required for it.
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
    enable_delegate_control: bool = False
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
        acp = dict(given) if isinstance(given, dict | EventValue) else {}
        return {**fields, "name": ACP_AGENT, "acp": {**acp, "command": name.removeprefix(ACP_PREFIX).strip()}}

    @model_validator(mode="after")
    def _has_command(self) -> AgentSpec:
        if self.name == ACP_AGENT and self.acp is None:
            raise ValueError(f"{ACP_AGENT} needs a command: name it {ACP_PREFIX}COMMAND")
        return self


AGENTS_WITHOUT_MODEL = frozenset({"ChaosAgent", "CheckAgent", "DummyAgent", ACP_AGENT})
"""Agents that decide without a model."""


def asks_model(agent: str) -> bool:
    """Return whether an agent calls a model of ours. The name is in the form used in tasks."""
    return agent not in AGENTS_WITHOUT_MODEL and not agent.startswith(ACP_PREFIX)


class WorkspaceNeeds(EventValue):
    """Requirements of a workspace on its node. None means no requirement.

    Attributes:
        labels: labels that the node's operator has set, such as `gpu`; see DECKHANDS_LABELS.
        memory_bytes: memory available to all its programs together.
        disk_bytes: disk space available to it.
        cpus: CPU cores available to it.
    """

    labels: tuple[Annotated[str, Field(pattern=LABEL_PATTERN)], ...] = Field(default=(), max_length=MAX_LABELS)
    memory_bytes: int | None = Field(default=None, ge=1, le=MAX_NEED)
    disk_bytes: int | None = Field(default=None, ge=1, le=MAX_NEED)
    cpus: float | None = Field(default=None, gt=0, le=MAX_NEED)


IMAGE_SANDBOXES = ("docker", "kubernetes")
"""The sandboxes whose workspaces may name an image."""


class WorkspaceSpec(EventValue):
    """The workspace of a conversation's tools.

    Attributes:
        path: an existing directory on the tool worker's node; None creates an empty one.
        sandbox: `auto` (as the node requires), `bwrap`, `docker`, `kubernetes`, `none`, or one of an installed package.
        image: the container image for the sandboxes `docker` and `kubernetes`; empty for the node's first.
        network: whether commands may reach the network.
        allow: hosts that commands may reach through a proxy without network access; see `allowed_hosts`.
        pool: the action stream of the tool workers that may take the conversation.
        source: the initial content; None for none.
        needs: requirements on the node besides the sandbox and the image; None for none.
    """

    path: str | None = None
    sandbox: Annotated[str, Field(pattern=SANDBOX_PATTERN, examples=["bwrap"])] = "auto"
    image: str = ""
    network: bool = False
    allow: tuple[str, ...] = ()
    pool: str = "bash"
    source: WorkspaceSource | None = None
    needs: WorkspaceNeeds | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path is not None and self.source is not None:
            raise ValueError("give either path or source: an existing directory is not filled from a source")
        return self

    @field_validator("allow")
    @classmethod
    def _are_hosts(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        parse_host_rules(allow)
        return allow

    @model_validator(mode="after")
    def _is_given_one_way(self) -> Self:
        if self.network and self.allow:
            raise ValueError("give either network or allow: with full network access, allow has no effect")
        if self.image and self.sandbox not in IMAGE_SANDBOXES:
            raise ValueError(f"an image requires the sandbox {' or '.join(IMAGE_SANDBOXES)}")
        return self


class Priority(StrEnum):
    """Priorities for scarce resources: ready conversations, steps, actions, model calls. The highest comes first."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """The number that the store's functions use; 0 is the highest priority."""
        return tuple(Priority).index(self)


class Tenancy(EventValue):
    """The tenant and priority of a conversation: the budget that pays for it, and its turn for scarce resources.

    Attributes:
        tenant: empty for none.
        experiment: a part of the tenant's work with its own budget; empty for none.
        priority: None: interactive if a user is present, else batch.
    """

    tenant: str = Field(default="", pattern=NAME_PATTERN)
    experiment: str = Field(default="", pattern=NAME_PATTERN)
    priority: PriorityName | None = None


def priority_of(tenancy: Tenancy | None, *, is_headless: bool) -> Priority:
    """Return a conversation's priority: the requested one, else interactive or batch by whether a user is present."""
    if tenancy is not None and tenancy.priority is not None:
        return Priority(tenancy.priority)
    return Priority.BATCH if is_headless else Priority.INTERACTIVE


class Limits(EventValue):
    """The limits of a conversation. None means no limit.

    Attributes:
        max_tokens: prompt and completion tokens of all model calls.
        max_seconds: working time since its start or since a user continued it.
        max_delegate_level: the deepest level of nested delegates; 0 for none at all.
    """

    max_iterations: int = Field(default=500, ge=1)
    max_budget_usd: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1)
    max_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_delegate_level: int = Field(default=3, ge=0)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_flag(cls, value: object) -> object:
        if isinstance(value, bool):  # Python counts booleans as integers
            raise ValueError(f"{str(value).lower()} is not a number")  # noqa: TRY004  (Pydantic reports it)
        return value
