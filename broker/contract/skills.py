"""Skills: Markdown files with instructions for an agent (OpenHands 9.7, AgentSkills).

A file is text after optional YAML front matter: `name`, `triggers` (words), `inputs` (of a task), `paths` (patterns of
files). It is shown after a message that contains a trigger, or once a matching file is used, or else always.
`AGENTS.md`, `.cursorrules` and the like are such files too; below the top folder they are shown once a file beside or
below them is used.

A folder with a `SKILL.md` is one skill (AgentSkills). Its `name` and `description` are shown; the agent reads the file,
and the folder's other files, when it needs them.

Holds: an invalid skill file is left out and reported with the reason. The cost of reading a file is linear in its
length, see `broker.runtime.front_matter`. The cost of matching a path is bounded by its length times the pattern's.
Differs: an invalid file does not affect others; the original then loads none. The front matter may name a skill; if
another file of the folder has that name, the file is named by its path, as all are in the original.
Untrusted: an author of the repository, or the agent itself, may write any of these files.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from broker.contract.agent_files import AgentFile, is_agent_file, parse_agent_file, read_agent_files
from broker.contract.markdown import (
    MAX_DESCRIPTION_CHARS,
    MAX_FILE_BYTES,
    describe_text,
    read_files,
    split_front_matter,
)
from broker.contract.plain_json import replace_surrogates
from broker.contract.specs import Skill
from broker.contract.tool_specs import SERVER_NAME_PATTERN

SKILL_FOLDERS = (".openhands/microagents", ".claude/skills", ".openhands/skills", ".agents/skills")
"""Below a workspace and a user's home directory. A skill of a later folder replaces one of the same name."""
SKILL_FILE = "SKILL.md"
NESTED_FILES = {
    "agents.md": "agents",
    "agent.md": "agents",
    "claude.md": "claude",
    "gemini.md": "gemini",
}
"""Files in any folder of a workspace, in lower case, and the skill name of each."""
INSTRUCTION_FILES = {**NESTED_FILES, ".cursorrules": "cursorrules", ".openhands_instructions": "repo_legacy"}
"""Files in the top folder of a workspace, in lower case, and the skill name of each."""
MAX_NESTED_FILES = 50
MAX_NESTED_DEPTH = 8
"""The folders above a nested file that is found, at most."""
FILE_MARK = "deckhands-skill:"
"""The prefix of a survey line that holds the path of a file and its text in base64."""
SERVER_FILES = (".mcp.json", "mcp.json")
"""Beside a `SKILL.md`: the MCP servers that the skill needs, in the usual format."""
MAX_SERVERS = 10
"""Of one skill."""
SETUP_SCRIPT, HOOK_SCRIPT = ".openhands/setup.sh", ".openhands/pre-commit.sh"
"""Scripts of a repository that run before an agent's first step and before each commit (OpenHands 10.1)."""
SCRIPT_MARK = "deckhands-script:"
"""The prefix of a survey line that names one of these scripts."""
MAX_HEAD_BYTES = 16 * 1024
"""Of the front matter of a `SKILL.md`; a survey reads no more of such a file."""
MAX_SURVEY_BYTES = 220_000
"""Of the output of a survey, with all files in base64. It has to fit into that of a command."""
MAX_SKILLS = 200
MAX_TRIGGERS = 100
MAX_PATHS = 20
"""Patterns of a skill."""
MAX_PATTERN_CHARS = 200
MAX_PATTERN_FOLDERS = 20
MAX_FOLDERS = 50
"""Above a file that patterns can match."""
MAX_NAME_CHARS = 64
MAX_UNREADABLE = 20
"""How many invalid skill files are reported."""
MAX_SHOWN_PATH_CHARS = 200
MAX_PERSONAL_CHARS = 16_000
"""The limit for a user's own skills, because they are part of a conversation's first event, which is never
shortened."""
ASK_FOR_INPUTS = "\n\nIf the person did not provide any of these variables, ask for them before you begin: {names}."

_BRACES = re.compile(r"\{([^{}]*)\}")
_AGENT_SKILL_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SkillServer:
    """An MCP server that a skill asks for. Whether it is offered is the operator's decision.

    Attributes:
        skill: the name of the skill.
        url: its address; empty for a program.
        has_own_values: its entry has headers or variables of an environment, which a skill cannot give.
    """

    skill: str
    name: str
    url: str = ""
    has_own_values: bool = False


@dataclass(frozen=True, slots=True)
class SkillFiles:
    """The skills and agents found in files.

    Attributes:
        skills: the skills in the order of the files. Of skills with the same name in two folders, only the later one.
        unreadable: the path and the error of each invalid file.
        paths: the file of each skill.
        agents: agents to delegate to, by the paths of their files; likewise one of each name.
        servers: the MCP servers that the skills ask for.
    """

    skills: tuple[Skill, ...] = ()
    unreadable: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    agents: Mapping[str, AgentFile] = field(default_factory=dict)
    servers: tuple[SkillServer, ...] = ()


NO_SKILLS = SkillFiles()


class SkillReader:
    """Collects skills and agents from the files of a workspace or a home directory, one at a time.

    Add a `SKILL.md` before the other files of its folder, which then are part of that skill.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str, Skill]] = {}  # by name: the folder, the file, the skill
        self._agents: dict[str, tuple[str, AgentFile]] = {}  # by name: the file, the agent
        self._unreadable: list[str] = []
        self._roots: set[str] = set()
        self._servers: dict[str, tuple[SkillServer, ...]] = {}  # by the folder of the skill

    def add(self, path: str, text: str) -> None:
        """Read a file, given its path in the workspace or home directory. Other files are ignored."""
        if is_agent_file(path):
            self._add_agent(path, text)
            return
        if _is_server_file(path):
            self._add_servers(path, text)
            return
        name = _name_of(path)
        if name is None or not text.strip() or self._is_resource(path):
            return
        folder = next((folder for folder in SKILL_FOLDERS if path.startswith(folder + "/")), "")
        taken = [taken for taken, (other, *_) in self._found.items() if other == folder]
        try:
            skill = parse_skill(name, text, path=path, taken=taken)
            if "mcp_tools" in text and not is_skill_file(path):
                self._servers[path] = parse_skill_servers(skill.name, split_front_matter(text)[0].get("mcp_tools"))
        except ValueError as error:
            self._unreadable.append(f"{_render_path(path)}: {error}")
            return
        self._found.pop(skill.name, None)
        self._found[skill.name] = (folder, path, skill)

    def _add_agent(self, path: str, text: str) -> None:
        try:
            agent = parse_agent_file(path, text)
        except ValueError as error:
            self._unreadable.append(f"{_render_path(path)}: {error}")
            return
        self._agents.pop(agent.name, None)
        self._agents[agent.name] = path, agent

    def _add_servers(self, path: str, text: str) -> None:
        folder, name = path.rpartition("/")[0], PurePosixPath(path).parent.name
        try:
            self._servers[folder + "/"] = parse_skill_servers(name, json.loads(text))
        except (ValueError, RecursionError) as error:
            self._unreadable.append(f"{_render_path(path)}: {error}")

    def add_surveyed(self, path: str, text: str | None) -> None:
        """Read a file of a survey; without a text, it is the first one that was left out."""
        if text is None:
            self.leave_out(path)
        else:
            self.add(path, text)

    def leave_out(self, path: str) -> None:
        """Report the first file that the survey had no room for."""
        reason = f"this file and the later ones are left out: all files have {MAX_SURVEY_BYTES:,} bytes in base64"
        self._unreadable.insert(0, f"{_render_path(path)}: {reason}")

    def _is_resource(self, path: str) -> bool:
        """Return whether a file belongs to a skill that is a folder, and record such a skill."""
        if is_skill_file(path):
            self._roots.add(path[: -len(SKILL_FILE)])
            return False
        return any(path.startswith(root) for root in self._roots)

    def to_skill_files(self) -> SkillFiles:
        """Return what was found so far."""
        left = len(self._unreadable) - MAX_UNREADABLE
        more = [f"and {left} more files"] if left > 0 else []
        return SkillFiles(
            tuple(skill for *_, skill in self._found.values()),
            (*self._unreadable[:MAX_UNREADABLE], *more),
            tuple(path for _, path, _ in self._found.values()),
            dict(self._agents.values()),
            tuple(
                server
                for place, servers in self._servers.items()
                for server in servers
                if not place.endswith("/") or place in self._roots
            ),
        )


def parse_skill(name: str, text: str, *, path: str = "", taken: Container[str] = ()) -> Skill:
    """Read a skill.

    Args:
        name: the name if the file does not give one.
        path: the name if both names are taken.
        taken: names used by other files of the same folder.

    Raises:
        ValueError: the front matter is not YAML, or its fields are invalid.
    """
    head, content = split_front_matter(text)
    given = None if _is_nested(path) else head.get("name")
    triggers = _parse_triggers(head.get("triggers"))
    paths = _parse_paths(head.get("paths"))
    inputs = head.get("inputs")
    names = [given, name] if isinstance(given, str) and given.strip() and given != "default" else [name]
    name = next((each for each in names if each not in taken), path or name)
    if isinstance(inputs, list) and inputs:
        triggers = tuple(dict.fromkeys((*triggers, f"/{name}")))
        names = [str(item["name"]) for item in inputs if isinstance(item, dict) and "name" in item]
        content += ASK_FOR_INPUTS.format(names=", ".join(names)) if names else ""
    content = replace_surrogates(content.strip())
    is_folder = is_skill_file(path)
    is_listed = is_folder and not paths and str(head.get("disable-model-invocation")).lower() != "true"
    if _is_nested(path):
        paths = (f"{escape_pattern(PurePosixPath(path).parent.as_posix())}/**",)
    return Skill(
        name=replace_surrogates(name),
        content=content,
        triggers=() if paths else triggers,
        location=replace_surrogates(path) if is_folder else None,
        description=describe_text(head.get("description"), content) if is_listed else None,
        paths=paths or None,
    )


def parse_skill_servers(skill: str, value: object) -> tuple[SkillServer, ...]:
    """Return the MCP servers that a skill asks for: those below `mcpServers`, or the value itself.

    Raises:
        ValueError: it is not in the usual format; the text says why.
    """
    entries = value.get("mcpServers", value) if isinstance(value, dict) else value
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError('it is not {"mcpServers": {NAME: {…}}}')
    if len(entries) > MAX_SERVERS:
        raise ValueError(f"it names {len(entries)} MCP servers; {MAX_SERVERS} are allowed")
    found = []
    for name, entry in entries.items():
        if not re.fullmatch(SERVER_NAME_PATTERN, name):
            raise ValueError("the name of an MCP server has letters, digits, `_` and `-`, 64 at most")
        url = entry.get("url") or ""
        if not isinstance(url, str) or not (url or entry.get("command")):
            raise ValueError(f"the MCP server {name} has neither a url nor a command")
        has_own_values = any(entry.get(field) for field in ("headers", "env", "auth", "oauth"))
        found.append(SkillServer(skill, name, replace_surrogates(url), has_own_values))
    return tuple(found)


def parse_skills(files: Iterable[tuple[str, str]]) -> SkillFiles:
    """Read skills from pairs of a path and a text, see `SkillReader`."""
    reader = SkillReader()
    for path, text in files:
        reader.add(path, text)
    return reader.to_skill_files()


def parse_surveyed_files(output: str) -> Iterator[tuple[str, str | None]]:
    """Yield the path and the text of each file of a survey; a path without a text is the first that was left out."""
    for line in output.splitlines():
        if not line.startswith(FILE_MARK):
            continue
        parts = line.removeprefix(FILE_MARK).split()
        try:
            path, *rest = (base64.b64decode(part, validate=True).decode(errors="replace") for part in parts)
            (content,) = rest or (None,)
        except (ValueError, binascii.Error):
            continue
        yield path, content


def check_skill_file(path: str, text: str) -> list[str]:
    """Return what is wrong with a skill that was parsed, as sentences, such as departures from AgentSkills."""
    head, content = split_front_matter(text)
    if not is_skill_file(path):
        return [] if content.strip() else ["it has no text"]
    folder, name, description = PurePosixPath(path).parent.name, head.get("name"), head.get("description")
    found = [] if content.strip() else ["it has no text"]
    if not isinstance(name, str):
        found.append("`name` is missing")
    elif name != folder:
        found.append(f"`name` is {name!r}, and its folder {folder!r}; both must be the same")
    elif not _AGENT_SKILL_NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        found.append(f"`name` may have {MAX_NAME_CHARS} lower-case letters, digits and single hyphens between them")
    if not description:
        found.append("`description` is missing: it tells the agent what the skill is for, and when to read it")
    elif len(str(description)) > MAX_DESCRIPTION_CHARS:
        found.append(f"`description` has {len(str(description))} characters; {MAX_DESCRIPTION_CHARS} are allowed")
    return found


def load_skills(home: Path) -> tuple[Skill, ...]:
    """Return a user's own skills below `home`. Skills beyond `MAX_PERSONAL_CHARS` are left out with a warning.

    An agent cannot read a file of `home`, so a skill that is a folder is shown, without its other files, after a
    message that contains one of its triggers or else its name.
    """
    read = parse_skills(read_skill_files(home))
    for unreadable in read.unreadable:
        _log.warning("Left out of the skills in %s: %s", home, unreadable)
    found: list[Skill] = []
    for skill in read.skills:
        if skill.location is not None:
            changes = {"location": None, "description": None, "triggers": skill.triggers or (skill.name,)}
            skill = skill.model_copy(update=changes)  # noqa: PLW2901
        if sum(len(other.content) for other in (*found, skill)) > MAX_PERSONAL_CHARS:
            _log.warning(
                "The skill %s is left out: all skills together exceed %d characters", skill.name, MAX_PERSONAL_CHARS
            )
            continue
        found.append(skill)
    return tuple(found)


def read_workspace_files(top: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file that a survey of this workspace reads, see `tool_worker.tools`."""
    above: list[Path] = []
    nested: list[Path] = []
    for folder, folders, files in os.walk(top):
        depth = len(Path(folder).relative_to(top).parts)
        kept = [name for name in folders if not name.startswith(".") and name != "node_modules"]
        folders[:] = kept if depth < MAX_NESTED_DEPTH - 1 else []
        known = NESTED_FILES if depth else INSTRUCTION_FILES
        (nested if depth else above).extend(Path(folder, name) for name in files if name.lower() in known)
    yield from read_files(top, sorted(above))
    yield from read_skill_files(top)
    yield from read_files(top, sorted(nested)[:MAX_NESTED_FILES])
    yield from read_agent_files(top)


def read_skill_files(top: Path) -> Iterator[tuple[str, str]]:
    """Yield the path below `top` and the text of each file in its folders of skills."""
    for folder in SKILL_FOLDERS:
        try:
            paths = sorted((top / folder).rglob("*.md"), key=lambda path: (path.name.lower() != "skill.md", path))
            paths += [path for name in SERVER_FILES for path in sorted((top / folder).rglob(name))]
        except OSError as error:
            _log.warning("%s cannot be read: %s", top / folder, error.strerror)
            continue
        yield from read_files(top, paths[:MAX_SKILLS])


def find_trigger(words: Iterable[str], text: str) -> str:
    """Return the first of these words that a text contains, ignoring case; empty if there is none.

    Args:
        text: the text to search, in lower case.
    """
    return next((word for word in words if word.lower() in text), "")


def is_skill_file(path: str) -> bool:
    """Return whether a file describes a skill that is a folder."""
    return path.lower().endswith("/skill.md") and path.startswith(tuple(f"{folder}/" for folder in SKILL_FOLDERS))


def _is_server_file(path: str) -> bool:
    return path.rpartition("/")[2] in SERVER_FILES and path.startswith(tuple(f"{folder}/" for folder in SKILL_FOLDERS))


def _is_nested(path: str) -> bool:
    """Return whether a file holds the instructions for its folder."""
    folder, _, name = path.rpartition("/")
    return bool(folder) and name.lower() in NESTED_FILES and not path.startswith(SKILL_FOLDERS)


def escape_pattern(path: str) -> str:
    """Return a pattern that matches this path alone."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in path)


def matches_pattern(path: str, pattern: str) -> bool:
    """Return whether a path matches a pattern: `**` stands for any folders, `*` and `?` for characters of a name.

    A pattern without `/` matches a name in any folder. Case counts.

    Args:
        path: relative to the workspace.
    """
    if path.count("/") > MAX_FOLDERS:
        return False
    wanted = (f"**/{pattern}" if "/" not in pattern else pattern.removeprefix("/")).split("/")
    reached = {0}  # numbers of the parts of the pattern that the path so far may have matched
    for part in path.split("/"):
        reached = {
            number + (wanted[number] != "**")
            for number in _skip_folders(reached, wanted)
            if number < len(wanted) and (wanted[number] == "**" or fnmatchcase(part, wanted[number]))
        }
    return len(wanted) in _skip_folders(reached, wanted)


def _skip_folders(reached: set[int], wanted: list[str]) -> set[int]:
    """Return the reached positions, and those reached by skipping a `**`, which also matches no folder."""
    found = set(reached)
    for number in range(len(wanted)):
        if number in found and wanted[number] == "**":
            found.add(number + 1)
    return found


def _name_of(path: str) -> str | None:
    """Return the name of the skill in a file: its path within its folder, without the suffix."""
    for folder in SKILL_FOLDERS:
        if path.startswith(folder + "/") and path.lower().endswith(".md"):
            inner = PurePosixPath(path).relative_to(folder)
            if is_skill_file(path):
                return inner.parent.name or None
            return None if inner.name.lower() == "readme.md" else inner.with_suffix("").as_posix()
    above, _, name = path.rpartition("/")
    if above:
        nested = NESTED_FILES.get(name.lower())
        return nested and f"{nested}:{above}"
    return INSTRUCTION_FILES.get(name.lower())


def _parse_triggers(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("`triggers` is not a list")  # noqa: TRY004  (callers collect ValueError)
    words = [replace_surrogates(word).strip() for word in value if isinstance(word, str) and word.strip()]
    if len(words) > MAX_TRIGGERS:
        raise ValueError(f"`triggers` has {len(words)} words; {MAX_TRIGGERS} are allowed")
    return tuple(words)


def _parse_paths(value: Any) -> tuple[str, ...]:
    """Return the patterns of files: a list, or text with commas, as Claude Code has it."""
    if value is None:
        return ()
    values = re.split(r",(?![^{]*})", value[:MAX_FILE_BYTES]) if isinstance(value, str) else value
    if not isinstance(values, list):
        raise ValueError("`paths` is neither a list nor text")  # noqa: TRY004  (callers collect ValueError)
    given = [text for each in values if (text := replace_surrogates(str(each)).strip().removeprefix("./"))]
    patterns = tuple(f"{each}**" if each.endswith("/") else each for text in given for each in _expand_braces(text))
    too_long = any(len(each) > MAX_PATTERN_CHARS or each.count("/") > MAX_PATTERN_FOLDERS for each in patterns)
    if too_long or len(patterns) > MAX_PATHS:
        raise ValueError(
            f"`paths` may have {MAX_PATHS} patterns of {MAX_PATTERN_CHARS} characters and {MAX_PATTERN_FOLDERS} folders"
        )
    return patterns


def _expand_braces(pattern: str) -> list[str]:
    """Expand `{a,b}` in a pattern. If there are too many results, return a few more than the limit."""
    found = [pattern]
    while len(found) <= MAX_PATHS and (braces := _BRACES.search(found[0])):
        words = braces[1].split(",")
        found = [each.replace(braces[0], word, 1) for each in found for word in words[: MAX_PATHS + 1]]
    return found


def _render_path(path: str) -> str:
    """Render an untrusted path on one line, so that it cannot imitate another path."""
    path = replace_surrogates(path)[:MAX_SHOWN_PATH_CHARS]
    return path if path.isprintable() else repr(path)
