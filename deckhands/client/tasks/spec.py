"""`TaskSpec`: the description of a task, shared by every way to submit one.

The command line, Python, HTTP, Celery tasks, the inbox, files of tasks, schedules and evaluations all build one, from
options, keywords or JSON. A new field is available through all of them; docs/adding-things.md shows how to add one.

Holds: an unknown field is refused by its name; a task never names a file of the machine that reads it.
Does not: start anything; `Client.submit` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Annotated, Any, Self, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from broker.contract import (
    MAX_SKILL_SOURCES,
    MAX_SOURCE_CHARS,
    NAME_PATTERN,
    SERVER_NAME_PATTERN,
    SKILL_SOURCE_PATTERN,
    AgentSpec,
    DoubleTexting,
    Labels,
    Limits,
    McpAddress,
    Moment,
    PriorityName,
    Seconds,
    Tenancy,
    Timing,
    WorkspaceSpec,
    parse_git_source,
    parse_skill_source,
)
from broker.runtime import Acks, UsageError
from broker.secrets import SecretValue
from broker.tools import check_output_schema
from deckhands.client.tasks.tasks import (
    MAX_IMAGES,
    MAX_TASK_CHARS,
    Directory,
    Image,
    ImageUrl,
    to_image_urls,
    to_output_spec,
)

MAX_KEY_CHARS = 256
MAX_TOOLS = 128
MAX_SERVERS = 16
MAX_SECRETS = 64
MAX_TITLE = 200
SHOWN_ERRORS = 5
WORKSPACE_TEXT = Field(min_length=1, max_length=4_096, json_schema_extra={"pattern": r"^(/|git\+(https?|file)://)"})
"""A directory or a repository; the validator reports errors in detail."""
UNNAMED_TASK = "-"
"""Stands for a task until the first message names it."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TaskSpec(BaseModel):
    """One task and everything that describes its conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = Field(
        min_length=1,
        max_length=MAX_TASK_CHARS,
        description="The task for the agent.",
        examples=["List the files"],
        json_schema_extra={"pattern": r"\S"},
    )
    agent: AgentSpec | Annotated[str, Field(min_length=1, max_length=100)] = Field(
        default="CodeActAgent",
        description="The registered name of the agent, or its whole specification. It reads AGENTS.md, skills and "
        "set-up scripts of the workspace unless its specification has enable_workspace_skills: false.",
    )
    model: Annotated[str, Field(min_length=1, max_length=300)] | None = Field(
        default=None,
        description="The model that the agent uses; by default that of its specification, or LLM_MODEL of the "
        "controller workers.",
    )
    workspace: WorkspaceSpec | Annotated[str, WORKSPACE_TEXT] | None = Field(
        default=None,
        description="A directory below a workspace root of the tool workers, git+https://…#REF, or a specification; by "
        "default an empty directory.",
    )
    limits: Limits = Field(default=Limits(), description="Limits of the conversation, such as iterations and cost.")
    tools: Annotated[tuple[str, ...], Field(max_length=MAX_TOOLS)] = Field(
        default=(), description="Tools that tool workers offer: keys, or patterns such as github/*."
    )
    mcp_servers: Annotated[
        dict[Annotated[str, Field(pattern=SERVER_NAME_PATTERN)], McpAddress], Field(max_length=MAX_SERVERS)
    ] = Field(
        default_factory=dict,
        description="MCP servers whose tools the agent gets, by their names: {} for one of the operator, or the url of "
        "another one, which the operator has to allow.",
    )
    skills: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_SOURCE_CHARS, pattern=SKILL_SOURCE_PATTERN)], ...],
        Field(max_length=MAX_SKILL_SOURCES),
    ] = Field(
        default=(),
        description="Skills for the workspace, where the operator allows it: git+https://HOST/PATH#COMMIT, "
        "https://HOST/PATH.tar.gz#sha256=DIGEST, or a folder of the tool workers.",
    )
    output: dict[str, Any] | None = Field(
        default=None, description="A JSON Schema for the output that the agent must return when it finishes."
    )
    images: Annotated[tuple[ImageUrl, ...], Field(max_length=MAX_IMAGES)] = Field(
        default=(), description="Pictures that belong to the task: addresses, or data URLs."
    )
    secrets: Annotated[dict[str, SecretValue], Field(max_length=MAX_SECRETS, repr=False)] = Field(
        default_factory=dict,
        description="Secrets by name: commands may use them, and they are never shown. Each is its value, or the "
        "operator's source where tool workers look it up.",
    )
    headless: bool = Field(default=True, description="Whether no user can be asked.")
    tenant: str = Field(
        default="",
        pattern=NAME_PATTERN,
        description="The tenant whose budget pays; tenants share scarce resources by weight.",
    )
    experiment: str = Field(
        default="", pattern=NAME_PATTERN, description="A part of the tenant's work with its own budget."
    )
    priority: PriorityName | None = Field(
        default=None,
        description="The precedence for scarce resources; by default interactive if a user can be asked, else batch.",
    )
    title: str = Field(
        default="", max_length=MAX_TITLE, description="A name for listings; by default the first line of the task."
    )
    labels: Labels = Field(default_factory=dict, description="Labels for finding the conversation again.")
    not_before: Moment | None = Field(
        default=None, description="Start no earlier than this time, with its zone: 2026-03-01T06:00:00+01:00."
    )
    delay: Seconds | None = Field(
        default=None,
        description="Start this many seconds after submission or later; with not_before, the later of both counts.",
    )
    expires: Annotated[Seconds | Moment, Field(union_mode="left_to_right")] | None = Field(
        default=None,
        description="Give up if it has not started by this time, or this many seconds after submission: it ends in an "
        "error with the code expired.",
    )
    double_texting: DoubleTexting | None = Field(
        default=None,
        description="How a message is handled while the agent works; by default it waits for the next step.",
    )
    acks: Acks | None = Field(
        default=None,
        description="When an event of it counts as written: local, disk or replica; the store's own demand, "
        "DECKHANDS_ACKS, always holds too.",
    )
    pinned_version: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+!-]{1,64}$")] | None = Field(
        default=None,
        description="Only controller workers of this version of Deckhands continue it; current stands for the "
        "version that starts it.",
    )
    rollout: bool = Field(
        default=False, description="Record the exact tokens of its replies, for training; needs a server that has them."
    )
    traceparent: Annotated[str, Field(max_length=55)] | None = Field(
        default=None, description="The span that the task belongs to, in the format of W3C Trace Context."
    )
    idempotency_key: Annotated[str, Field(min_length=1, max_length=MAX_KEY_CHARS)] | None = Field(
        default=None, description="The same key always means the same conversation, whatever else is sent."
    )

    @field_validator("task")
    @classmethod
    def _check_task(cls, task: str) -> str:
        if not task.strip():
            raise ValueError("it is empty")
        return task

    @field_validator("agent")
    @classmethod
    def _check_agent(cls, agent: AgentSpec | str) -> AgentSpec | str:
        if isinstance(agent, str):
            AgentSpec(name=agent)
            return agent
        return _with_workspace_skills(agent)

    @field_validator("images")
    @classmethod
    def _check_images(cls, images: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return to_image_urls(images) or ()
        except UsageError as error:
            raise UsageError(f"images: {error.message}", remedy=error.remedy) from None

    @field_validator("skills")
    @classmethod
    def _check_skills(cls, skills: tuple[str, ...]) -> tuple[str, ...]:
        for source in skills:
            parse_skill_source(source)
        return skills

    @model_validator(mode="after")
    def _check_agent_reads_skills(self) -> Self:
        if self.skills and not self.agent_spec().enable_workspace_skills:
            raise ValueError("skills: the specification of the agent has enable_workspace_skills: false")
        return self

    @model_validator(mode="after")
    def _check_workspace(self) -> Self:
        try:
            source = parse_git_source(self.workspace) if isinstance(self.workspace, str) else None
        except UsageError as error:
            raise UsageError(f"workspace: {error.message}", remedy=error.remedy) from None
        if isinstance(self.workspace, str) and source is None and self.workspace[0] != "/":
            raise ValueError("workspace: write an absolute path of the tool workers' machine, or git+https://…#REF")
        return self

    @model_validator(mode="after")
    def _check_timing(self) -> Self:
        begins, ends = self.timing().earliest_start(EPOCH), self.timing().latest_start(EPOCH)
        is_comparable = self.delay is None or not isinstance(self.expires, datetime)
        is_comparable = is_comparable and (self.not_before is None or isinstance(self.expires, datetime))
        if begins is not None and ends is not None and is_comparable and ends <= begins:
            raise ValueError("expires: it would expire before it may start")
        return self

    @classmethod
    def parse(cls, fields: object) -> Self:
        """Parse a task from a JSON object.

        Raises:
            UsageError: the object is not a task; the text names each invalid field.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise UsageError(
                f"The request cannot be used: {_describe_errors(error)}.",
                remedy="See docs/producing-work.md for its fields.",
            ) from None
        except UsageError as error:  # an address of a repository, or a picture
            raise UsageError(f"The request cannot be used: {error}") from None

    def timing(self) -> Timing:
        """Return the times between which the conversation may start."""
        return Timing(self.not_before, self.delay, self.expires)

    def with_timing(self, timing: Timing) -> Self:
        """Return the task with other start times."""
        fields = {"not_before": timing.not_before, "delay": timing.delay_seconds, "expires": timing.expires}
        return self.model_copy(update=fields)

    def workspace_spec(self) -> WorkspaceSpec:
        """Return the workspace as a specification."""
        if self.workspace is None:
            return WorkspaceSpec()
        if isinstance(self.workspace, WorkspaceSpec):
            return self.workspace
        source = parse_git_source(self.workspace)
        return WorkspaceSpec(source=source) if source is not None else WorkspaceSpec(path=self.workspace)

    def tenancy(self) -> Tenancy | None:
        """Return the tenancy of the conversation; None if it has none."""
        if not (self.tenant or self.experiment or self.priority):
            return None
        return Tenancy(tenant=self.tenant, experiment=self.experiment, priority=self.priority)

    def agent_spec(self) -> AgentSpec:
        """Return the agent as a specification, with the model and the output that the task names.

        Raises:
            UsageError: the schema of its output cannot be used.
        """
        agent = _with_workspace_skills(AgentSpec(name=self.agent) if isinstance(self.agent, str) else self.agent)
        if self.model is not None:
            agent = agent.model_copy(update={"llm": agent.llm.model_copy(update={"model": self.model})})
        if self.output is not None:
            return agent.model_copy(update={"output": to_output_spec(self.output)})
        if agent.output is not None:
            check_output_schema(agent.output.json_schema)
        return agent


class TaskFields(TypedDict, total=False):
    """The Python keywords for the fields of a `TaskSpec`, except its task, agent, tools, output and key.

    None means the default. `workspace` may also be an archive or a bundle on this machine, `images` may be paths and
    bytes, and `tenancy` stands for the three fields of a `Tenancy`.
    """

    model: str | None
    workspace: Directory | None
    limits: Limits | None
    images: Sequence[Image]
    secrets: Mapping[str, SecretValue] | None
    mcp_servers: Mapping[str, McpAddress | Mapping[str, Any]] | None
    skills: Sequence[str]
    headless: bool
    tenancy: Tenancy | None
    tenant: str
    experiment: str
    priority: PriorityName | None
    title: str
    labels: Mapping[str, str] | None
    not_before: datetime | None
    delay: timedelta | float | None
    expires: datetime | timedelta | float | None
    double_texting: DoubleTexting | None
    acks: Acks | None
    pinned_version: str | None
    rollout: bool
    traceparent: str | None


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def with_shown_fields(function: FunctionT) -> FunctionT:
    """Let `help` show the fields of a task as keywords of a function that takes them as `**fields`."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind.__forward_arg__)
        for name, kind in TaskFields.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return function


def _with_workspace_skills(agent: AgentSpec) -> AgentSpec:
    """Return the agent with skills of the workspace enabled, unless its specification disables them.

    The event has the opposite default, because existing logs were written with it.
    """
    if "enable_workspace_skills" in agent.model_fields_set:
        return agent
    return agent.model_copy(update={"enable_workspace_skills": True})


def parse_timing(fields: Mapping[str, Any]) -> Timing:
    """Return the start times from the request's fields `delay`, `not_before` and `expires`.

    Raises:
        UsageError: a field is invalid; the text names each.
    """
    return TaskSpec.parse({"task": "-", **fields}).timing()


def _describe_error(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "it is missing"
    if error["type"] == "extra_forbidden":
        near = get_close_matches(str(error["loc"][-1]), TaskSpec.model_fields, n=1) if len(error["loc"]) == 1 else []
        return "there is no such field" + "".join(f"; did you mean {name}?" for name in near)
    return str(error["msg"]).removeprefix("Value error, ")


def _describe_errors(error: ValidationError) -> str:
    """Return the error of each field, without the values, which may be secret."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    found = [
        f"{'.'.join(map(str, each['loc'])) or 'the whole'}: {_describe_error(each)}" for each in errors[:SHOWN_ERRORS]
    ]
    more = [f"and {len(errors) - SHOWN_ERRORS} more"] if len(errors) > SHOWN_ERRORS else []
    text = "; ".join(found + more)
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)[:1_000]
