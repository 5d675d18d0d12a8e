"""Options that several verbs share, and the task as a person gives it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import ValidationError

from broker.contract.allowed_hosts import host_rules
from broker.contract.confirmation_policy import ConfirmationPolicy
from broker.contract.events import AgentSpec, Limits, LLMSpec, WorkspaceSpec
from broker.contract.skills import skills_in
from broker.contract.specs import CriticSpec, GoalSpec, MemorySpec, OutputSpec, PlanSpec, Skill
from broker.contract.tool_specs import MAX_SCHEMA_CHARS
from broker.contract.workspace_sources import GitSource, UploadedSource, format_of, git_source
from broker.coordination.stored_files import check_size, stored_file_name
from broker.runtime.errors import UsageError
from deckhands.client.tasks import check_task, output_of
from deckhands.settings import SANDBOXES

BROWSER_POOL = "browser"
NAME_REMEDY = "Use up to 64 letters, digits, '.', '_' and '-'."
"""For a tenant, an experiment, a user or a project."""
BROWSING_AGENTS = ("BrowsingAgent", "VisualBrowsingAgent")

F = TypeVar("F", bound=Callable[..., Any])

sandbox_option = click.option(
    "--sandbox", type=click.Choice(SANDBOXES), help="What commands run in; DECKHANDS_SANDBOX, or else auto."
)
workspace_root_option = click.option(
    "--workspace-root",
    "workspace_roots",
    multiple=True,
    metavar="DIR",
    help="A directory that conversations may name as their workspace, with all below it; several times. None if not "
    "given; DECKHANDS_WORKSPACE_ROOTS.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")


@dataclass(frozen=True, slots=True)
class Place:
    """Where to work; neither a path nor a source: in an empty directory.

    Attributes:
        content: of a file that is uploaded.
    """

    path: Path | None = None
    source: GitSource | UploadedSource | None = None
    content: bytes | None = None


def task_options(command: F) -> F:
    """Add what describes a task and the agent that does it."""
    options = (
        click.argument("argument", metavar="[TASK]", required=False),
        click.option("-t", "--task", "text", help="The task. If it is not given at all, standard input is read."),
        click.option(
            "-f", "--file", type=click.Path(path_type=Path), help="A file that holds the task; - is standard input."
        ),
        click.option("--title", default="", help="A name for listings; the task's first line if not given."),
        click.option("--agent", default="CodeActAgent", show_default=True, help="Which agent does it."),
        click.option(
            "--plan",
            type=click.Choice(["ask", "auto"]),
            help="Plan first, changing nothing; --agent carries the plan out, once a person agrees (ask) or at once.",
        ),
        click.option("--model", help="Which model it uses; LLM_MODEL if not given."),
        click.option("-i", "--max-iterations", type=click.IntRange(min=1), default=500, show_default=True),
        click.option("-b", "--max-budget", type=click.FloatRange(min=0, min_open=True), help="In USD."),
        click.option("--max-tokens", type=click.IntRange(min=1), help="Of all model calls, in and out."),
        click.option("--max-seconds", type=click.FloatRange(min=0, min_open=True), help="How long the agent may work."),
        click.option(
            "--tool",
            "tools",
            multiple=True,
            metavar="KEY",
            help="A tool that tool workers offer, such as weather or github/*; may be given several times.",
        ),
        click.option(
            "--output-schema",
            type=click.Path(path_type=Path),
            help="A JSON Schema, in a file, of what the agent has to hand in when it finishes.",
        ),
        click.option(
            "--secret",
            "secrets",
            multiple=True,
            metavar="NAME[=VALUE]",
            help="Give it to commands that name it, and hide its value everywhere. Without =VALUE, which others may "
            "see in the list of processes, it is the variable of this environment.",
        ),
        click.option("--check", metavar="COMMAND", help="What must end with exit code 0 for a finish to count."),
        click.option("--critic", metavar="TEXT", help="Let a model judge each finish; what it is to look at, or ''."),
        click.option("--critic-model", help="Which model that is; the agent's if not given."),
        click.option(
            "--max-refusals",
            type=click.IntRange(min=0),
            default=3,
            show_default=True,
            help="How often --check and --critic may refuse a finish.",
        ),
        click.option("--memory", metavar="PROJECT", help="Let the agent keep notes under this name and recall them."),
        click.option("--user", default="", help="Whose notes those are; everybody's if not given."),
        click.option(
            "--confirm",
            type=click.Choice(["never", "risky", "always"]),
            default="never",
            show_default=True,
            help="Which actions a person must confirm before they run.",
        ),
        click.option("--clone-depth", type=click.IntRange(min=1), help="How many commits are cloned."),
        click.option("--clone-secret", default="", metavar="NAME", help="The secret that a git+… URL needs."),
        click.option(
            "--browser", is_flag=True, help="Let it use a web browser; tool workers have to serve the pool browser."
        ),
        click.option("--browser-delegate", is_flag=True, help="Let it hand what needs a web browser to BrowsingAgent."),
        sandbox_option,
        click.option("--image", default="", help="Of the container, for --sandbox docker."),
        click.option("--network", is_flag=True, help="Let the agent's commands reach the network."),
        click.option(
            "--allow",
            multiple=True,
            metavar="HOST",
            help="A host that they may reach without it, such as example.com or *.example.com:443; several times.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_task(*texts: str | None, file: Path | None) -> str:
    """Return the task from the command line, the file or standard input.

    Raises:
        UsageError: there is none, two are given, or it cannot be used.
    """
    task = given_text(*texts, file=file)
    if task is None:
        if sys.stdin.isatty():
            raise UsageError("No task is given.", remedy="Give it by -t TEXT, by -f FILE or on standard input.")
        task = _standard_input()
    check_task(task)
    return task


def given_text(*texts: str | None, file: Path | None) -> str | None:
    """Return the one text that is given on the command line or in the file; None when none is.

    Raises:
        UsageError: two are given, or the file cannot be read.
    """
    given = [text for text in texts if text is not None]
    if len(given) + (file is not None) > 1:
        raise UsageError("The text is given more than once.", remedy="Give it as an argument, by -t or by -f.")
    if file is None:
        return given[0] if given else None
    if file == Path("-"):
        return _standard_input()
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The file {file} cannot be read: {error.strerror}.", remedy="Name another by -f.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The file {file} is not text in UTF-8.", remedy="Name another by -f.") from error


def _standard_input() -> str:
    try:
        text = sys.stdin.read()
        text.encode()  # in the locale C, what is no text has come through as surrogates
    except UnicodeError as error:
        raise UsageError("What standard input holds is not text in UTF-8.", remedy="Convert it.") from error
    return text


def place_of(text: str | None, options: dict[str, Any]) -> Place:
    """Return where to work: a directory, `git+https://…#ref`, or an archive or bundle that is uploaded.

    Raises:
        UsageError: the address cannot be used, or the file cannot be read or is too large.
    """
    if text is None:
        return Place()
    if not text.strip():  # a variable that is not set, and not the current directory
        raise UsageError("No workspace is named by -w.", remedy="Name one, or leave -w out.")
    source = git_source(text, depth=options["clone_depth"], secret=options["clone_secret"])
    if source is not None:
        return Place(source=source)
    name, _, ref = text.partition("#")
    form = format_of(name)
    if form is None or Path(text).is_dir():
        return Place(path=Path(text))
    try:
        check_size(Path(name).stat().st_size, f"The file {name}")
        content = Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"The file {name} cannot be read: {error.strerror}.", remedy="Name another by -w.") from error
    parcel = stored_file_name(content)
    if ref and form != "bundle":
        raise UsageError(f"{name} is no bundle; it has no {ref!r}.", remedy="Leave out what stands behind the #.")
    try:
        uploaded = UploadedSource(name=Path(name).name, format=form, parcel=parcel, ref=ref)
    except ValueError as error:
        raise UsageError(f"{ref!r} is no branch, tag or commit.", remedy="Name one behind the #.") from error
    return Place(source=uploaded, content=content)


def workspace_of(options: dict[str, Any], place: Place, sandbox: str) -> WorkspaceSpec:
    """Return the workspace that the options describe.

    Args:
        sandbox: the one to use if none is given.

    Raises:
        UsageError: what of the network they ask for is not clear.
    """
    try:
        host_rules(options["allow"])
    except ValueError as error:
        raise UsageError(f"--allow: {error}.", remedy="Write example.com or *.example.com:8443.") from error
    if options["network"] and options["allow"]:
        raise UsageError("With --network there is nothing to --allow.", remedy="Give one of them.")
    chosen = options["sandbox"] or sandbox
    if options["image"] and chosen != "docker":
        raise UsageError("An image is for containers.", remedy="Give --sandbox docker as well.")
    return WorkspaceSpec.model_validate(
        {
            "path": str(place.path) if place.path is not None else None,
            "source": place.source,
            "sandbox": chosen,
            "image": options["image"],
            "network": options["network"],
            "allow": options["allow"],
            "pool": BROWSER_POOL if _needs_browser(options) else "bash",
        }
    )


def _needs_browser(options: dict[str, Any]) -> bool:
    return options["browser"] or options["browser_delegate"] or options["agent"] in BROWSING_AGENTS


def agent_of(options: dict[str, Any], model: str | None) -> AgentSpec:
    """Return the agent that the options describe."""
    policy = ConfirmationPolicy(mode=options["confirm"])
    plan = PlanSpec(executor=options["agent"], needs_approval=options["plan"] == "ask") if options["plan"] else None
    return AgentSpec(
        name="PlanningAgent" if plan else options["agent"],
        plan=plan,
        llm=LLMSpec(model=model),
        goal=_goal_of(options),
        output=_output_in(options["output_schema"]) if options["output_schema"] else None,
        memory=None if options["memory"] is None else memory_of(options["memory"], options["user"]),
        confirmation=policy,
        skills=_skills_of_person(),
        enable_workspace_skills=True,
        enable_browsing=options["browser"],
        enable_browsing_delegate=options["browser_delegate"],
    )


def _skills_of_person() -> tuple[Skill, ...]:
    try:
        return skills_in(Path.home())
    except RuntimeError:  # a user without a home
        return ()


def memory_of(project: str, user: str) -> MemorySpec:
    """Return which notebook is meant.

    Raises:
        UsageError: it cannot have such a name.
    """
    try:
        return MemorySpec(user=user, project=project)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise UsageError(
            f"A {name} cannot be called {user if name == 'user' else project!r}.",
            remedy=NAME_REMEDY,
        ) from None


def _goal_of(options: dict[str, Any]) -> GoalSpec | None:
    check, instructions, model = options["check"], options["critic"], options["critic_model"]
    has_critic = instructions is not None or model is not None
    if not check and not has_critic:
        return None
    if len(instructions or "") > MAX_SCHEMA_CHARS:
        raise UsageError(
            f"What the critic is to look at has more than {MAX_SCHEMA_CHARS:,} characters.", remedy="Say it shorter."
        )
    critic = CriticSpec(llm=LLMSpec(model=model) if model else None, instructions=instructions or "")
    return GoalSpec(check=check or None, critic=critic if has_critic else None, max_refusals=options["max_refusals"])


def _output_in(file: Path) -> OutputSpec:
    try:
        schema = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"The file {file} cannot be read: {error.strerror}.", remedy="Name another by --output-schema."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The file {file} is not JSON: {error}.", remedy="Write a JSON Schema into it.") from error
    if not isinstance(schema, dict):
        raise UsageError(f"The file {file} holds no object.", remedy="Write a JSON Schema into it.")
    return output_of(schema)


def limits_of(options: dict[str, Any]) -> Limits:
    """Return the limits that the options describe."""
    return Limits(
        max_iterations=options["max_iterations"],
        max_budget_usd=options["max_budget"],
        max_tokens=options["max_tokens"],
        max_seconds=options["max_seconds"],
    )
