"""The options for a task, its agent and its workspace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from pydantic import ValidationError

from broker.contract import (
    IMAGE_SANDBOXES,
    MAX_SCHEMA_CHARS,
    AgentSpec,
    ConfirmationPolicy,
    CriticSpec,
    GoalSpec,
    Limits,
    LLMSpec,
    OutputSpec,
    PlanSpec,
    Skill,
    Tenancy,
    WorkspaceNeeds,
    WorkspaceSpec,
    load_skills,
    parse_host_rules,
)
from broker.runtime import UsageError
from broker.secrets import SecretValue
from deckhands.cli.delegate_options import check_takes_tools, with_delegates
from deckhands.cli.field_options import add_generated_options, option_of
from deckhands.cli.options import NAME_REMEDY, Amount, parse_memory, sandbox_option
from deckhands.cli.selection import parse_labels
from deckhands.client import (
    TaskSpec,
    WorkspaceInput,
    check_acp_command,
    check_task,
    parse_workspace,
    to_confirmation_policy,
    to_image_urls,
    to_output_spec,
)

BROWSER_POOL = "browser"
IPYTHON_POOL = "ipython"
"""The prefix of the names of scripted models."""
BROWSING_AGENTS = ("BrowsingAgent", "BrowsingAgentSDK", "VisualBrowsingAgent")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOptions:
    """The options that `spec_options` adds to a command: a field for each, under click's name.

    Attributes:
        critic: None for no critic; "" for a critic without instructions.
        memory: the project whose notes are kept; None keeps none.
        generated: fields of `TaskSpec` given by options of `add_generated_options`.
    """

    title: str
    labels: tuple[str, ...]
    tenant: str
    experiment: str
    priority: str | None
    agent: str
    plan: str | None
    model: str | None
    max_iterations: int
    max_budget: float | None
    max_tokens: int | None
    max_seconds: float | None
    tools: tuple[str, ...]
    output_schema: Path | None
    pictures: tuple[str, ...]
    secrets: tuple[str, ...] = field(repr=False)
    check: str | None
    critic: str | None
    critic_model: str | None
    max_refusals: int
    memory: str | None
    user: str
    confirm: str
    confirm_within: float | None
    confirm_default: Literal["reject", "confirm", "stop"] | None
    confirm_reminder: float | None
    clone_depth: int | None
    clone_secret: str
    browser: bool
    browser_delegate: bool
    delegates: tuple[str, ...]
    has_delegation: bool
    ipython: bool
    patch: bool
    sandbox: str | None
    image: str
    needs: tuple[str, ...]
    memory_gib: float | None
    disk_gib: float | None
    cpus: float | None
    network: bool
    allow: tuple[str, ...]
    generated: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(SpecOptions):
    """The options that `task_options` adds to a command.

    Attributes:
        argument: the task as an argument; `text` and `file` are the options for it.
    """

    argument: str | None
    text: str | None
    file: Path | None


_SIZE = Amount(min=0, min_open=True, max=1e6)
_TEXTS = (
    click.argument("argument", metavar="[TASK]", required=False),
    click.option("-t", "--task", "text", help="The task. Without one, standard input is read."),
    click.option(
        "-f", "--file", type=click.Path(path_type=Path), help="A file that holds the task; - is standard input."
    ),
)
_OPTIONS = (
    option_of("title"),
    click.option(
        "--label", "labels", multiple=True, metavar="KEY=VALUE", help="A label, to find it again. May be repeated."
    ),
    option_of("tenant"),
    option_of("experiment"),
    option_of("priority"),
    click.option(
        "--agent",
        default=TaskSpec.model_fields["agent"].default,
        show_default=True,
        help="The agent; acp:COMMAND for a program that speaks the Agent Client Protocol.",
    ),
    click.option(
        "--plan",
        type=click.Choice(["ask", "auto"]),
        help="Plan first and change nothing; --agent then carries out the plan, at once (auto) or when you "
        "agree (ask).",
    ),
    click.option("--model", help="The model it uses; LLM_MODEL by default."),
    click.option(
        "-i",
        "--max-iterations",
        type=click.IntRange(min=1),
        default=Limits().max_iterations,
        show_default=True,
        help="The most iterations.",
    ),
    click.option("-b", "--max-budget", type=Amount(min=0, min_open=True), help="Its budget, in USD."),
    click.option("--max-tokens", type=click.IntRange(min=1), help="The most tokens of all model calls, in and out."),
    click.option(
        "--max-seconds",
        type=Amount(min=0, min_open=True),
        help="How long the agent may work, in seconds.",
    ),
    click.option(
        "--tool",
        "tools",
        multiple=True,
        metavar="KEY",
        help="A tool that tool workers offer, such as weather or github/*. May be repeated.",
    ),
    click.option(
        "--output-schema",
        type=click.Path(path_type=Path),
        help="A file with a JSON Schema for the output that the agent must return when it finishes.",
    ),
    click.option(
        "--picture",
        "pictures",
        multiple=True,
        metavar="FILE|URL",
        help="A picture that belongs to the task: PNG, JPEG, GIF or WebP. May be repeated.",
    ),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="NAME[=VALUE|@SOURCE:PATH]",
        help="Give a secret to commands that name it, and hide its value everywhere. NAME alone takes the value from "
        "the environment and keeps it out of the process list; with @, tool workers look it up in a source of their "
        "operator. May be repeated.",
    ),
    click.option("--check", metavar="COMMAND", help="A command that must exit with 0 for a finish to count."),
    click.option(
        "--critic", metavar="TEXT", help="Let a model judge each finish by these instructions, which may be empty ('')."
    ),
    click.option("--critic-model", help="The model that judges; by default the agent's."),
    click.option(
        "--max-refusals",
        type=click.IntRange(min=0),
        default=3,
        show_default=True,
        help="How often --check and --critic may refuse a finish.",
    ),
    click.option("--memory", metavar="PROJECT", help="Let the agent keep notes under this name, and recall them."),
    click.option("--user", default="", help="The user of the notes; by default they are shared."),
    click.option(
        "--confirm",
        metavar="MODE",
        default="never",
        show_default=True,
        help="Which actions need confirmation before they run: never, risky, always, or a plug-in.",
    ),
    click.option(
        "--confirm-within",
        type=Amount(min=0, min_open=True),
        metavar="SECONDS",
        help="How long a question waits for its answer; by default without limit.",
    ),
    click.option(
        "--confirm-default",
        type=click.Choice(["reject", "confirm", "stop"]),
        help="The answer after that time; by default `reject`, after which the agent continues.",
    ),
    click.option(
        "--confirm-reminder",
        type=Amount(min=0, min_open=True),
        metavar="SECONDS",
        help="When to record a reminder of a question, which webhooks can send.",
    ),
    click.option("--clone-depth", type=click.IntRange(min=1), help="How many commits to clone."),
    click.option("--clone-secret", default="", metavar="NAME", help="The secret that a git+… URL needs."),
    click.option(
        "--browser", is_flag=True, help="Let it use a web browser. Needs tool workers that serve the pool browser."
    ),
    click.option("--browser-delegate", is_flag=True, help="Let it delegate web browsing to BrowsingAgent."),
    click.option(
        "--delegate",
        "delegates",
        multiple=True,
        metavar="NAME[=FILE]",
        help="An agent that it can hand tasks to: a known one, such as ReadOnlyAgent, or one that a JSON or Markdown "
        "file describes. May be repeated.",
    ),
    click.option(
        "--delegation",
        "has_delegation",
        is_flag=True,
        help="Let it hand tasks to other agents: those that files in .agents/agents, .openhands/agents and "
        ".claude/agents of the workspace and of your home directory define, and the known ones.",
    ),
    click.option(
        "--ipython", is_flag=True, help="Let it run cells of Python. Needs tool workers that serve the pool ipython."
    ),
    click.option(
        "--patch", is_flag=True, help="Let the agent change several files in one call with the tool apply_patch."
    ),
    sandbox_option,
    click.option("--image", default="", help="The image of the container, for --sandbox docker or kubernetes."),
    click.option(
        "--need",
        "needs",
        multiple=True,
        metavar="LABEL",
        help="A label that the node must have, such as gpu; see DECKHANDS_LABELS. May be repeated.",
    ),
    click.option("--need-memory", "memory_gib", type=_SIZE, help="Memory that its programs need together, in GiB."),
    click.option("--need-disk", "disk_gib", type=_SIZE, help="Disk that the workspace needs, in GiB."),
    click.option("--need-cpus", "cpus", type=_SIZE, help="CPUs that it needs."),
    click.option("--network", is_flag=True, help="Let the agent's commands reach the network."),
    click.option(
        "--allow",
        multiple=True,
        metavar="HOST",
        help="A host that commands may reach without --network, such as example.com or *.example.com:443. May be "
        "repeated.",
    ),
)


def workspace_option(*, default: str | None) -> Callable[[F], F]:
    """Return the option -w.

    Args:
        default: "." for a command whose workers run here; None for one whose workspace is empty without it.
    """
    directory = "The directory to work on (by default the current one)"
    if default is None:
        directory = "A directory on the tool workers' host (by default an empty one)"
    return click.option(
        "-w",
        "--workspace",
        metavar="DIR|URL|FILE",
        default=default,
        help=f"{directory}, git+https://…#REF, or an archive or bundle.",
    )


def spec_options(command: F) -> F:
    """Add the options that describe a conversation; `SpecOptions` has a field for each."""
    command = add_generated_options(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def task_options(command: F) -> F:
    """Add the options for a task and its conversation; `TaskOptions` has a field for each."""
    command = spec_options(command)
    for option in reversed(_TEXTS):
        command = option(command)
    return command


def spec_of(
    options: SpecOptions,
    text: str,
    *,
    agent: AgentSpec,
    workspace: WorkspaceSpec,
    secrets: Mapping[str, SecretValue],
    **own: Any,
) -> TaskSpec:
    """Return the task that the options describe.

    Args:
        text: the text of the task.
        own: fields that only some commands have options for.

    Raises:
        UsageError: a field is invalid; the text names it.
    """
    check_task(text)
    fields = {"task": text, "agent": agent, "workspace": workspace, "secrets": secrets, "limits": limits_of(options)}
    labels = parse_labels(options.labels)
    return TaskSpec.parse({**fields, "tools": options.tools, "labels": labels, **fields_of(options), **own})


def fields_of(options: SpecOptions) -> dict[str, Any]:
    """Return the options that are fields of a task in the same form.

    Raises:
        UsageError: the name of a tenant or an experiment is invalid, or a picture cannot be used.
    """
    asked = {"tenant": options.tenant, "experiment": options.experiment, "priority": options.priority}
    try:
        tenancy = dict(Tenancy.model_validate({name: value for name, value in asked.items() if value}))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise UsageError(f"--{name} is {asked[name]!r}.", remedy=NAME_REMEDY) from None
    images = to_image_urls(options.pictures) or ()
    return {"title": options.title, "images": images, **tenancy, **options.generated}


def place_of(text: str | None, options: SpecOptions) -> WorkspaceInput:
    """Return the workspace of -w, or an empty one; see `place_in`, also for the errors raised."""
    if text is None:
        return WorkspaceInput()
    if not text.strip():
        raise UsageError("-w names no workspace.", remedy="Name one, or leave -w out.")
    return parse_workspace(text, clone_depth=options.clone_depth, clone_secret=options.clone_secret)


def workspace_of(options: SpecOptions, place: WorkspaceInput, sandbox: str) -> WorkspaceSpec:
    """Return the workspace that the options describe.

    Args:
        sandbox: the default.

    Raises:
        UsageError: the options about the network or the image contradict each other.
    """
    try:
        parse_host_rules(options.allow)
    except ValueError as error:
        raise UsageError(f"--allow: {error}.", remedy="Write example.com or *.example.com:8443.") from error
    if options.network and options.allow:
        raise UsageError("--network already allows every host, so --allow has no effect.", remedy="Use one of them.")
    chosen = options.sandbox or sandbox
    if options.image and chosen not in IMAGE_SANDBOXES:
        raise UsageError("--image is for containers.", remedy=f"Add --sandbox {' or '.join(IMAGE_SANDBOXES)}.")
    pool = "bash"
    if options.browser or options.browser_delegate or options.agent in BROWSING_AGENTS:
        pool = BROWSER_POOL
    elif options.ipython:
        pool = IPYTHON_POOL
    return WorkspaceSpec.model_validate(
        {
            "path": str(place.path) if place.path is not None else None,
            "source": place.source,
            "sandbox": chosen,
            "image": options.image,
            "network": options.network,
            "allow": options.allow,
            "pool": pool,
            "needs": _needs(options),
        }
    )


def _needs(options: SpecOptions) -> WorkspaceNeeds | None:
    if not (options.needs or options.memory_gib or options.disk_gib or options.cpus):
        return None
    try:
        return WorkspaceNeeds(
            labels=options.needs,
            memory_bytes=_bytes(options.memory_gib),
            disk_bytes=_bytes(options.disk_gib),
            cpus=options.cpus,
        )
    except ValidationError as error:
        raise UsageError(
            f"--need: {error.errors()[0]['msg']}.", remedy="A label has up to 64 letters, digits, '.', '_' and '-'."
        ) from error


def _bytes(gib: float | None) -> int | None:
    return max(1, round(gib * 2**30)) if gib is not None else None


def agent_of(options: SpecOptions, model: str | None) -> AgentSpec:
    """Return the agent that the options describe.

    Raises:
        UsageError: an option has no effect for this agent, or a named file is invalid.
    """
    for option, is_given in (
        ("--delegate", options.delegates),
        ("--delegation", options.has_delegation),
        ("--ipython", options.ipython),
        ("--patch", options.patch),
    ):
        if is_given:
            check_takes_tools(options.agent, option)
    check_acp_command(options.agent)
    policy = _policy_of(options)
    plan = PlanSpec(executor=options.agent, needs_approval=options.plan == "ask") if options.plan else None
    agent = AgentSpec(
        name="PlanningAgent" if plan else options.agent,
        plan=plan,
        llm=LLMSpec(model=model),
        goal=_goal_of(options),
        output=_output_in(options.output_schema) if options.output_schema else None,
        memory=None if options.memory is None else parse_memory(options.memory, options.user),
        confirmation=policy,
        skills=_skills_of_person(),
        enable_workspace_skills=True,
        enable_browsing=options.browser,
        enable_browsing_delegate=options.browser_delegate,
        enable_jupyter=options.ipython,
        enable_patch=options.patch,
    )
    return with_delegates(agent, options.delegates, has_delegation=options.has_delegation)


def _skills_of_person() -> tuple[Skill, ...]:
    try:
        return load_skills(Path.home())
    except RuntimeError:  # the user has no home directory
        return ()


def _policy_of(options: SpecOptions) -> ConfirmationPolicy:
    policy = to_confirmation_policy(options.confirm)
    times = {
        "deadline_seconds": options.confirm_within,
        "default": options.confirm_default,
        "reminder_seconds": options.confirm_reminder,
    }
    try:
        return ConfirmationPolicy(**{**policy.model_dump(), **times})
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"The confirmation policy cannot be used: {why}.", remedy="See `deckhands run --help`."
        ) from error


def _goal_of(options: SpecOptions) -> GoalSpec | None:
    check, instructions, model = options.check, options.critic, options.critic_model
    has_critic = instructions is not None or model is not None
    if not check and not has_critic:
        return None
    if len(instructions or "") > MAX_SCHEMA_CHARS:
        raise UsageError(
            f"The critic's instructions have more than {MAX_SCHEMA_CHARS:,} characters.", remedy="Shorten them."
        )
    critic = CriticSpec(llm=LLMSpec(model=model) if model else None, instructions=instructions or "")
    return GoalSpec(check=check or None, critic=critic if has_critic else None, max_refusals=options.max_refusals)


def _output_in(file: Path) -> OutputSpec:
    try:
        schema = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"The file {file} cannot be read: {error.strerror}.", remedy="Name another with --output-schema."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The file {file} is not JSON: {error}.", remedy="Write a JSON Schema into it.") from error
    if not isinstance(schema, dict):
        raise UsageError(f"The file {file} does not hold an object.", remedy="Write a JSON Schema into it.")
    return to_output_spec(schema)


def limits_of(options: SpecOptions) -> Limits:
    """Return the limits that the options describe."""
    return Limits(
        max_iterations=options.max_iterations,
        max_budget_usd=options.max_budget,
        max_tokens=options.max_tokens,
        max_seconds=options.max_seconds,
    )
