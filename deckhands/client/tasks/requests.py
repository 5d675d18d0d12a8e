"""A task as plain JSON: what producers send that do not call the Python client.

The queue, the inbox stream and task files all take this object. `Client.submit` takes the same things as Python values.

Holds: an unknown field is refused by its name; nothing in a request names a file of the machine that reads it.
Does not: begin anything; `Client.submit_request` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from broker.contract.events import AgentSpec, Limits, WorkspaceSpec
from broker.contract.labels import Labels
from broker.contract.specs import NAME_PATTERN, PriorityName, Tenancy
from broker.contract.timing import DoubleTexting, Moment, Seconds, Timing
from broker.contract.workspace_sources import git_source
from broker.runtime.errors import UsageError
from deckhands.client.tasks.tasks import MAX_TASK_CHARS

MAX_KEY_CHARS = 256
MAX_TOOLS = 128
MAX_SECRETS = 64
MAX_TITLE = 200
SHOWN_ERRORS = 5
PLACE = Field(min_length=1, max_length=4_096, json_schema_extra={"pattern": r"^(/|git\+(https?|file)://)"})
"""A directory or a repository; the validator says what is wrong with one."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TaskRequest(BaseModel):
    """One task and everything that describes its conversation.

    Attributes:
        task: what the agent should do.
        agent: its registered name, or its whole specification.
        model: the model it uses; null: the specification's, or LLM_MODEL of the controller workers.
        workspace: a directory below a workspace root of the tool workers, `git+https://…#REF`, or a specification; null
            makes an empty directory.
        limits: what it may use up.
        tools: tools that tool workers offer: keys, or patterns such as `github/*`.
        output: a JSON Schema for the output that the agent must return when it finishes.
        secrets: values by name, which commands may use and nobody may read.
        headless: true if nobody can be asked.
        tenant: whose budget pays.
        experiment: a part of the tenant's work with its own budget.
        priority: what goes first where something is scarce; null: interactive if a person can be asked, else batch.
        title: for listings; the first line of the task if empty.
        labels: for selection, see `broker.contract.labels`.
        not_before: the conversation begins at this time, with its zone: `2026-03-01T06:00:00+01:00`.
        delay: it begins so many seconds after it was submitted; with `not_before`, the later of both counts.
        expires: if it has not begun by this time, or so many seconds after it was submitted, it ends in an error of the
            code `expired`.
        double_texting: what a message does that comes while the agent works; null: `enqueue`.
        traceparent: the span that the task belongs to, as W3C Trace Context writes it; null: none.
        idempotency_key: the same key always means the same conversation, whatever else is sent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = Field(min_length=1, max_length=MAX_TASK_CHARS, examples=["List the files"])
    agent: AgentSpec | Annotated[str, Field(min_length=1, max_length=100)] = "CodeActAgent"
    model: Annotated[str, Field(min_length=1, max_length=300)] | None = None
    workspace: WorkspaceSpec | Annotated[str, PLACE] | None = None
    limits: Limits = Limits()
    tools: Annotated[tuple[str, ...], Field(max_length=MAX_TOOLS)] = ()
    output: dict[str, Any] | None = None
    secrets: Annotated[dict[str, str], Field(max_length=MAX_SECRETS, repr=False)] = Field(default_factory=dict)
    headless: bool = True
    tenant: str = Field(default="", pattern=NAME_PATTERN)
    experiment: str = Field(default="", pattern=NAME_PATTERN)
    priority: PriorityName | None = None
    title: str = Field(default="", max_length=MAX_TITLE)
    labels: Labels = Field(default_factory=dict)
    not_before: Moment | None = None
    delay: Seconds | None = None
    expires: Annotated[Seconds | Moment, Field(union_mode="left_to_right")] | None = None
    double_texting: DoubleTexting | None = None
    traceparent: Annotated[str, Field(max_length=55)] | None = None
    idempotency_key: Annotated[str, Field(min_length=1, max_length=MAX_KEY_CHARS)] | None = None

    @model_validator(mode="after")
    def _names_a_directory(self) -> Self:
        if isinstance(self.workspace, str) and git_source(self.workspace) is None and self.workspace[0] != "/":
            raise ValueError("workspace: write an absolute path of the tool workers' machine, or git+https://…#REF")
        return self

    @model_validator(mode="after")
    def _can_begin(self) -> Self:
        begins, ends = self.timing().begins(EPOCH), self.timing().ends(EPOCH)
        is_comparable = self.delay is None or not isinstance(self.expires, datetime)
        is_comparable = is_comparable and (self.not_before is None or isinstance(self.expires, datetime))
        if begins is not None and ends is not None and is_comparable and ends <= begins:
            raise ValueError("expires: it would expire before it may begin")
        return self

    @classmethod
    def parse(cls, fields: object) -> Self:
        """Return the request that a JSON object stands for.

        Raises:
            UsageError: it is not a request; names each field that cannot be used.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise UsageError(
                f"The request cannot be used: {_reasons(error)}.", remedy="See docs/producing-work.md for its fields."
            ) from None
        except UsageError as error:  # an address of a repository
            raise UsageError(f"The request cannot be used: workspace: {error}") from None

    def timing(self) -> Timing:
        """Return when the conversation may begin."""
        return Timing(self.not_before, self.delay, self.expires)

    def place(self) -> WorkspaceSpec:
        """Return the workspace that is meant."""
        if self.workspace is None:
            return WorkspaceSpec()
        if isinstance(self.workspace, WorkspaceSpec):
            return self.workspace
        source = git_source(self.workspace)
        return WorkspaceSpec(source=source) if source is not None else WorkspaceSpec(path=self.workspace)

    def tenancy(self) -> Tenancy | None:
        """Return the tenancy of the conversation; None if it has none."""
        if not (self.tenant or self.experiment or self.priority):
            return None
        return Tenancy(tenant=self.tenant, experiment=self.experiment, priority=self.priority)


def timing_of(fields: Mapping[str, Any]) -> Timing:
    """Return when a conversation may begin, from the fields of a request of these names.

    Raises:
        UsageError: they cannot be used; names each.
    """
    return TaskRequest.parse({"task": "-", **fields}).timing()


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "it is missing"
    if error["type"] == "extra_forbidden":
        near = get_close_matches(str(error["loc"][-1]), TaskRequest.model_fields, n=1) if len(error["loc"]) == 1 else []
        return "there is no such field" + "".join(f"; did you mean {name}?" for name in near)
    return str(error["msg"]).removeprefix("Value error, ")


def _reasons(error: ValidationError) -> str:
    """Return what is wrong with each field, without the values, which may be secret."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    found = [f"{'.'.join(map(str, each['loc'])) or 'the whole'}: {_reason(each)}" for each in errors[:SHOWN_ERRORS]]
    more = [f"and {len(errors) - SHOWN_ERRORS} more"] if len(errors) > SHOWN_ERRORS else []
    text = "; ".join(found + more)
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)[:1_000]
