"""`deckhands skills`: the skills that an agent finds in a folder, their errors, and skills from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from broker.contract import (
    Skill,
    check_skill_file,
    load_agent_files,
    load_skills,
    parse_skills,
    read_agent_files,
    read_skill_files,
    read_workspace_files,
)
from broker.runtime import UsageError, format_count
from deckhands.cli.command_group import with_options
from deckhands.cli.options import json_option
from deckhands.cli.skill_packages import SKILLS, check_pins, fetch_skills, install_skills, read_pins, remove_skill
from deckhands.client import clean_line, note, print_json, print_text, render_table

SECTION = "Start a conversation"
SUMMARIES = {"skills": "List, check and install the skills, instructions and agents that an agent finds in a folder."}
AGENT_USE = "with --delegation"
SERVER_USE = "tools of an MCP server, if the operator allows it"

HEAD = ("SKILL", "SHOWN", "CHARS", "FILE")
MOST_SHOWN = 60
"""Characters of the column SHOWN."""

folder_argument = click.argument(
    "folder", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="[FOLDER]"
)


@dataclass(frozen=True, slots=True)
class SkillCheckOptions:
    """Options of `skills check`."""

    folder: Path


@dataclass(frozen=True, slots=True)
class SkillListOptions:
    """Options of `skills ls`."""

    folder: Path
    as_json: bool


@dataclass(frozen=True, slots=True)
class SkillAddOptions:
    """Options of `skills add`."""

    source: str
    commit: str | None
    sha256: str | None
    only: tuple[str, ...]
    folder: Path


@dataclass(frozen=True, slots=True)
class SkillRemovalOptions:
    """Options of `skills rm`."""

    name: str
    folder: Path


into_option = click.option(
    "--into",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path.home,
    show_default="your home directory",
    metavar="FOLDER",
    help="The workspace or home directory that has the skills below .agents/skills.",
)


@click.group()
def skills() -> None:
    """List, check and install the skills, instructions and agents that an agent finds in a folder.

    Nothing is started.
    """


@skills.command("ls")
@folder_argument
@json_option
@with_options(SkillListOptions)
def list_skills(options: SkillListOptions) -> None:
    """List the skills of the workspace FOLDER (by default this one) and your own, with when the agent reads each.

    Files that define agents to delegate tasks to, and the MCP servers that skills ask for, are listed as well.
    """
    own = {skill.name: skill for skill in load_skills(Path.home())}
    read = parse_skills(read_workspace_files(options.folder))
    problems = list(read.unreadable)
    try:
        pins = {f"{SKILLS}/{name}/SKILL.md": pin for name, pin in read_pins(options.folder).items()}
    except UsageError as error:
        pins = {}
        problems.append(error.message)
    listed = [*zip(read.skills, read.paths, strict=True)]
    replaced = {skill.name for skill in read.skills}
    listed += [(skill, "~") for name, skill in own.items() if name not in replaced]
    agents = [*read.agents.items()]
    agents += [("~", agent) for agent in load_agent_files(Path.home()) if agent not in read.agents.values()]
    if options.as_json:
        for skill, path in listed:
            origin = {"source": pins[path].source, "pin": pins[path].pin} if path in pins else {}
            shown = {"file": path, "shown": describe_use(skill), **origin}
            print_json({**shown, **skill.model_dump(mode="json", exclude_none=True)})
        for path, agent in agents:
            about = {"name": agent.name, "description": agent.description, "instructions": agent.instructions}
            print_json({"file": path, "shown": AGENT_USE, **about})
        for server in read.servers:
            print_json({"server": server.name, "skill": server.skill, "url": server.url, "shown": SERVER_USE})
    else:
        rows = [
            (
                clean_line(skill.name),
                clean_line(describe_use(skill))[:MOST_SHOWN],
                str(len(skill.content)),
                clean_line(f"{path} ({pins[path].source}, {pins[path].pin[:19]})" if path in pins else path),
            )
            for skill, path in listed
        ]
        rows += [(agent.name, AGENT_USE, str(len(agent.instructions)), clean_line(path)) for path, agent in agents]
        rows += [
            (server.name, SERVER_USE, "", clean_line(f"{server.url or 'a program'} (of the skill {server.skill})"))
            for server in read.servers
        ]
        print_text("\n".join(render_table(HEAD, rows)))
    for problem in problems:
        note(f"Left out: {problem}")


@skills.command("check")
@folder_argument
@with_options(SkillCheckOptions)
def check_skills(options: SkillCheckOptions) -> int:
    """Check the files of skills and agents in the workspace FOLDER, and your own, and installed skills by their pins.

    The exit code is 1 if something is wrong.
    """
    checked = 0
    problems: list[str] = []
    places = [("", dict(read_workspace_files(options.folder)))]
    if options.folder.resolve() != Path.home():
        places.append(("~/", dict([*read_skill_files(Path.home()), *read_agent_files(Path.home())])))
    for place, files in places:
        read = parse_skills(files.items())
        problems += [f"{place}{problem}" for problem in check_pins(Path.home() if place else options.folder)]
        checked += len(read.paths) + len(read.agents) + len(read.unreadable)
        problems += [f"{place}{problem}" for problem in read.unreadable]
        for path in read.paths:
            problems += [f"{place}{clean_line(path)}: {problem}" for problem in check_skill_file(path, files[path])]
    for problem in problems:
        print_text(problem)
    note(f"{format_count(checked, 'file')} checked, {format_count(len(problems), 'problem')} found.")
    return int(bool(problems))


@skills.command("add")
@click.argument("source")
@click.option("--commit", metavar="HASH", help="The commit of the repository SOURCE, in full.")
@click.option("--sha256", metavar="HASH", help="The digest of the archive SOURCE, which `sha256sum` prints.")
@click.option("--skill", "only", multiple=True, metavar="NAME", help="Install this skill only; repeatable.")
@into_option
@with_options(SkillAddOptions)
def add_skills(options: SkillAddOptions) -> None:
    """Install the skills of a Git repository or an archive SOURCE, an address or a path, as pinned.

    An installed skill is replaced. `skills check` compares installed skills with their pins.
    """
    chosen = fetch_skills(options.source, commit=options.commit, digest=options.sha256, only=options.only)
    pin = (options.commit or f"sha256:{(options.sha256 or '').removeprefix('sha256:')}").lower()
    for path in install_skills(options.folder, chosen, source=options.source, pin=pin):
        print_text(path)
    note(f"{format_count(len(chosen), 'skill')} installed in {options.folder}.")


@skills.command("rm")
@click.argument("name")
@into_option
@with_options(SkillRemovalOptions)
def remove(options: SkillRemovalOptions) -> None:
    """Remove the installed skill NAME."""
    remove_skill(options.folder, options.name)
    note(f"The skill {options.name} was removed from {options.folder}.")


def describe_use(skill: Skill) -> str:
    """Return when an agent reads a skill."""
    if skill.paths:
        return f"with a file {', '.join(skill.paths)}"
    parts = []
    if skill.description is not None and skill.location:
        parts.append("when needed")
    if skill.triggers:
        parts.append(f"with {', '.join(skill.triggers)}")
    return ", or ".join(parts) or ("never" if skill.location else "always")
