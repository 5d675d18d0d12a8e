"""The bodies of OpenHands' requests, and their translation to tasks.

Holds: a part that a cluster cannot fulfil is refused by name, with 501; no field that changes an agent's work is
ignored. Fields that only concern the caller's process or its traces are ignored.
Does not: keep a key or an address of a model. The operator's table of models has both; a request names a model in it.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from broker.contract import (
    DEFAULT_CONDENSER,
    MAX_COMMAND_CHARS,
    AgentFile,
    AgentSpec,
    ConfirmationPolicy,
    GoalSpec,
    Limits,
    LLMSpec,
    LLMSummarizingCondenserSpec,
    LoopPolicy,
    Skill,
    WorkspaceSpec,
    make_agent_file,
    render_delegates,
)
from broker.runtime import UsageError
from deckhands.client import MAX_IMAGES, MAX_SECRETS, MAX_TASK_CHARS, MAX_TITLE, UNNAMED_TASK, ImageUrl, TaskSpec
from deckhands.server.models import MAX_MODEL
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.problems import Problem

MAX_PARTS = 100
MAX_TOOLS = 64
MAX_SKILLS = 500
MAX_HOOKS = 16
MAX_DEFINITIONS = 32
MAX_DELEGATES_CHARS = 2**20
"""Of all specifications of delegates together: each of them repeats the skills that it names."""
MAX_REFUSALS = 100
"""How often the hooks of a stop may refuse a finish."""
STOP_EVENT = '{"event_type": "Stop", "metadata": {}}'
"""What a hook of a stop reads."""
MAX_QUESTION = MAX_TASK_CHARS
NAMED_TOOLS: Mapping[str, str] = {
    "terminal": "enable_cmd",
    "file_editor": "enable_editor",
    "task_tracker": "enable_plan_mode",
    "grep": "enable_search",
    "glob": "enable_search",
    "apply_patch": "enable_patch",
    "browser_tool_set": "enable_browsing",
    "task_tool_set": "enable_delegation",
    "task": "enable_delegation",
    "delegate": "enable_delegation",
    "FinishTool": "enable_finish",
    "ThinkTool": "enable_think",
}
"""Fields of an agent's specification by the names of OpenHands' tools."""
DEFAULT_TOOLS = ("terminal", "file_editor", "task_tracker")
ANALYZERS: Mapping[str, str] = {
    "LLMSecurityAnalyzer": "llm",
    "PatternSecurityAnalyzer": "shell",
    "EnsembleSecurityAnalyzer": "ensemble",
}
"""Our analyzers by OpenHands' classes."""


def refuse(what: str, remedy: str = "") -> Problem:
    """Return the answer to a request for something that a cluster does not have."""
    return Problem(501, "not_on_a_cluster", what, remedy=remedy)


class Part(BaseModel):
    """A part of a message: a text, or pictures."""

    type: Literal["text", "image"] = "text"
    text: str = Field(default="", max_length=MAX_TASK_CHARS)
    image_urls: Annotated[list[ImageUrl], Field(max_length=MAX_IMAGES)] = []


class SentMessage(JsonBody):
    """A message to the agent.

    Attributes:
        run: whether the agent starts to work; otherwise it waits for `…/run`.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"content": [{"type": "text", "text": "List the files"}]}]}
    )

    role: Literal["user", "system", "assistant", "tool"] = "user"
    content: Annotated[list[Part], Field(max_length=MAX_PARTS)] = Field(default_factory=list)
    run: bool = False

    @field_validator("content", mode="before", json_schema_input_type=str | list[Part])
    @classmethod
    def _to_parts(cls, content: object) -> object:
        """Turn plain text, as the SDK's `Message` accepts it, into one part."""
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    @property
    def text(self) -> str:
        """The text of the message.

        Raises:
            UsageError: the message is not from the user, or has no text.
        """
        if self.role != "user":
            raise UsageError(f"role: it is {self.role}.", remedy="Only users' messages can be sent to an agent.")
        found = "\n".join(part.text for part in self.content if part.type == "text")
        if not found.strip():
            raise UsageError("content: the message has no text.", remedy="Add a part of the type text.")
        return found

    @property
    def images(self) -> tuple[str, ...]:
        """The addresses of its pictures."""
        return tuple(url for part in self.content if part.type == "image" for url in part.image_urls)


class LanguageModel(BaseModel):
    """A model of the operator's table, by its name. Its key and its address are the operator's."""

    model: str = Field(min_length=1, max_length=MAX_MODEL, examples=["anthropic/claude-sonnet-4-5"])
    temperature: float | None = Field(default=None, ge=0, le=2)
    max_output_tokens: int | None = Field(default=None, ge=1)
    caching_prompt: bool | None = None
    stream: bool = False

    def to_spec(self) -> LLMSpec:
        """Return the model of a conversation."""
        return LLMSpec(
            model=self.model,
            temperature=self.temperature,
            max_output_tokens=self.max_output_tokens,
            caching_prompt=None if self.caching_prompt in (None, True) else False,
            stream=self.stream or None,
        )


class NamedTool(BaseModel):
    """A tool by its name."""

    name: str = Field(min_length=1, max_length=256, examples=["terminal"])
    params: dict[str, Any] | None = None


class Trigger(BaseModel):
    """The words or files that bring a skill up."""

    keywords: Annotated[list[str], Field(max_length=MAX_PARTS)] | None = None
    triggers: Annotated[list[str], Field(max_length=MAX_PARTS)] | None = None
    paths: Annotated[list[str], Field(max_length=MAX_PARTS)] | None = None


class NamedSkill(BaseModel):
    """A skill with its text, and the words or files that trigger it."""

    name: str = Field(min_length=1, max_length=256, examples=["style"])
    content: str = Field(default="", examples=["Write short sentences."])
    trigger: Trigger | None = None
    description: str | None = None

    def to_skill(self) -> Skill:
        """Convert the skill to one of ours."""
        trigger = self.trigger or Trigger()
        words, paths = trigger.keywords or trigger.triggers or (), trigger.paths or None
        return Skill(name=self.name, content=self.content, triggers=tuple(words), paths=paths and tuple(paths))


class AgentContext(BaseModel):
    """The knowledge of an agent besides its task."""

    skills: Annotated[list[NamedSkill], Field(max_length=MAX_SKILLS)] = []
    system_message_suffix: str | None = None
    user_message_suffix: str | None = None
    secrets: dict[str, Any] | None = None


class CondenserChoice(BaseModel):
    """How a long history is condensed."""

    kind: str = Field(default="LLMSummarizingCondenser", examples=["LLMSummarizingCondenser"])
    max_size: int = Field(default=240, ge=4, le=100_000)
    keep_first: int = Field(default=2, ge=0, le=100_000)


class Agent(BaseModel):
    """An agent, in OpenHands' form."""

    kind: str = Field(default="Agent", max_length=100, examples=["Agent"])
    llm: LanguageModel | None = None
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS)] | None = None
    include_default_tools: list[str] = ["FinishTool", "ThinkTool"]
    filter_tools_regex: str | None = None
    agent_context: AgentContext | None = None
    condenser: CondenserChoice | None = None
    mcp_config: dict[str, Any] | None = None
    critic: dict[str, Any] | None = None
    system_prompt: str | None = None
    tool_concurrency_limit: int | None = Field(default=None, ge=1)
    acp_command: list[str] | None = None

    def to_spec(self, *, is_stuck_detected: bool, confirmation: ConfirmationPolicy) -> tuple[AgentSpec, list[str]]:
        """Return the agent's specification, and the names of its further tools.

        Raises:
            Problem: it requests a feature that a cluster does not have.
        """
        if self.mcp_config:
            raise refuse(
                "agent.mcp_config: MCP servers belong to the tool workers of a cluster.",
                "Let the operator start them there, and name their tools: `github/*`.",
            )
        for name in ("critic", "filter_tools_regex", "system_prompt"):
            if getattr(self, name):
                raise refuse(f"agent.{name}: a cluster has no such option.", "Leave it out.")
        context = self.agent_context or AgentContext()
        if context.user_message_suffix:
            raise refuse("agent.agent_context.user_message_suffix: a cluster has no such option.", "Leave it out.")
        common: dict[str, Any] = {
            "llm": self.llm.to_spec() if self.llm is not None else LLMSpec(),
            "enable_stuck_detection": is_stuck_detected,
            "confirmation": confirmation,
        }
        if self.kind == "ACPAgent":
            return AgentSpec(name=f"acp:{shlex.join(self.acp_command or [])}", **common), []
        if self.kind != "Agent":
            raise refuse(f"agent.kind: a cluster has no {ascii(self.kind)[1:-1]}.", "Use Agent or ACPAgent.")
        asked = [tool.name for tool in self.tools] if self.tools is not None else list(DEFAULT_TOOLS)
        named = {*asked, *self.include_default_tools}
        flags = dict.fromkeys(NAMED_TOOLS.values(), False)
        flags |= {NAMED_TOOLS[name]: True for name in named if name in NAMED_TOOLS}
        spec = AgentSpec(
            **common,
            **flags,
            condenser=_to_condenser(self.condenser),
            skills=tuple(skill.to_skill() for skill in context.skills),
            system_prompt_suffix=context.system_message_suffix or "",
            tool_concurrency=min(self.tool_concurrency_limit or 1, 16),
        )
        return spec, [name for name in asked if name not in NAMED_TOOLS]


def _to_condenser(asked: CondenserChoice | None) -> Any:
    if asked is None or asked.kind != "LLMSummarizingCondenser":
        return DEFAULT_CONDENSER
    return LLMSummarizingCondenserSpec(
        max_size=asked.max_size, keep_first=min(asked.keep_first, asked.max_size // 2 - 1)
    )


class AgentDefinition(BaseModel):
    """An agent that the conversation's agent may hand tasks to. It never has more rights than that one."""

    name: str = Field(min_length=1, max_length=64, examples=["reviewer"])
    description: str = Field(default="", max_length=MAX_TASK_CHARS)
    model: str = Field(default="inherit", max_length=MAX_MODEL)
    tools: Annotated[list[str], Field(max_length=MAX_TOOLS)] = []
    skills: Annotated[list[str], Field(max_length=MAX_SKILLS)] = []
    system_prompt: str = Field(default="", max_length=MAX_TASK_CHARS)
    permission_mode: str | None = None
    condenser: CondenserChoice | None = None
    hooks: dict[str, Any] | None = None
    max_iteration_per_run: int | None = None
    max_budget_per_run: float | None = None

    def to_file(self) -> AgentFile:
        """Return the agent, as if a file of the workspace had defined it.

        Raises:
            Problem: it requests a feature that a cluster does not have.
            UsageError: a field is invalid; the text names it.
        """
        if any((self.hooks or {}).values()):
            raise refuse(f"agent_definitions: the hooks of {self.name!a}.", "Send hooks of the conversation.")
        for name in ("max_iteration_per_run", "max_budget_per_run"):
            if getattr(self, name) is not None:
                raise refuse(
                    f"agent_definitions: {name} of {self.name!a}; a delegate has a share of its parent's limits.",
                    "Leave it out.",
                )
        fields = self.model_dump(include={"name", "description", "model", "tools", "permission_mode"})
        try:
            return make_agent_file(fields, self.system_prompt)
        except ValueError as error:
            raise UsageError(f"agent_definitions: {self.name!a}: {error}.", remedy="Change this definition.") from error

    def to_spec(self, file: AgentFile, parent: AgentSpec) -> AgentSpec:
        """Return the agent's specification as a delegate of `parent`, with the skills that it names.

        Raises:
            UsageError: the parent has no such skill.
        """
        if unknown := sorted(set(self.skills) - {skill.name for skill in parent.skills}):
            raise UsageError(
                f"agent_definitions: {self.name!a}: there is no skill {unknown[0]!a}.",
                remedy="Send it in agent_context.skills.",
            )
        skills = tuple(skill for skill in parent.skills if skill.name in self.skills)
        condenser = parent.condenser if self.condenser is None else _to_condenser(self.condenser)
        spec = file.make_spec(parent, model=file.model or None)
        return spec.model_copy(update={"skills": skills, "condenser": condenser})


class Policy(BaseModel):
    """When a user must confirm an action."""

    kind: str = Field(default="NeverConfirm", max_length=100, examples=["AlwaysConfirm"])
    threshold: Literal["LOW", "MEDIUM", "HIGH"] = "HIGH"
    confirm_unknown: bool = True

    def to_policy(self, analyzer: str) -> ConfirmationPolicy:
        """Convert the policy to one of ours.

        Raises:
            Problem: a cluster does not have this policy.
        """
        match self.kind:
            case "NeverConfirm":
                return ConfirmationPolicy(mode="never", analyzer=analyzer)
            case "AlwaysConfirm":
                return ConfirmationPolicy(mode="always", analyzer=analyzer)
            case "ConfirmRisky":
                return ConfirmationPolicy(
                    mode="risky", threshold=self.threshold, confirm_unknown=self.confirm_unknown, analyzer=analyzer
                )
        raise refuse(
            f"A cluster has no confirmation policy {ascii(self.kind)[1:-1]}.",
            "Use NeverConfirm, AlwaysConfirm or ConfirmRisky.",
        )


class Analyzer(BaseModel):
    """The analyzer that rates the risk of actions."""

    kind: str = Field(max_length=100, examples=["LLMSecurityAnalyzer"])


def to_analyzer(asked: Analyzer | None) -> str:
    """Return the name of a risk analyzer.

    Raises:
        Problem: a cluster does not have this analyzer.
    """
    if asked is None:
        return "none"
    if asked.kind not in ANALYZERS:
        raise refuse(f"A cluster has no analyzer {ascii(asked.kind)[1:-1]}.", f"Use {', '.join(ANALYZERS)}.")
    return ANALYZERS[asked.kind]


class WorkingDirectory(BaseModel):
    """The directory that the agent works in."""

    working_dir: str = Field(
        default="workspace/project", min_length=1, max_length=4_096, examples=["workspace/project"]
    )
    kind: str = Field(default="LocalWorkspace", max_length=100)


class Hook(BaseModel):
    """A command that runs before an agent stops."""

    type: str = Field(default="command", max_length=100)
    command: str = Field(default="", max_length=MAX_COMMAND_CHARS, examples=["./check.sh"])
    timeout: int = Field(default=60, ge=1, le=3_600, description="seconds")


class HookMatcher(BaseModel):
    """Hooks for some events. Hooks for a stop cannot be restricted further."""

    matcher: str = Field(default="*", max_length=1_000)
    hooks: Annotated[list[Hook], Field(max_length=MAX_HOOKS)] = Field(default_factory=list)


class HookConfig(BaseModel):
    """Commands that run at events of a conversation. A cluster runs those of a stop, as the check of a goal."""

    stop: Annotated[list[HookMatcher], Field(max_length=MAX_HOOKS)] = Field(default_factory=list)
    pre_tool_use: list[dict[str, Any]] = Field(default_factory=list)
    post_tool_use: list[dict[str, Any]] = Field(default_factory=list)
    user_prompt_submit: list[dict[str, Any]] = Field(default_factory=list)
    session_start: list[dict[str, Any]] = Field(default_factory=list)
    session_end: list[dict[str, Any]] = Field(default_factory=list)

    def to_goal(self) -> GoalSpec | None:
        """Convert the hooks for a stop to a goal that they check; None if there are none.

        Each hook reads the event as JSON. An exit code of 2 refuses the finish, and the agent reads the output.

        Raises:
            Problem: there are other hooks.
        """
        for name in ("pre_tool_use", "post_tool_use", "user_prompt_submit", "session_start", "session_end"):
            if getattr(self, name):
                raise refuse(
                    f"hook_config.{name}: such hooks are the operator's on a cluster.",
                    "See docs/security.md#hooks, or leave it out.",
                )
        hooks = [hook for matcher in self.stop for hook in matcher.hooks]
        if any(hook.type != "command" or not hook.command.strip() for hook in hooks):
            raise refuse("hook_config.stop: a cluster runs commands only.", "Leave the other hooks out.")
        if not hooks:
            return None
        calls = [f"printf %s '{STOP_EVENT}' | ({hook.command}\n); [ $? -ne 2 ] || exit 1" for hook in hooks]
        seconds = float(sum(hook.timeout for hook in hooks))
        return GoalSpec(check="\n".join(calls), max_refusals=MAX_REFUSALS, timeout_seconds=seconds)


class StuckThresholds(BaseModel):
    """How often an agent may repeat itself."""

    action_observation: int = Field(default=4, ge=2, le=20)
    action_error: int = Field(default=3, ge=2, le=20)
    monologue: int = Field(default=3, ge=2, le=20)
    alternating_pattern: int = Field(default=6, ge=3, le=20)


Secrets = Annotated[dict[str, Any], Field(max_length=MAX_SECRETS, repr=False)]
Tags = Annotated[dict[str, str], Field(max_length=32)]


class StartConversation(JsonBody):
    """A new conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "agent": {"kind": "Agent", "llm": {"model": "anthropic/claude-sonnet-4-5"}},
                    "workspace": {"working_dir": "workspace/project"},
                    "initial_message": {"content": [{"type": "text", "text": "List the files"}]},
                }
            ]
        }
    )

    agent: Agent | None = None
    agent_settings: Agent | None = None
    agent_profile_id: UUID | None = None
    workspace: WorkingDirectory = WorkingDirectory()
    conversation_id: UUID | None = None
    parent_conversation_id: UUID | None = None
    confirmation_policy: Policy = Policy()
    security_analyzer: Analyzer | None = None
    initial_message: SentMessage | None = None
    max_iterations: int = Field(default=500, ge=1, le=1_000_000)
    stuck_detection: bool = True
    stuck_detection_thresholds: StuckThresholds | None = None
    secrets: Secrets = Field(default_factory=dict)
    secrets_encrypted: bool = False
    client_tools: list[dict[str, Any]] = Field(default_factory=list)
    plugins: list[dict[str, Any]] | None = None
    hook_config: HookConfig | None = None
    agent_definitions: Annotated[list[AgentDefinition], Field(max_length=MAX_DEFINITIONS)] = Field(default_factory=list)
    worktree: bool = False
    tags: Tags = Field(default_factory=dict)

    def to_task(self, directory: str | None) -> tuple[TaskSpec, bool]:
        """Return the task, and whether it has a message.

        Args:
            directory: a directory of the tool workers; None for an empty workspace.

        Raises:
            Problem: it requests a feature that a cluster does not have.
            UsageError: a field is invalid; the text names it.
        """
        try:
            return self._to_task(directory)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise UsageError(f"{place or 'agent'}: {first['msg']}."[:500], remedy="Change this field.") from None

    def _to_task(self, directory: str | None) -> tuple[TaskSpec, bool]:
        self._check()
        agent = self.agent or self.agent_settings
        if agent is None:
            raise UsageError("agent: it is missing.", remedy="Send `agent` or `agent_settings`.")
        confirmation = self.confirmation_policy.to_policy(to_analyzer(self.security_analyzer))
        spec, tools = agent.to_spec(is_stuck_detected=self.stuck_detection, confirmation=confirmation)
        if self.hook_config is not None:
            spec = spec.model_copy(update={"goal": self.hook_config.to_goal()})
        if self.stuck_detection_thresholds is not None:
            spec = spec.model_copy(update={"loop_policy": LoopPolicy(**dict(self.stuck_detection_thresholds))})
        spec = self._add_delegates(spec, tools)
        first = self.initial_message
        of_agent = (agent.agent_context.secrets or {}) if agent.agent_context is not None else {}
        fields: dict[str, Any] = {
            "task": first.text if first is not None else UNNAMED_TASK,
            "images": first.images if first is not None else (),
            "agent": spec,
            "tools": tuple(tools),
            "workspace": WorkspaceSpec(path=directory),
            "limits": Limits(max_iterations=self.max_iterations),
            "secrets": to_secret_values({**of_agent, **self.secrets}),
            "labels": self.tags,
            "headless": False,
        }
        return TaskSpec.parse(fields), first is not None

    def _add_delegates(self, agent: AgentSpec, tools: Collection[str]) -> AgentSpec:
        """Add the agents that were sent, if the agent has a tool to hand tasks to them.

        Args:
            tools: the tools of the operator that this conversation has.
        """
        if not self.agent_definitions or not agent.enable_delegation:
            return agent
        for definition in self.agent_definitions:
            for name in definition.tools:
                if any(fnmatchcase(name, tool) or fnmatchcase(tool, name) for tool in tools):
                    raise refuse(
                        f"agent_definitions: the tool {name!a} of {definition.name!a}; delegates get none of the "
                        "operator's tools.",
                        "Leave it out.",
                    )
        files = [definition.to_file() for definition in self.agent_definitions]
        delegates = {
            file.name: definition.to_spec(file, agent)
            for file, definition in zip(files, self.agent_definitions, strict=True)
        }
        if len(delegates) < len(files):
            raise UsageError("agent_definitions: two have the same name.", remedy="Rename one of them.")
        size = sum(len(delegate.model_dump_json()) for delegate in delegates.values())
        if size > MAX_DELEGATES_CHARS:
            raise UsageError(
                f"agent_definitions: with their skills they have {size:,} characters; {MAX_DELEGATES_CHARS:,} are "
                "allowed.",
                remedy="Name fewer skills, or shorten the instructions.",
            )
        prompt = render_delegates({file.name: file.description for file in files})
        suffix = "\n".join(filter(None, (agent.system_prompt_suffix, prompt)))
        return agent.model_copy(update={"delegates": delegates, "system_prompt_suffix": suffix})

    def _check(self) -> None:
        """Refuse features that a cluster does not have."""
        if self.agent_profile_id is not None:
            raise refuse("agent_profile_id: a cluster has no agent profiles.", "Send `agent`.")
        if self.parent_conversation_id is not None:
            raise refuse("parent_conversation_id: agents of a cluster start their own delegates.", "Leave it out.")
        if self.secrets_encrypted:
            raise refuse("secrets_encrypted: this server does not hand out encrypted secrets.", "Send their values.")
        if self.client_tools:
            raise refuse(
                "client_tools: tools run on the tool workers of a cluster.", "Let the operator offer them there."
            )
        if self.plugins:
            raise refuse("plugins: this server loads no code of its clients.", "Send skills; hooks are the operator's.")
        if self.worktree:
            raise refuse("worktree: each conversation of a cluster has its own workspace.", "Leave it out.")


def to_secret_values(secrets: Mapping[str, Any]) -> dict[str, str]:
    """Return secrets by name. No error text contains a value.

    Raises:
        Problem: a secret must be looked up.
        UsageError: a secret has no value.
    """
    found = {}
    for name, secret in secrets.items():
        value = secret
        if isinstance(secret, Mapping):
            if secret.get("kind", "StaticSecret") != "StaticSecret":
                raise refuse(f"secrets: {ascii(name)[:100]} would have to be looked up.", "Send its value.")
            value = secret.get("value")
        if not isinstance(value, str):
            raise UsageError(f"secrets: {ascii(name)[:100]} has no value.", remedy="Send a text.")
        found[name] = value
    return found


class ConfirmationReply(JsonBody):
    """An answer about the action that awaits confirmation."""

    accept: bool = Field(examples=[True])
    reason: str = Field(default="User rejected the action.", max_length=500)


class ChangedPolicy(JsonBody):
    """Another confirmation policy."""

    policy: Policy = Field(examples=[{"kind": "AlwaysConfirm"}])


class ChangedAnalyzer(JsonBody):
    """Another risk analyzer; null for none."""

    security_analyzer: Analyzer | None = Field(examples=[{"kind": "LLMSecurityAnalyzer"}])


class ChangedSecrets(JsonBody):
    """Secrets by name: texts, or `StaticSecret`s."""

    secrets: Secrets = Field(examples=[{"TOKEN": "abc-123-def"}])


class ChangedConversation(JsonBody):
    """Other metadata; null leaves it unchanged."""

    title: str | None = Field(default=None, min_length=1, max_length=MAX_TITLE, pattern=r"\S", examples=["Files"])
    tags: Tags | None = None


class ChangedModel(JsonBody):
    """Another model of the operator's table."""

    llm: LanguageModel


class ChangedProfile(JsonBody):
    """Another model of the operator's table, by its name."""

    profile_name: str = Field(min_length=1, max_length=MAX_MODEL, examples=["fast"])


class Question(JsonBody):
    """A question to the agent beside its work."""

    question: str = Field(min_length=1, max_length=MAX_QUESTION, examples=["What are you working on?"])


class NewFork(JsonBody):
    """A copy of a conversation, which can be continued."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"title": "Another try"}]})

    id: UUID | None = None
    title: str | None = Field(default=None, max_length=MAX_TITLE)
    tags: Tags | None = None
    reset_metrics: bool = True
    from_event_id: str | None = Field(default=None, max_length=100)
